"""What a hook region holds is let go as soon as nobody can ask for it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import paddle
import pytest
from support import FusedLinear, growth, held, hooked, param, plain, tensor

import paramproxy
from paramproxy import keep, recompute, set_checkpoint_early_stop


SIZE = 2**14
BYTES = 4 * SIZE


class Token:
    """Dies with the function that holds it."""


def region_of(token, w):
    def region(a):
        assert token
        return paddle.exp(paddle.tanh(a * w))

    return region


@pytest.mark.parametrize("ending", ["backward", "dropped", "kept graph", "grad", "one output"])
def test_the_function_and_its_inputs_go(ending):
    gc.collect()
    gc.disable()
    try:
        token, w = Token(), param(np.ones(4))
        dead = weakref.ref(token)
        y = hooked(region_of(token, w), tensor(np.ones(4)) * 1.0).sum()
        del token
        assert dead() is not None
        if ending == "backward":
            y.backward()  # and the loss is held
        elif ending == "kept graph":
            y.backward(retain_graph=True)
            assert dead() is not None
            y.backward()
        elif ending == "grad":
            paddle.grad(y, [w])
            assert dead() is not None  # the graph can be used again
            del y
        else:
            del y
        assert dead() is None
    finally:
        gc.enable()


def chain(run, x, blocks=4):
    for _ in range(blocks):
        x = run(lambda a: paddle.tanh(paddle.exp(paddle.tanh(paddle.exp(a * 0.1)))), x)
    return x


def test_after_forward_only_the_inputs_are_kept():
    x = tensor(np.zeros(SIZE))
    vectors = {run: held(lambda run=run: chain(run, x * 1.0)) / BYTES for run in (plain, hooked)}
    assert vectors[plain] == pytest.approx(16, abs=0.1)
    assert vectors[hooked] == pytest.approx(5, abs=0.1)


def test_after_backward_only_the_result_is_kept():
    x = tensor(np.zeros(SIZE))

    def step():
        x.clear_gradient(False)
        y = chain(hooked, x * 1.0)
        y.sum().backward()
        return y

    assert held(step) / BYTES == pytest.approx(1, abs=0.1)


def test_a_half_used_graph_keeps_no_more_than_without():
    x = tensor(np.zeros(SIZE))

    def half(run):
        one, other = run(lambda a: (paddle.exp(a), paddle.tanh(a)), x * 1.0)
        one.sum().backward(retain_graph=True)
        x.clear_gradient(False)
        return other

    assert held(lambda: half(hooked)) <= held(lambda: half(plain)) + 4 * BYTES


def fails_the_second_time():
    calls = []

    def region(a):
        calls.append(1)
        b = paddle.tanh(a)
        if len(calls) == 2:
            raise ValueError
        return paddle.exp(b)

    return region


def differs_the_second_time():
    calls = []

    def region(a):
        calls.append(1)
        return paddle.exp(paddle.tanh(a) if len(calls) == 1 else paddle.tanh(a[:4]))

    return region


def inner_replay_that_fails(x):
    inner = fails_the_third_time()
    return hooked(lambda a: hooked(inner, paddle.exp(a)), x)


def fails_the_third_time():
    calls = []

    def region(a):
        calls.append(1)
        b = paddle.tanh(a)
        if len(calls) == 3:
            raise ValueError
        return paddle.exp(b)

    return region


def overwrites(x, w):
    with set_checkpoint_early_stop(False):
        return hooked(lambda a: paddle.exp(a).add_(w.detach()) * 1.0, x)


def backward_that_fails(y):
    with pytest.raises(OSError, match=r"Replay|Mutation"):
        y.sum().backward()


STEPS = {
    "step": lambda x, w: hooked(lambda a: paddle.tanh(paddle.exp(a) * w), x).sum().backward(),
    "layer": lambda x, w: (
        hooked(
            lambda a: FusedLinear.apply(paddle.exp(a).reshape([128, 128]), w.reshape([128, 128])), x
        )
        .sum()
        .backward()
    ),
    "dropped": lambda x, w: hooked(lambda a: paddle.tanh(paddle.exp(a) * w), x),
    "grad": lambda x, w: paddle.grad(hooked(lambda a: paddle.exp(a) * w, x).sum(), [w]),
    "create graph": lambda x, w: paddle.grad(
        hooked(lambda a: a * a * w, x).sum(), [w], create_graph=True
    ),
    "one of two": lambda x, w: (
        hooked(lambda a: (paddle.exp(a), paddle.tanh(a)), x)[0].sum().backward()
    ),
    "failing replay": lambda x, w: backward_that_fails(hooked(fails_the_second_time(), x)),
    "failing inner replay": lambda x, w: backward_that_fails(inner_replay_that_fails(x)),
    "overwritten": lambda x, w: backward_that_fails(overwrites(x, w)),
    "other replay": lambda x, w: backward_that_fails(hooked(differs_the_second_time(), x)),
    "saved": lambda x, w: (
        hooked(lambda a: paddle.tanh(paddle.exp(a) * w), x, policy=paramproxy.save_everything)
        .sum()
        .backward()
    ),
    "saved and dropped": lambda x, w: hooked(
        lambda a: paddle.tanh(paddle.exp(a) * w), x, policy=paramproxy.save_everything
    ),
    "kept": lambda x, w: hooked(lambda a: paddle.exp(keep(paddle.tanh, a)) * w, x).sum().backward(),
    "kept and dropped": lambda x, w: hooked(lambda a: paddle.exp(keep(paddle.tanh, a)) * w, x),
    "kept, reentrant": lambda x, w: (
        recompute(lambda a: paddle.exp(keep(paddle.tanh, a)) * w, x).sum().backward()
    ),
    "kept and dropped, reentrant": lambda x, w: recompute(
        lambda a: paddle.exp(keep(paddle.tanh, a)) * w, x
    ),
    "nested": lambda x, w: (
        hooked(lambda a: hooked(lambda b: paddle.tanh(hooked(paddle.exp, b) * w), paddle.exp(a)), x)
        .sum()
        .backward()
    ),
    "layers, nested": lambda x, w: (
        hooked(
            lambda a: hooked(
                lambda b: FusedLinear.apply(paddle.exp(b), w), FusedLinear.apply(a, w)
            ),
            x,
        )
        .sum()
        .backward()
    ),
    "nested and dropped": lambda x, w: hooked(
        lambda a: hooked(lambda b: paddle.tanh(paddle.exp(b) * w), paddle.exp(a)), x
    ),
}


@pytest.mark.parametrize("make", [fails_the_second_time, differs_the_second_time])
def test_a_failed_replay_needs_no_garbage_collector(make):
    gc.collect()
    gc.disable()
    try:
        region = make()
        dead = weakref.ref(region)
        backward_that_fails(hooked(region, tensor(np.ones(8)) * 1.0))
        del region
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", list(STEPS))
def test_no_step_leaves_a_byte_behind(name):
    x, w = tensor(np.zeros((128, 128))), param(np.zeros((128, 128)))

    def step():
        STEPS[name](x * 1.0, w)
        x.clear_gradient(False)
        w.clear_gradient(False)

    assert growth(step) == 0
