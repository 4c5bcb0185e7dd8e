"""What the engines can't do, as docs/caveats.md lists it: the rest of it.

A caveat is a promise too. When one of these fails because the result is right
now, the caveat goes.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.base import core
from support import MODES, hooked, param, plain, tensor, values

from paramproxy import recompute
from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES


@pytest.mark.parametrize("mode", MODES)
def test_caveat_a_large_buffer_is_read_as_the_first_write_ever_left_it(mode):
    class Counts(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", paddle.zeros([2**15]))

        def forward(self, a):
            with paddle.no_grad():
                self.n.add_(paddle.ones([1]))
            return paddle.tanh(a) * self.n.clone()

    def gradients(run):
        layer, x = Counts(), tensor([0.0])
        for _ in range(2):
            run(layer, x * 1.0)[0].backward()
        return values(x.grad)

    assert gradients(plain) == [1.0 + 2.0]
    assert gradients(mode) == [2.0 + 2.0]


@pytest.mark.parametrize("mode", MODES)
def test_caveat_what_is_rebound_behind_an_attribute_is_read_as_it_is_in_backward(mode):
    class Scale(paddle.nn.Layer):
        factor = 2.0

        def forward(self, a):
            return paddle.exp(a * self.factor)

    def gradient(run):
        layer, x = Scale(), tensor([1.0])
        y = run(layer, x * 1.0)
        layer.factor = 5.0
        y.sum().backward()
        return values(x.grad)

    assert gradient(plain) == pytest.approx([2.0 * np.exp(2.0)])
    assert gradient(mode) == pytest.approx([(5.0 if mode is recompute else 2.0) * np.exp(5.0)])


@pytest.mark.parametrize("mode", MODES)
def test_caveat_plain_python_state_is_written_by_both_runs(mode):
    calls = []
    mode(lambda a: calls.append(1) or paddle.exp(a), tensor([1.0]) * 1.0).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("mode", MODES)
def test_caveat_statistics_that_a_function_hands_to_batch_norm_are_written_twice(mode):
    def mean(run):
        mean, variance = paddle.zeros([1]), paddle.ones([1])

        def region(a):
            batch_norm = paddle.nn.functional.batch_norm
            return paddle.exp(batch_norm(a, mean, variance, training=True, momentum=0.5))

        run(region, tensor([[1.0], [3.0]]) * 1.0).sum().backward()
        return values(mean)

    assert mean(plain) == [1.0]
    assert mean(mode) == ([1.5] if TENSORS_HAVE_ATTRIBUTES else [1.0])


@pytest.mark.parametrize("mode", MODES)
def test_caveat_set_value_in_the_region_is_not_seen(mode):
    def weight(run):
        w = param([4.0])

        def region(a):
            w.set_value(w.detach() * 0.5)
            return paddle.exp(a) * w

        run(region, tensor([0.0]) * 1.0).sum().backward()
        return values(w)

    assert weight(plain) == [2.0]
    assert weight(mode) == [1.0]


def test_caveat_a_layer_that_saved_none_has_no_double_gradient_in_the_hook_engine():
    class Bias(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a, None)
            return a * a

        @staticmethod
        def backward(ctx, dy):
            a, _ = ctx.saved_tensor()
            return dy * a * 2.0

    x = tensor([1.0])
    y = hooked(lambda a: Bias.apply(a * 1.0), x * 1.0).sum()
    with pytest.raises(OSError, match="through a PyLayer that saved None"):
        paddle.grad(y, [x], create_graph=True)


def test_caveat_a_hook_on_an_activation_can_not_be_registered_inside():
    def region(a):
        h = a * 2.0
        h.register_hook(lambda g: g)
        return h

    with pytest.raises(RuntimeError, match="Cannot register hook on a tensor that stop gradient"):
        recompute(region, tensor([1.0]) * 1.0)


def test_caveat_a_final_hook_of_ones_own_runs_at_the_end_of_the_first_replay():
    def order(run):
        told, w = [], param([2.0])
        w.register_hook(lambda g: told.append("weight"))
        y = run(lambda a: a * 3.0, tensor([1.0]) * w)
        core.eager._add_backward_final_hook(lambda: told.append("final"))
        y.sum().backward()
        return told

    assert order(plain) == ["weight", "final"]
    assert order(recompute) == ["final", "weight"]


def test_caveat_a_global_that_is_an_activation_is_refused():
    global H
    H = tensor([1.0]) * 2.0
    y = recompute(lambda a: a * H, tensor([1.0]) * 1.0)
    with pytest.raises(OSError, match="global variable 'H', an activation of the graph around it"):
        y.sum().backward()


H = None
