"""`keep`: run once, whatever is run again around it."""

from __future__ import annotations

import functools
import gc
import itertools
import random

import numpy as np
import paddle
import pytest
from support import (
    MODES,
    Counted,
    FusedLinear,
    held,
    hooked,
    param,
    plain,
    same,
    seed,
    tensor,
    values,
)

from paramproxy import is_recomputing, keep, recompute


@pytest.mark.parametrize("run", MODES)
def test_it_runs_once_and_the_rest_twice(run):
    kept, around = Counted(paddle.tanh), Counted(paddle.exp)
    x = tensor([0.5])
    run(lambda a: paddle.exp(keep(kept, around(a))), x * 1.0).sum().backward()
    assert (kept.calls, around.calls) == (1, 2)
    e = np.exp(0.5)
    assert values(x.grad)[0] == pytest.approx(np.exp(np.tanh(e)) / np.cosh(e) ** 2 * e, rel=1e-5)


def test_outside_of_a_region_it_is_a_plain_call():
    assert keep(lambda a, *, b: (a, b), 1, b=2) == (1, 2)


def attention(q, *, k, scale):
    return paddle.nn.functional.softmax(paddle.matmul(q, k) * scale), scale


def block(a, w, u):
    """Arguments, keywords, captured tensors, parameters of all kinds, containers, constants."""
    q, k = paddle.tanh(a * w), paddle.exp(a * 0.1)
    p, scale = keep(attention, q, k=k, scale=0.5)
    both = keep(lambda pair, weights: [pair["x"] * weights[0] * q, k], {"x": p}, (u,))
    last = keep(FusedSquare.apply, both[0] + both[1])
    return last * scale + a


class FusedSquare(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, dy):
        (a,) = ctx.saved_tensor()
        return dy * 2.0 * a


MODES_NESTED = [m for depth in (1, 2, 3) for m in itertools.product([True, False], repeat=depth)]


@pytest.mark.parametrize("modes", MODES_NESTED)
def test_gradients(modes):
    def wrap(function):
        for mode in reversed(modes):
            function = functools.partial(recompute, function, use_reentrant=mode)
        return function

    def scenario(run):
        seed()
        x, w, u = tensor(np.eye(3) * 0.5 + 0.1), param(np.full((3, 3), 0.3)), param(np.ones((3, 3)))
        h = run(block)(x * 1.0, w, u)
        y = run(block)(h, w, u)
        y.sum().backward()
        return [t.numpy() for t in (y, x.grad, w.grad, u.grad)]

    for got, expected in zip(scenario(wrap), scenario(lambda f: f)):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("modes", MODES_NESTED)
def test_it_runs_once_however_deep(modes):
    kept = Counted(paddle.tanh)

    def function(a):
        return paddle.exp(keep(kept, paddle.exp(a)))

    for mode in reversed(modes):
        function = functools.partial(recompute, function, use_reentrant=mode)
    function(tensor([1.0]) * 1.0).sum().backward()
    assert kept.calls == 1


@pytest.mark.parametrize("run", MODES)
def test_a_fused_weight_gradient_reaches_the_parameter(run):
    def scenario(run):
        x, w = tensor([[1.0, 2.0]]), param([[3.0], [4.0]])
        run(lambda a, p: paddle.tanh(keep(FusedLinear.apply, a * 0.1, p)), x * 1.0, w).backward()
        return values(x.grad), values(w.main_grad), w.hits, w.grad is None

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("cut", [lambda a: a.detach(), lambda a: paddle.ones([2])])
def test_a_weight_that_only_it_reads_has_its_gradient(run, cut):
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y = run(
            lambda a: (paddle.tanh(a), keep(lambda b: paddle.exp(b * w), cut(a) * 0.1)), x * 1.0
        )
        (y[0].sum() + y[1].sum()).backward()
        return values(x.grad), values(w.grad)

    same(scenario, runs=(run,))


SCALE = tensor([0.3, 0.5])


@pytest.mark.parametrize("run", MODES)
def test_a_global_tensor_that_only_it_reads_has_its_gradient(run):
    def scenario(run):
        x = tensor([1.0, 2.0])
        SCALE.clear_gradient(False)
        run(
            lambda a: a * keep(lambda t: paddle.tanh(t * SCALE), a.detach()), x * 1.0
        ).sum().backward()
        return values(x.grad), values(SCALE.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_what_it_returns_has_its_flags(run):
    seen = []

    def region(a, m):
        out = keep(lambda a, m: (a * 2.0, m, paddle.argmax(a), "text", None), a, m)
        seen.append([out[2].stop_gradient, *out[3:]])
        return out[0] * out[1]

    x, m = tensor([1.0, 2.0]), tensor([1.0, 0.0], grad=False)
    run(region, x * 1.0, m).sum().backward()
    assert values(x.grad) == [2.0, 0.0]
    assert seen[0] == [True, "text", None]
    assert seen[-1] == seen[0]


@pytest.mark.parametrize("run", MODES)
def test_random_numbers_around_it_are_those_of_the_first_run(run):
    def scenario(run):
        dropout = paddle.nn.functional.dropout
        x = tensor(np.ones(32))
        y = run(lambda a: dropout(paddle.exp(keep(dropout, a, 0.5)), 0.5) * a, x * 1.0)
        y.sum().backward()
        return values(y), values(paddle.rand([2]))

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_what_is_drawn_after_a_random_call_is_the_same_in_both_runs(run):
    drawn = []

    def draw(a):
        return a * np.random.rand() * random.random() * paddle.rand([4])

    def region(a):
        b = keep(draw, a)
        mask = paddle.rand([4])
        drawn.append((values(mask), np.random.rand(), random.random()))
        return paddle.exp(b * mask)

    run(region, tensor(np.ones(4)) * 1.0).sum().backward()
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("modes", MODES_NESTED)
def test_what_is_drawn_after_a_random_call_in_nested_regions(modes):
    def nested(function, *args):
        for mode in modes:
            function = functools.partial(recompute, function, use_reentrant=mode)
        return function(*args)

    def scenario(run):
        dropout = paddle.nn.functional.dropout
        x = tensor(np.ones(16))

        def block(a):
            return run(lambda b: paddle.exp(keep(dropout, b, 0.5) * 0.1), a) * paddle.rand([16])

        run(block, x * 1.0).sum().backward()
        return values(x.grad), values(paddle.rand([2]))

    same(scenario, runs=(nested,))


@pytest.mark.parametrize("run", MODES)
def test_a_weight_that_was_passed_and_that_it_captures_is_told_of_its_gradient_once(run):
    def scenario(run):
        w, x = param([2.0, 3.0]), tensor([0.5, 1.0])
        told = []
        w.register_hook(lambda g: told.append(values(g)))

        def region(q, weights):
            return run_kept(lambda q: paddle.tanh(q * weights[0]), q * 2.0) + q

        run_kept = plain if run is plain else keep
        (run(region, x * 1.0, (w,)) + x * w).sum().backward()
        return told, values(w.grad), values(x.grad)

    same(scenario, runs=[run])


class Written(paddle.nn.Layer):
    """Its buffer, or what is kept under a name, is another after each call."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("state", paddle.ones([2]))
        self.norm = paddle.nn.BatchNorm1D(2, data_format="NLC")
        self.table = None

    def forward(self, x):
        with paddle.no_grad():
            if self.how == "in place":
                self.state.add_(x.mean(axis=0))
            elif self.how == "set_value":
                self.state.set_value(self.state + x.mean(axis=0))
            elif self.how == "exchanged":
                self.state = self.state + x.mean(axis=0)
            elif self.how == "made at the first call" and self.table is None:
                self.table = x.mean(axis=0)
        return self.norm(x) if self.how == "batch norm" else x * 2.0

    def read(self, x):
        if self.how == "batch norm":
            return x * self.norm._mean.clone() * self.norm._variance.clone()
        return x * (self.state if self.table is None else self.table).clone()


WAYS_TO_WRITE = ["in place", "set_value", "exchanged", "made at the first call", "batch norm"]


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize("how", WAYS_TO_WRITE)
@pytest.mark.parametrize("modes", [[run.values[0]] for run in MODES] + [[recompute, hooked]])
def test_what_is_read_of_a_buffer_after_a_kept_call_is_the_same_in_both_runs(modes, how):
    """A replay skips the call, and what it has written all the same."""

    def scenario(run):
        runs = modes if run is keep else [plain]
        layer = Written(how)
        x = tensor([[0.5, 1.0], [2.0, 3.0]])

        def inner(q):
            # What a batch norm writes bumps no version, so the replay reads it here as
            # the first run has left it.
            first = q if how == "batch norm" else layer.read(q)
            kept = run(layer, q * 3.0)
            after = layer.read(paddle.tanh(kept))
            return first + after + layer(q) * layer.read(paddle.tanh(q))

        def outer(q):
            return runs[-1](inner, paddle.exp(q)) * 2.0

        for _ in range(2):
            runs[0](outer, x * 1.0).sum().backward()
        return values(x.grad), [values(buffer) for buffer in layer.buffers()]

    expected = scenario(plain)
    assert scenario(keep) == expected


@pytest.mark.parametrize("run", MODES)
def test_it_is_no_replay_and_a_keep_in_it_is_a_plain_call(run):
    inner, seen = Counted(paddle.exp), []

    def kept(a):
        seen.append(is_recomputing())
        return keep(inner, a) * 2.0

    x = tensor([0.0])
    run(lambda a: paddle.exp(keep(kept, a)), x * 1.0).sum().backward()
    assert (inner.calls, seen) == (1, [False])


@pytest.mark.parametrize("run", MODES)
def test_a_region_in_it_is_recomputed(run):
    inner = Counted(lambda a: paddle.tanh(paddle.exp(a)))
    x = tensor([0.1])

    def scenario(run, keep):
        x.clear_gradient(False)
        run(lambda a: paddle.exp(keep(lambda b: run(inner, b), a * 1.0)), x * 1.0).sum().backward()
        return values(x.grad)

    expected = scenario(plain, lambda f, *a: f(*a))
    inner.calls = 0
    assert scenario(run, keep) == pytest.approx(expected)
    assert inner.calls == 2


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_a_kept_call_of_a_region_in_it(run, inner):
    kept, around = Counted(paddle.nn.functional.sigmoid), Counted(paddle.exp)

    def scenario(run, inner, keep):
        x = tensor([0.1, 0.2])

        def block(a):
            return paddle.tanh(keep(kept, around(a)))

        run(lambda a: keep(lambda b: inner(block, b) * b, a * 2.0), x * 1.0).sum().backward()
        return values(x.grad)

    expected = scenario(plain, plain, lambda f, *a: f(*a))
    kept.calls = around.calls = 0
    assert scenario(run, inner, keep) == pytest.approx(expected)
    assert (kept.calls, around.calls) == (1, 2)


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_a_region_that_is_all_there_is_in_it(run, inner):
    """Nothing else of the outer region's graph holds what the outer region has kept."""

    def scenario(run, inner, keep):
        x = tensor([0.1, 0.2])
        y = run(
            lambda a: keep(lambda b: inner(lambda c: paddle.tanh(paddle.exp(c)), b), a), x * 1.0
        )
        gc.collect()
        y.sum().backward()
        return values(x.grad)

    expected = scenario(plain, plain, lambda f, a: f(a))
    assert scenario(run, inner, keep) == pytest.approx(expected)


SIZE = 2**14


@pytest.mark.parametrize("run", MODES)
def test_what_it_costs_is_what_it_returns_and_saves(run):
    x = tensor(np.zeros(SIZE))

    def region(a, keep):
        b = paddle.exp(paddle.tanh(paddle.exp(a)))
        return paddle.exp(paddle.tanh(keep(paddle.tanh, b)))

    def vectors(keep):
        return held(lambda: run(functools.partial(region, keep=keep), x * 1.0)) / (4 * SIZE)

    assert vectors(lambda f, a: f(a)) == pytest.approx(2, abs=0.1)
    assert vectors(keep) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("run", MODES)
def test_an_exception_in_it_is_its_own(run):
    def fails(a):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(lambda a: keep(fails, a), tensor([1.0]) * 1.0)
    x = tensor([1.0])
    run(lambda a: keep(paddle.exp, a), x * 1.0).sum().backward()
    assert values(x.grad) == pytest.approx([np.e])


def test_changing_what_it_returned_is_named():
    def region(a):
        b = keep(paddle.tanh, a)
        c = paddle.exp(b)
        b.add_(paddle.ones([1]))
        return c

    with pytest.raises(OSError, match="changed in place"):
        hooked(region, tensor([1.0]) * 1.0).sum().backward()


def test_double_gradients_go_through_it():
    def scenario(run):
        x = tensor([2.0])
        y = run(lambda a: keep(lambda b: b * b * b, a) * a, x * 1.0).sum()
        (g,) = paddle.grad(y, [x], create_graph=True)
        g.sum().backward()
        return values(g), values(x.grad)

    same(scenario, ([32.0], [48.0]), runs=(hooked,))
