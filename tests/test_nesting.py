"""Regions inside of regions, of both modes: gradients, counts, and bytes given back."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import paddle
import pytest
from support import HAS_PEAK, Counted, held, param, peak, plain, seed, tensor, values

from paramproxy import recompute


def nest(modes, function):
    """`function`, in a region of each of these modes, the first outermost."""
    for mode in reversed(modes):
        function = functools.partial(recompute, function, use_reentrant=mode)
    return function


COMBINATIONS = [
    modes for depth in (2, 3) for modes in itertools.product([True, False], repeat=depth)
]


@pytest.mark.parametrize("modes", COMBINATIONS)
def test_gradients_and_counts(modes):
    def scenario(wrap):
        seed()
        x, w, u = tensor([1.0, 2.0]), param([3.0, 4.0]), param([0.5, 0.25])
        innermost = Counted(lambda a, p: paddle.tanh(a * p) * u)

        def run(function, *args):
            return wrap(function)(*args)

        h = run(innermost, x * 1.0, w)
        h = run(innermost, h, w)
        y = paddle.nn.functional.dropout(h, 0.5) * h
        y.sum().backward()
        return innermost.calls, [values(t) for t in (y, x.grad, w.grad, u.grad)]

    once, expected = scenario(lambda f: f)
    calls, got = scenario(lambda f: nest(modes, f))
    assert got == expected
    assert calls == once * (len(modes) + 1)


@pytest.mark.parametrize("modes", [m for m in COMBINATIONS if not any(m)])
def test_what_the_reentrant_mode_refuses_works_nested(modes):
    def scenario(wrap):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y = wrap(lambda a: a * a * a * w)(x * 1.0).sum()
        (one,) = paddle.grad(y, [x], create_graph=True)
        (one * one).sum().backward(retain_graph=True)
        y.backward()
        return values(one), values(x.grad), values(w.grad)

    assert scenario(lambda f: nest(modes, f)) == scenario(lambda f: f)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_chain_of_regions_in_a_region(outer, inner):
    def scenario(run, inner_run):
        x, weights = tensor(np.ones(4)), [param(np.full(4, 0.5 + i)) for i in range(4)]

        def chain(h):
            for w in weights:
                h = inner_run(lambda a, p: paddle.tanh(a * p) + paddle.exp(a * 0.1), h, w)
            return h

        run(chain, run(chain, x * 1.0)).sum().backward()
        return values(x.grad), [values(w.grad) for w in weights]

    expected = scenario(plain, plain)
    got = scenario(
        functools.partial(recompute, use_reentrant=outer),
        functools.partial(recompute, use_reentrant=inner),
    )
    assert got == expected


SIZE = 2**16
BYTES = 4 * SIZE


def deep(h, run):
    """Four inner regions of four activations each."""
    for _ in range(4):
        h = run(lambda a: paddle.tanh(paddle.exp(paddle.tanh(paddle.exp(a * 0.1)))), h)
    return h


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_after_forward_only_the_outer_input_is_kept(outer, inner):
    x = tensor(np.zeros(SIZE))
    inner_run = functools.partial(recompute, use_reentrant=inner)
    kept = held(lambda: recompute(deep, x * 1.0, inner_run, use_reentrant=outer))
    assert kept / BYTES == pytest.approx(2, abs=0.1)  # the input and the result


@pytest.mark.skipif(not HAS_PEAK, reason="this Paddle can't reset the peak")
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_in_backward_the_inner_activations_are_not_there_at_once(outer, inner):
    """Without inner regions a replay of the outer one holds all sixteen."""
    x = tensor(np.zeros(SIZE))

    def step(inner_run):
        x.clear_gradient(False)
        recompute(deep, x * 1.0, inner_run, use_reentrant=outer).sum().backward()

    inner_run = functools.partial(recompute, use_reentrant=inner)
    step(plain)
    step(inner_run)
    alone = peak(lambda: step(plain)) / BYTES
    nested = peak(lambda: step(inner_run)) / BYTES
    assert alone >= 16
    assert nested <= 14
