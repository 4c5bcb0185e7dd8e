"""In-place changes: what a replay could get wrong is found, named, and refused."""

from __future__ import annotations

import paddle
import pytest
from support import param, same, tensor, values

from paramproxy import MutationError, ParamProxyError, recompute


def add_one(t):
    with paddle.no_grad():
        t.add_(paddle.ones_like(t))


H = None


def _reads_h(a):
    return a * H


class Weighted(paddle.nn.Layer):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, a):
        return a * self.w

    def method(self, a):
        return a * self.w


def _by(kind, x, w):
    """A call that reads `w` in one way or another, and the words that name it."""
    global H
    h = w
    if kind == "global":
        H = h
    return {
        "argument": (lambda a, b: a * b, (x, h), {}, "argument 1"),
        "keyword": (lambda a, *, b: a * b, (x,), {"b": h}, "keyword 'b'"),
        "in a container": (
            lambda a, box: a * box["k"][0],
            (x, {"k": [h]}),
            {},
            "argument 1['k'][0]",
        ),
        "closure": (lambda a: a * h, (x,), {}, "closure variable 'h'"),
        "closure list": (
            (lambda box: lambda a: a * box[0])([h]),
            (x,),
            {},
            "closure variable 'box'[0]",
        ),
        "global": (_reads_h, (x,), {}, "global variable 'H'"),
        "layer": (Weighted(w), (x,), {}, ""),
        "method": (Weighted(w).method, (x,), {}, ""),
        "layer in a closure": ((lambda m: lambda a: m(a))(Weighted(w)), (x,), {}, ""),
    }[kind]


KINDS = ["argument", "keyword", "in a container", "closure", "closure list", "global"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_changed_between_forward_and_backward_is_named(kind):
    x, h = tensor([1.0, 2.0]) * 1.0, tensor([3.0, 4.0]) * 1.0
    function, args, kwargs, words = _by(kind, x, h)
    y = recompute(function, *args, **kwargs)
    add_one(h)
    with pytest.raises(OSError, match="MutationError") as caught:
        y.sum().backward()
    assert f"{words} was changed in place after the first run (version 0, now 1)" in str(
        caught.value
    )
    assert "Change it after backward, or pass a clone of it to recompute." in str(caught.value)


@pytest.mark.parametrize("kind", [*KINDS, "layer", "method", "layer in a closure"])
def test_a_parameter_changed_between_forward_and_backward_is_named(kind):
    x, w = tensor([1.0, 2.0]) * 1.0, param([3.0, 4.0])
    function, args, kwargs, _ = _by(kind, x, w)
    y = recompute(function, *args, **kwargs)
    add_one(w)
    with pytest.raises(OSError, match=f"parameter '{w.name}'.* was changed in place"):
        y.sum().backward()
    assert w.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [tensor, param])
def test_unchanged_it_is_as_without_recompute(kind, make):
    def scenario(run):
        x, h = tensor([1.0, 2.0]), make([3.0, 4.0])
        function, args, kwargs, _ = _by(kind, x * 1.0, h)
        run(function, *args, **kwargs).sum().backward()
        return values(x.grad), values(h.grad)

    same(scenario)


def test_plain_autograd_refuses_the_same_program():
    x, h = tensor([1.0, 2.0]), tensor([3.0, 4.0]) * 1.0
    y = x * h
    add_one(h)
    with pytest.raises(Exception, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("make", [lambda: tensor([3.0]) * 1.0, lambda: param([3.0])])
def test_a_function_that_changes_its_own_argument_is_refused_at_once(make):
    def region(a, b):
        add_one(b)
        return a * b

    with pytest.raises(MutationError) as caught:
        recompute(region, tensor([1.0]) * 1.0, make())
    assert "it changes argument 1" in str(caught.value)
    assert "so a replay would start from the changed value" in str(caught.value)
    assert isinstance(caught.value, (RuntimeError, ParamProxyError))


def test_a_function_that_changes_a_captured_weight_is_refused_at_once():
    w = param([3.0])

    def region(a):
        add_one(w)
        return a * w

    with pytest.raises(MutationError, match=f"it changes captured parameter '{w.name}' in place"):
        recompute(region, tensor([1.0]) * 1.0)


def test_state_that_the_function_keeps_for_itself_is_its_own_business():
    """As a layer's buffers: not an operand, but what the function is there to write."""
    steps = tensor([0.0], grad=False)

    def region(a):
        add_one(steps)
        return a * 2.0

    x = tensor([1.0])
    recompute(region, x * 1.0).sum().backward()
    assert values(x.grad) == [2.0]


@pytest.mark.filterwarnings("ignore:When training, we now always track")
def test_batch_norm_keeps_its_statistics():
    norm = paddle.nn.BatchNorm1D(2)
    x = tensor([[1.0, 2.0], [3.0, 5.0]])
    recompute(norm, x * 1.0).sum().backward()
    assert x.grad is not None
    assert values(norm._mean) != [0.0, 0.0]


def test_changing_a_tensor_after_backward_is_no_matter():
    x, w = tensor([1.0]), param([2.0])
    for _ in range(3):
        recompute(lambda a, b: a * b, x * 1.0, w).sum().backward()
        add_one(w)
    assert values(x.grad) == [9.0]


@pytest.mark.parametrize("swap", ["_share_buffer_to", "_clear_data"])
def test_storage_that_was_swapped_is_no_change(swap):
    """A sharding stage moves a parameter into a fused buffer between the runs."""
    x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
    y = recompute(lambda a, b: a * b, x * 1.0, w)
    fused = tensor([3.0, 4.0], grad=False)
    add_one(fused)
    fused.subtract_(paddle.ones([2]))
    if swap == "_clear_data":
        w._clear_data()
    fused._share_buffer_to(w)
    add_one(w)
    w.subtract_(paddle.ones([2])) if w.stop_gradient else None
    y.sum().backward()
    assert values(w.grad) == [1.0, 2.0]


def test_in_place_operations_on_what_the_region_made_are_fine():
    def scenario(run):
        x = tensor([1.0, -2.0, 3.0])

        def region(a):
            b = a * 2.0
            b[0:2].add_(paddle.ones([2]))
            b.add_(a)
            b[2] = a[0] * a[1]
            return paddle.nn.functional.relu_(b)

        y = run(region, x * 1.0)
        y.sum().backward()
        return values(y), values(x.grad)

    same(scenario)
