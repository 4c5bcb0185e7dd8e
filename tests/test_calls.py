"""Any call shape: what can be called can be recomputed."""

from __future__ import annotations

import functools
import inspect

import paddle
import pytest
from support import Counted, FusedLinear, param, plain, same, tensor, values

from paramproxy import ParamView, recompute


class Block(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5))

    def forward(self, x, scale=1.0, *, shift=None):
        y = paddle.tanh(self.fc(x)) * scale
        return y if shift is None else y + shift

    def part(self, x):
        return self.fc(x) * x

    @classmethod
    def made(cls, x):
        return x * x * 2.0

    @staticmethod
    def plain(x):
        return x * x * 3.0


class Callable:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x * self.w * x


BLOCK = Block()

CALLS = {
    "function": lambda run, x, w: run(lambda a, b: a * b * a, x, w),
    "positional only": lambda run, x, w: run(lambda a, b, /: a * b * a, x, w),
    "keyword": lambda run, x, w: run(lambda a, b: a * b * a, x, b=w),
    "keyword only": lambda run, x, w: run(lambda a, *, b: a * b * a, x, b=w),
    "all by keyword": lambda run, x, w: run(lambda *, a, b: a * b * a, a=x, b=w),
    "var keyword": lambda run, x, w: run(lambda a, **k: a * k["b"] * k["c"], x, b=w, c=x),
    "var positional": lambda run, x, w: run(lambda *a: a[0] * a[1] * a[2], x, w, x),
    "default": lambda run, x, w: run(lambda a, b=w, *, c=2.0: a * b * a * c, x),
    "keywords named like ours": lambda run, x, w: run(
        lambda a, function, args, region: a * function * args * region,
        x,
        function=w,
        args=2,
        region=x,
    ),
    "partial": lambda run, x, w: run(functools.partial(lambda a, b: a * b * a, b=w), x),
    "partial of partial": lambda run, x, w: run(
        functools.partial(functools.partial(lambda a, b, c: a * b * c, x), c=x), w
    ),
    "layer": lambda run, x, w: run(BLOCK, x, 2.0),
    "layer with keyword": lambda run, x, w: run(BLOCK, x, shift=x * w),
    "bound method": lambda run, x, w: run(BLOCK.part, x),
    "unbound method": lambda run, x, w: run(Block.part, BLOCK, x),
    "class method": lambda run, x, w: run(Block.made, x),
    "static method": lambda run, x, w: run(BLOCK.plain, x),
    "partial method": lambda run, x, w: run(functools.partial(BLOCK.forward, scale=3.0), x),
    "callable object": lambda run, x, w: run(Callable(w), x),
    "PyLayer.apply": lambda run, x, w: run(FusedLinear.apply, x, w),
    "C op": lambda run, x, w: run(paddle._C_ops.multiply, x, w),
    "paddle function": lambda run, x, w: run(paddle.matmul, x, w, transpose_y=True),
    "tensor method": lambda run, x, w: run(paddle.Tensor.multiply, x, w),
    "view for a parameter": lambda run, x, w: run(
        lambda a, b: a * b * a, x, ParamView(w) if run is recompute else w
    ),
    "None among them": lambda run, x, w: run(lambda a, n, b, m: a * b * a, x, None, w, None),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_gives_what_the_call_gives(call):
    def scenario(run):
        for p in BLOCK.parameters():
            p.clear_gradient(False)
        x, w = tensor([[1.0, 2.0], [3.0, 4.0]]), param([[1.0, -2.0], [0.5, 3.0]])
        y = call(run, x * 1.0, w)
        y.sum().backward()
        fused = getattr(w, "main_grad", None)
        block = [values(p.grad) for p in BLOCK.parameters()]
        return values(y), y.stop_gradient, values(x.grad), values(w.grad), values(fused), block

    same(scenario)


def test_the_function_runs_once_in_forward_and_once_in_backward():
    region = Counted(lambda a, b: a * b)
    y = recompute(region, tensor([2.0]) * 1.0, param([3.0]))
    assert region.calls == 1
    y.sum().backward()
    assert region.calls == 2


def test_no_signature_is_read(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("inspect.signature was called")

    monkeypatch.setattr(inspect, "signature", refuse)
    x = tensor([2.0])
    recompute(lambda a: a * a, x * 1.0).sum().backward()
    assert values(x.grad) == [4.0]


def test_a_function_that_can_not_be_called_is_refused():
    with pytest.raises(TypeError) as caught:
        recompute(3, tensor([1.0]))
    assert str(caught.value) == "Cannot recompute 3: expected a callable, got int."


def test_options_do_not_leak_into_the_function():
    def region(a, **rest):
        assert rest == {"mine": 1}
        return a * 2.0

    recompute(
        region,
        tensor([1.0]) * 1.0,
        use_reentrant=True,
        preserve_rng_state=False,
        offload_indices=[0],
        mine=1,
    ).sum().backward()


def test_a_decorated_function_is_searched_to_the_bottom():
    def doubled(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * 2.0

        return wrapper

    def scenario(run):
        x = tensor([1.0, 2.0])
        h = x * 3.0

        @doubled
        def region(a):
            return a * h

        y = run(region, h)
        (y + h).sum().backward()
        return values(y), values(x.grad)

    same(scenario, ([18.0, 72.0], [39.0, 75.0]))


def test_nested_regions_pass_parameters_down():
    def scenario(run):
        x, w, v = tensor([1.0, 2.0]), param([3.0, 4.0]), param([5.0, 6.0])
        w.main_grad = paddle.zeros([2])
        seen = []

        def inner(a, w):
            seen.append(w.main_grad is buffer)
            return paddle.tanh(a * w) * w

        def outer(a, w, v):
            return run(inner, run(inner, a, w) * v, w)

        buffer = w.main_grad
        run(outer, x * 0.1, w, v).sum().backward()
        return values(x.grad), values(w.grad), values(v.grad), all(seen)

    same(scenario)


def test_three_levels_deep_with_fused_gradients():
    def scenario(run):
        x, w = tensor([[1.0, 2.0]]), param([[1.0, 0.5], [3.0, -1.0]])
        buffer = w.main_grad = paddle.zeros([2, 2])
        level1 = lambda a, w: FusedLinear.apply(a, w)  # noqa: E731
        level2 = lambda a, w: run(level1, a, w) * a  # noqa: E731
        level3 = lambda a, w: run(level2, a, w) + run(level1, a, w)  # noqa: E731
        run(level3, x * 1.0, w).sum().backward()
        assert w.main_grad is buffer
        return values(x.grad), values(buffer), w.grad, w.hits

    same(scenario)


def test_plain_itself_is_what_the_others_are_compared_with():
    assert plain(lambda a, **k: (a, k), 1, use_reentrant=True, b=2) == (1, {"b": 2})
