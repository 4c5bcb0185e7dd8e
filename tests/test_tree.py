"""`detach` and `grads`, for checkpointing code of one's own."""

from __future__ import annotations

import collections

import attrs
import optree
import paddle
import pytest
from support import FusedLinear, param, tensor, values

from paramproxy import ParamLeaf, ParamView, detach, grads, unwrap


Pair = collections.namedtuple("Pair", "left right")


@attrs.define
class Batch:
    x: object
    note: str


optree.register_pytree_node(
    Batch,
    lambda b: ((b.x,), b.note),
    lambda note, kids: Batch(kids[0], note),
    namespace="paramproxy",
)


def test_every_tensor_is_detached_with_its_flag():
    x, mask = tensor([1.0]) * 2.0, tensor([0.0], grad=False)
    inner, outer_mask = detach((x, mask))
    assert inner is not x
    assert inner.is_leaf
    assert not inner.stop_gradient
    assert outer_mask.stop_gradient
    assert inner.data_ptr() == x.data_ptr()


def test_every_parameter_view_or_leaf_becomes_a_leaf():
    w = param([1.0])
    for facet in (w, ParamView(w), ParamView(w).leaf, detach(w)):
        leaf = detach(facet)
        assert type(leaf) is ParamLeaf
        assert unwrap(leaf) is w
        assert leaf is not facet


def test_one_object_in_two_places_is_one_object():
    w, x = param([1.0]), tensor([1.0])
    first, second, box, again = detach((w, ParamView(w), {"w": w, "x": x}, x))
    assert first is second is box["w"]
    assert box["x"] is again


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: [t],
        lambda t: (t, 1),
        lambda t: {"b": t, "a": None},
        lambda t: collections.OrderedDict(b=t, a=2),
        lambda t: collections.deque([t]),
        lambda t: Pair(t, [t]),
        lambda t: Batch(t, "n"),
        lambda t: [{"deep": (Pair([t], None),)}],
    ],
)
def test_containers_keep_their_types_and_order(wrap):
    x = tensor([1.0])
    tree = wrap(x)
    twin = detach(tree)
    assert type(twin) is type(tree)
    assert twin is not tree
    assert optree.tree_structure(twin, namespace="paramproxy") == optree.tree_structure(
        tree, namespace="paramproxy"
    )
    if isinstance(tree, dict):
        assert list(twin) == list(tree)


def test_constants_are_left_alone():
    thing = object()
    assert detach([1, "a", None, thing, 2.5]) == [1, "a", None, thing, 2.5]


def test_attributes_of_activations_are_kept():
    x = tensor([1.0])
    try:
        x.sequence_parallel = True
    except AttributeError:  # Paddle 2.6: only parameters have attributes
        return
    assert detach(x).sequence_parallel is True


def test_grads_gives_one_entry_a_tensor_in_order():
    x, w, mask = tensor([1.0, 2.0]), param([3.0, 4.0]), tensor([1.0, 0.0], grad=False)
    inner = detach({"x": x, "flag": True, "w": w, "mask": mask})
    (inner["x"] * inner["w"] * inner["mask"]).sum().backward()
    found = dict(zip(("mask", "w", "x"), grads({k: inner[k] for k in ("mask", "w", "x")})))
    assert {name: values(grad) for name, grad in found.items()} == {
        "mask": None,
        "w": [1.0, 0.0],
        "x": [3.0, 0.0],
    }
    assert x.grad is None
    assert w.grad is None


def test_grads_gives_a_shared_gradient_once():
    w = param([3.0])
    first, second = detach((w, w))
    (first * second).sum().backward()
    assert [values(grad) for grad in grads((first, second))] == [[6.0], None]


def test_a_gradient_is_handed_over_once_also_in_parts():
    x, leaf = detach((tensor([1.0]), param([3.0])))
    (x * leaf).sum().backward()
    assert [values(grad) for grad in grads((x,))] == [[3.0]]
    assert [values(grad) for grad in grads((leaf,))] == [[1.0]]
    assert [values(grad) for grad in grads((leaf,))] == [None]


def test_grads_of_a_view_are_its_leafs():
    view = ParamView(param([3.0]))
    (view.leaf * 2.0).sum().backward()
    assert [values(grad) for grad in grads([view])] == [[2.0]]


class ManualCheckpoint(paddle.autograd.PyLayer):
    """Checkpointing as people write it, with `detach` and `grads` for the hard part."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function, ctx.args = function, args
        with paddle.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, dy):
        inputs = detach(ctx.args)
        with paddle.set_grad_enabled(True):
            y = ctx.function(*inputs)
        paddle.autograd.backward([y], [dy])
        return grads(inputs)


def test_checkpointing_of_ones_own_keeps_the_fused_gradient():
    def step(run):
        x, w, b = tensor([[1.0, 2.0]]), param([[1.0], [3.0]]), param([5.0])
        buffer = w.main_grad = paddle.zeros([2, 1])
        run(lambda x, w, b: FusedLinear.apply(x, w) * b, x * 1.0, w, b).sum().backward()
        assert w.main_grad is buffer
        return values(w.main_grad), values(w.grad), values(b.grad), values(x.grad)

    expected = step(lambda f, *a: f(*a))
    assert expected == ([[5.0], [10.0]], None, [7.0], [[5.0, 15.0]])
    assert step(ManualCheckpoint.apply) == expected


def test_a_fused_head_may_detach_its_weight():
    """A fused loss computes its own gradients in forward, on a detached weight."""
    w = param([[1.0], [3.0]])
    w.is_distributed = True
    view = ParamView(w)
    x = detach(tensor([[1.0, 2.0]]))
    loss = paddle.matmul(x, view.leaf).sum()
    loss.backward()
    assert view.leaf.is_distributed
    assert values(view.leaf_grad) == [[1.0], [2.0]]
    assert values(x.grad) == [[1.0, 3.0]]
    assert w.grad is None
