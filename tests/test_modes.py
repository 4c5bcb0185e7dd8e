"""Under no_grad, in a static graph, under to_static: as Paddle's own."""

from __future__ import annotations

import weakref

import paddle
import pytest
from support import Counted, param, same, tensor, values

from paramproxy import ParamView, recompute
from paramproxy._compat import paddle_version


def test_under_no_grad_it_is_a_plain_call():
    region = Counted(lambda a, w: a * w)
    with paddle.no_grad():
        y = recompute(region, tensor([2.0]), param([3.0]))
    assert y.stop_gradient
    assert values(y) == [6.0]
    assert region.calls == 1


def test_under_no_grad_nothing_is_kept():
    x = tensor([2.0])
    dead = weakref.ref(x)
    with paddle.no_grad():
        y = recompute(lambda a: a * 2.0, x)
    del x
    assert dead() is None
    assert values(y) == [4.0]


def test_under_no_grad_a_view_is_its_parameter():
    w = param([3.0])
    with paddle.no_grad():
        assert recompute(lambda p: p is w, ParamView(w)) is True


class Net(paddle.nn.Layer):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.fc = paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5))

    def block(self, a):
        return paddle.tanh(self.fc(a))

    def forward(self, x):
        return self.run(self.block, x * 1.0)


@pytest.mark.parametrize("full_graph", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_under_to_static(full_graph):
    def scenario(run):
        net = paddle.jit.to_static(Net(run), full_graph=full_graph)
        x = tensor([[1.0, 2.0]])
        for _ in range(2):
            net(x).sum().backward()
        return values(x.grad), values(net.fc.weight.grad)

    same(scenario)


@pytest.mark.filterwarnings("ignore")
def test_a_static_layer_can_be_recomputed():
    def scenario(run):
        fc = paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5))
        layer = paddle.jit.to_static(fc, full_graph=True)
        x = tensor([[1.0, 2.0]])
        y = run(layer, x * 1.0)
        y.sum().backward()
        return values(y), values(x.grad), values(fc.weight.grad)

    same(scenario)


@pytest.mark.skipif(paddle_version() < (3,), reason="Paddle 2.6 can't build this graph itself")
def test_in_a_static_graph_it_marks_the_block_as_paddle_does():
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program):
            x = paddle.static.data("x", [2, 2], "float32")
            y = recompute(lambda a: paddle.tanh(a) * 2.0, x)
        executor = paddle.static.Executor()
        (got,) = executor.run(program, feed={"x": [[0.0, 0.0]] * 2}, fetch_list=[y])
    finally:
        paddle.disable_static()
    assert got.tolist() == [[0.0, 0.0], [0.0, 0.0]]
