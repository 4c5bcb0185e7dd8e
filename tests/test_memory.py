"""Bytes and lifetimes: what recompute is for."""

from __future__ import annotations

import gc
import weakref

import paddle
import pytest
from support import HAS_PEAK, allocated, param, peak, plain, tensor

from paramproxy import recompute


WIDTH = 128
NBYTES = WIDTH * WIDTH * 4


def chain(a, *weights):
    """Keeps an activation of NBYTES for each step, without recompute."""
    for _ in range(8):
        a = paddle.tanh(a) * 1.5
    for w in weights:
        a = a * w
    return a


def held_after_forward(run, *weights):
    """The bytes that wait for backward behind one region."""
    x = tensor([[0.5] * WIDTH] * WIDTH)
    h = x * 1.0
    before = allocated()
    y = run(chain, h, *weights)
    held = allocated() - before
    del y
    return held


def test_nothing_but_the_output_is_held_after_forward():
    assert held_after_forward(plain) >= 8 * NBYTES
    assert NBYTES <= held_after_forward(recompute) < NBYTES + 4096


def test_a_parameter_as_argument_holds_nothing_more():
    w = param([[0.5] * WIDTH] * WIDTH)
    w.main_grad = paddle.zeros([WIDTH, WIDTH])
    assert held_after_forward(recompute, w, w) - held_after_forward(recompute) < 4096


needs_peak = pytest.mark.skipif(not HAS_PEAK, reason="this Paddle can't reset the peak")


def step(run, regions, *weights):
    x = tensor([[0.5] * WIDTH] * WIDTH)
    h = x * 1.0
    for _ in range(regions):
        h = run(chain, h, *weights)
    h.sum().backward()


@needs_peak
def test_the_peak_of_a_step_is_one_region_and_the_inputs():
    regions = 6
    assert peak(lambda: step(plain, regions)) > regions * 8 * NBYTES
    # An input for each region, the activations of one, and its gradients.
    assert peak(lambda: step(recompute, regions)) < (regions + 8 + 12) * NBYTES


@needs_peak
def test_the_peak_is_at_most_that_of_paddles_own():
    from paddle.distributed.fleet.utils import recompute as theirs

    def peak_of(run):
        w = param([[0.5] * WIDTH] * WIDTH)
        step(run, 2, w)
        return peak(lambda: step(run, 6, w))

    assert peak_of(recompute) <= peak_of(theirs)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_stays_without_the_garbage_collector(backward):
    class Token:
        pass

    def once():
        token, w = Token(), param([3.0, 4.0])
        dead.append(weakref.ref(token))

        def region(a, p, _token=token):
            return paddle.exp(a * w) * p

        loss = recompute(region, tensor([1.0, 2.0]) * 1.0, param([5.0, 6.0])).sum()
        if backward:
            loss.backward()

    dead = []
    once()
    gc.collect()
    gc.disable()
    try:
        before = allocated()
        for _ in range(5):
            once()
        assert [ref() for ref in dead] == [None] * 6
        assert allocated() == before
    finally:
        gc.enable()


def test_after_backward_the_loss_holds_neither_inputs_nor_function():
    class Token:
        pass

    token, x = Token(), tensor([[0.5] * WIDTH] * WIDTH)
    before = allocated()
    h = x * 1.0
    loss = recompute(lambda a, _t=token: (a * a).mean(), h)
    dead = weakref.ref(token)
    del h, token
    loss.backward()
    x.clear_gradient(False)
    assert dead() is None
    assert allocated() - before < 4096


def test_a_failed_replay_leaves_no_more_behind_than_any_failed_backward():
    """Paddle itself never frees the gradient that it handed to a backward that raised."""

    class Fails(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, dy):
            raise ValueError("again")

    def plainly():
        loss = Fails.apply(tensor([[0.5] * WIDTH] * WIDTH) * 1.0).sum()
        with pytest.raises(OSError, match="again"):
            loss.backward()

    def once():
        def region(a):
            if calls:
                raise ValueError("again")
            calls.append(1)
            return chain(a)

        calls = []
        loss = recompute(region, tensor([[0.5] * WIDTH] * WIDTH) * 1.0).sum()
        with pytest.raises(OSError, match="again"):
            loss.backward()

    def left_by(step):
        step()
        gc.collect()
        before = allocated()
        step()
        gc.collect()
        return allocated() - before

    assert left_by(once) - left_by(plainly) < 4096
