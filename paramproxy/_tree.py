"""Arguments and results as flat tensors and a shape to put them back into.

Containers are walked by optree, so whatever is registered with it, globally or
in the namespace `"paramproxy"`, is a container here too.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, ValuesView
from typing import Any

import optree
import paddle

from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES, EagerParamBase, Tensor, untraced
from paramproxy._leaf import Handover, ParamLeaf, make_leaf, take_gradient
from paramproxy._parameter import refuse_static_graph
from paramproxy._view import ParamView, unwrap


__all__ = [
    "alias",
    "attributes",
    "copy_attributes",
    "detach",
    "dtype_name",
    "dtype_of",
    "flatten",
    "grads",
    "hidden_tensors",
    "is_differentiable",
    "unflatten",
]

NAMESPACE = "paramproxy"

# Where hidden tensors are not searched for. What callables and layers hold is
# captured, not passed.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type, Tensor)
_OPAQUE = (*_CONSTANTS, paddle.nn.Layer, types.FunctionType, types.MethodType, types.ModuleType)
_SEARCH_DEPTH = 3
_SEARCH_WIDTH = 64


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of `tree`, None among them, and the spec that `unflatten` takes."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(spec: Any, leaves: list[Any]) -> Any:
    """The tree of that spec with these leaves: new containers of the same types."""
    return optree.tree_unflatten(spec, leaves)


def alias(tensor: Any) -> Any:
    """A detached tensor on the same storage: same flag, same Python attributes.

    It outlives `tensor._clear_dataptr()`, and follows a storage that is swapped
    under the tensor.
    """
    twin = tensor.detach()
    twin.stop_gradient = tensor.stop_gradient
    copy_attributes(tensor, twin)
    return twin


def copy_attributes(tensor: Any, twin: Any) -> None:
    """Carry over what people hang on an activation, `sequence_parallel` and the like."""
    if TENSORS_HAVE_ATTRIBUTES and tensor.__dict__:
        twin.__dict__.update(tensor.__dict__)


@untraced
def detach(tree: Any) -> Any:
    """The same tree, cut off from the graph, for checkpointing code of your own.

    Run your function on what this returns, run backward on what that gives,
    and collect the gradients with [`grads`][paramproxy.grads].

    Args:
        tree: Tensors of any shape and dtype in containers of any depth (list,
            tuple, dict, namedtuple, deque, or what is registered with optree).

    Returns:
        New containers of the same types. Every tensor is a detached one on the
        same storage with its `stop_gradient` kept; every parameter, `ParamView`
        or `ParamLeaf` is a new leaf of its parameter. One object that stands in
        two places gives one object in both. Everything else is left as it is.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> w.main_grad = paddle.zeros([2])
        >>> x, again, leaf, note = paramproxy.detach([paddle.ones([2]), w, w, "note"])[0:4]
        >>> again is leaf, leaf.main_grad is w.main_grad, note
        (True, True, 'note')
    """
    refuse_static_graph("detach")
    leaves, spec = flatten(tree)
    handover = Handover()
    twins: dict[int, Any] = {}
    for position, leaf in enumerate(leaves):
        tensor = unwrap(leaf)
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) not in twins:
            is_param = isinstance(tensor, EagerParamBase)
            twins[id(tensor)] = make_leaf(tensor, handover) if is_param else alias(tensor)
        leaves[position] = twins[id(tensor)]
    return unflatten(spec, leaves)


@untraced
def grads(tree: Any) -> tuple[Any, ...]:
    """The gradients that a backward has left on the tensors of a detached tree.

    This hands them over: from here on the leaves in `tree` are retired, and a
    gradient value read or written on one is its parameter's.

    Args:
        tree: What [`detach`][paramproxy.detach] returned, or a part of it. A
            `ParamView` counts as its `view.leaf`.

    Returns:
        One entry for each tensor in `tree`, in order: its gradient (of the
        tensor's shape and dtype), or None. A tensor that stands in two places
        has its gradient at the first and None at the second, so that the tuple
        is what a `PyLayer.backward` returns and autograd's sum is right.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> x, leaf = paramproxy.detach((paddle.ones([2]), w))
        >>> (x * leaf).sum().backward()
        >>> [g if g is None else g.tolist() for g in paramproxy.grads((x, leaf))]
        [None, [1.0, 1.0]]
        >>> w.grad is None
        True
    """
    found = []
    seen: set[int] = set()
    for leaf in flatten(tree)[0]:
        tensor = leaf.leaf if issubclass(type(leaf), ParamView) else leaf
        if not isinstance(tensor, Tensor):
            continue
        if isinstance(tensor, ParamLeaf):
            found.append(take_gradient(tensor))
        else:
            found.append(None if id(tensor) in seen else tensor.grad)
        seen.add(id(tensor))
    return tuple(found)


def dtype_name(dtype: Any) -> str:
    """How it is called, without what is in front of it in one Paddle or another."""
    return str(dtype).rpartition(".")[2]


# One object for each dtype, and whether a tensor of it can have a gradient, by the
# dtype's number. Paddle makes a new object each time that it is asked, and takes its
# time to compare two.
_dtypes: dict[int, Any] = {}
_differentiable: dict[int, bool] = {}


def dtype_of(tensor: Any) -> Any:
    """A tensor's dtype: of two tensors that have the same one, the same object."""
    dtype = tensor.dtype
    return _dtypes.setdefault(int(dtype), dtype)


def is_differentiable(tensor: Any) -> bool:
    """Whether a tensor of this dtype can have a gradient at all."""
    number = int(tensor.dtype)
    known = _differentiable.get(number)
    if known is None:
        known = bool(paddle.is_floating_point(tensor) or paddle.is_complex(tensor))
        _differentiable[number] = known
    return known


def hidden_tensors(leaf: Any) -> list[Any]:
    """The tensors inside an object that optree takes for a leaf, a few levels down."""
    leaf = unwrap(leaf)
    if isinstance(leaf, _CONSTANTS):
        return []
    found: list[Any] = []
    _search(leaf, found, _SEARCH_DEPTH)
    return found


def _search(value: Any, found: list[Any], depth: int) -> None:
    value = unwrap(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif depth and not isinstance(value, _OPAQUE):
        inside = _inside(value)
        if len(inside) <= _SEARCH_WIDTH:
            for inner in inside:
                _search(inner, found, depth - 1)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, ValuesView)):
        return list(value)
    return list(attributes(value).values())


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds by name, in its slots and in its `__dict__`."""
    slots = getattr(type(value), "__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    held = {n: getattr(value, n) for n in names if not n.startswith("__") and hasattr(value, n)}
    return {**held, **getattr(value, "__dict__", {})}
