"""The replay of the hook engine ends with the last tensor that is needed."""

from __future__ import annotations

import contextlib
import gc
import sys

import numpy as np
import paddle
import pytest
from support import (
    HAS_PEAK,
    Counted,
    FusedLinear,
    growth,
    hooked,
    param,
    peak,
    plain,
    tensor,
    values,
)

from paramproxy import recompute, set_checkpoint_early_stop
from paramproxy._compat import PACKED_VALUES_LEAK


def test_the_tail_does_not_run_again():
    tail = Counted(lambda b: b + 1.0)
    x = tensor([1.0])
    hooked(lambda a: tail(paddle.exp(a)), x * 1.0).sum().backward()
    assert tail.calls == 1
    assert values(x.grad) == pytest.approx([np.e])


@pytest.mark.skipif(not HAS_PEAK, reason="this Paddle can't reset the peak")
def test_not_even_the_last_operator_does():
    """A matmul saves its inputs before it computes: its result of 16 MiB is not there again."""
    x, w = tensor(np.ones((2048, 1))), param(np.ones((1, 2048)))

    def step(run):
        y = run(lambda a: paddle.matmul(paddle.tanh(a), w), x * 1.0)
        s = y.sum()
        del y
        return peak(s.backward)

    step(hooked)
    assert step(hooked) <= step(plain) + 2**20


def test_turned_off_the_tail_runs_again():
    tail = Counted(lambda b: b + 1.0)
    with set_checkpoint_early_stop(False):
        y = hooked(lambda a: tail(paddle.exp(a)), tensor([1.0]) * 1.0)
    y.sum().backward()
    assert tail.calls == 2


def test_the_setting_is_put_back():
    with pytest.raises(RuntimeError, match="out"), set_checkpoint_early_stop(False):
        raise RuntimeError("out")
    tail = Counted(lambda b: b + 1.0)
    hooked(lambda a: tail(paddle.exp(a)), tensor([1.0]) * 1.0).sum().backward()
    assert tail.calls == 1


@pytest.mark.parametrize("early", [True, False])
def test_a_region_that_saved_nothing_is_never_run_again(early):
    region = Counted(lambda a: a + 1.0)
    x = tensor([1.0])
    with set_checkpoint_early_stop(early):
        y = hooked(region, x * 1.0)
    y.sum().backward()
    assert region.calls == 1
    assert values(x.grad) == [1.0]


def test_what_nobody_can_need_any_more_does_not_count():
    """The branch is dropped in the first run, and its graph with it."""
    late = Counted(paddle.exp)

    def region(a):
        b = paddle.tanh(a)
        late(a)
        return b

    hooked(region, tensor([1.0]) * 1.0).sum().backward()
    assert late.calls == (2 if PACKED_VALUES_LEAK else 1)


def test_after_a_layer_it_stops_at_the_next_operator_that_saves():
    """An exception inside a PyLayer's forward would leave its context behind."""
    between, after, w = Counted(lambda b: b + 1.0), Counted(lambda b: b * 2.0), param([[2.0]])

    def region(a):
        b = between(FusedLinear.apply(paddle.exp(a), w))
        dropped = paddle.tanh(b)  # saves, and nobody waits for it
        after(dropped)
        return b

    hooked(region, tensor([[1.0]]) * 1.0).sum().backward()
    assert (between.calls, after.calls) == (2, 1)


def test_a_stop_that_the_function_swallows_changes_nothing():
    def scenario(run):
        def region(a):
            b = paddle.exp(a)
            with contextlib.suppress(BaseException):
                b = paddle.tanh(b)
            return b * 2.0

        x = tensor([0.5])
        run(region, x * 1.0).sum().backward()
        return values(x.grad)

    assert scenario(hooked) == scenario(lambda f, *a: f(*a))


def test_contexts_and_finally_blocks_of_the_function_are_left():
    left = []

    @contextlib.contextmanager
    def scope():
        try:
            yield
        finally:
            left.append("scope")

    def region(a):
        try:
            with scope():
                return paddle.exp(a)
        finally:
            left.append("finally")

    hooked(region, tensor([1.0]) * 1.0).sum().backward()
    assert left == ["scope", "finally"] * 2


def test_a_finally_block_that_runs_an_operator_is_run_to_its_end():
    """On Paddle 2.6 what that operator saves counts as needed, and the stop comes there."""
    ended, w = [], param([1.0])

    def region(a):
        try:
            return paddle.exp(a)
        finally:
            paddle.tanh(w)
            ended.append(1)

    hooked(region, tensor([1.0]) * 1.0).sum().backward()
    assert len(ended) == (1 if PACKED_VALUES_LEAK else 2)


@pytest.mark.parametrize("no_grad", [True, False])
def test_grad_mode_is_as_it_was(no_grad):
    s = hooked(lambda a: paddle.exp(a), tensor([1.0]) * 1.0).sum()
    with paddle.set_grad_enabled(not no_grad):
        s.backward()
        assert paddle.is_grad_enabled() is not no_grad
    assert paddle.is_grad_enabled()


def test_a_stop_leaves_nothing_behind():
    x, w = tensor(np.zeros((64, 64))), param(np.zeros((64, 64)))

    def step():
        x.clear_gradient(False)
        w.clear_gradient(False)
        for region in (
            lambda a: paddle.exp(paddle.tanh(a)) + 1.0,
            lambda a: FusedLinear.apply(paddle.exp(a), w) + 1.0,
            lambda a: recompute(lambda b: paddle.exp(b) + 1.0, paddle.tanh(a), use_reentrant=False),
        ):
            hooked(region, x * 1.0).sum().backward()

    assert growth(step) == 0


def test_a_stop_while_a_layer_reads_what_it_saved():
    """Paddle has made the tuple that it hands to the layer, and not filled it yet."""

    class Square(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * a

        @staticmethod
        def backward(ctx, dy):
            (a,) = ctx.saved_tensor()
            return dy * 2.0 * a

    def scenario(run):
        x = tensor([0.5])
        y, _ = run(lambda a: (Square.apply(a), paddle.tanh(a)), x * 1.0)
        y.sum().backward()
        return values(x.grad)

    for _ in range(20):
        assert scenario(hooked) == scenario(plain) == [1.0]


@pytest.mark.parametrize("region", [lambda a: paddle.exp(a) + 1.0, lambda a: paddle.exp(a * a) * a])
def test_not_even_a_python_object(region):
    """What the pack hook was called with when it raised."""
    x = tensor([1.0])

    def blocks(steps):
        for _ in range(steps):
            hooked(region, x * 1.0).sum().backward()
            x.clear_gradient(False)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks(400)
    for_each = (blocks(400) - before) / 400
    assert for_each < (24 if PACKED_VALUES_LEAK else 1)
