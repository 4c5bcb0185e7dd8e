"""`ParamLeaf`: a parameter as kernels see it.

Paddle's C++ decides what a tensor is by the C type of the object
(`PyObject_TypeCheck`), not by `isinstance`, and no class can derive from both
`paddle.Tensor` and a wrapt proxy: their instance layouts conflict. Hence two
classes. Python code holds a view, which *is* the parameter for every attribute;
kernels hold its leaf, which is a real `EagerParamBase` with an autograd life of
its own.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import attrs

from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._parameter import (
    copy_parameter,
    describe,
    reduce_parameter,
    refuse_without_storage,
)


__all__ = [
    "Handover",
    "ParamLeaf",
    "already_registered",
    "is_retired",
    "leaf_gradient",
    "make_leaf",
    "origin_of",
    "set_flag",
    "take_gradient",
]


# Members that live in C and would bind to the leaf in silence. Each is given
# its place here; a test walks dir(Tensor) and fails on one that is not.

# A gradient's value: the leaf's own while its subgraph is differentiated,
# the parameter's once the gradient was handed over.
GRADIENT = frozenset({
    "_copy_gradient_from",
    "_grad_ivar",
    "_grad_name",
    "_grad_value",
    "_reset_grad_inplace_version",
    "_set_grad_ivar",
    "_set_grad_type",
    "_zero_grads",
    "clear_grad",
    "clear_gradient",
    "grad",
    "grad_",
    "gradient",
})  # fmt: skip

# Who is told of a gradient: always the parameter's business. On a detached
# tensor `_apply_backward_hook()` does nothing, and a reducer would never hear.
NOTIFICATION = frozenset({
    "_apply_backward_hook",
    "_register_backward_hook",
    "_register_grad_hook",
    "_remove_grad_hook",
})  # fmt: skip

# Flags and storage: what is written here must reach both.
SHARED_STATE = frozenset({
    "_clear",
    "_clear_data",
    "_clear_dataptr",
    "_clear_to_zero_allocation",
    "_inplace_assign",
    "_set_impl",
    "data",
    "initialize",
    "reconstruct_from_",
    "requires_grad",
    "requires_grad_",
    "stop_gradient",
    "trainable",
})  # fmt: skip

# Plainly the parameter's, though C has a field of its own for it.
IDENTITY = frozenset({"__dict__", "name", "persistable", "set_init_func"})

# Rightly the leaf's: its place in the graph, or an operation on the storage
# and version counter that both share.
GRAPH = frozenset({
    "_bump_inplace_version",
    "_inplace_version",
    "_is_shared_buffer_with",
    "_is_shared_underline_tensor_with",
    "_new_shared_tensor",
    "_share_buffer_to",
    "_share_memory",
    "_share_underline_tensor_to",
    "_unsafe_share_buffer_to",
    "backward",
    "clone",
    "detach",
    "detach_",
    "grad_fn",
    "inplace_version",
    "is_leaf",
    "register_hook",
    "retain_grads",
})  # fmt: skip

_PARAMETERS_OWN = NOTIFICATION | IDENTITY


@attrs.define(eq=False)
class Handover:
    """How far the leaves of one detached subgraph have come.

    Attributes:
        replaying: The function runs a second time. Hooks it registers are in
            place since the first run, so registering them again does nothing.
        done: The gradients were collected. From here on the leaves are retired
            and a gradient value is the parameter's: Paddle's zero-bubble
            `WeightGradStore` computes it only now.
        taken: The leaves, by id, whose gradient was collected.
    """

    replaying: bool = False
    done: bool = False
    taken: set[int] = attrs.field(factory=set)

    @property
    def owns_gradient(self) -> bool:
        """Whether a gradient value on a leaf is now the leaf's own."""
        return not (self.replaying or self.done)


@attrs.frozen
class LeafHook:
    """What `leaf.register_hook` returns; Paddle's own would unhook the parameter."""

    leaf: ParamLeaf | None
    hook_id: int = -1

    def remove(self) -> bool:
        """Take the hook off again. True if it was there."""
        if self.leaf is None:
            return True
        return bool(Tensor._remove_grad_hook(self.leaf, self.hook_id))


class ParamLeaf(EagerParamBase):  # type: ignore[misc]
    """A parameter as kernels see it: a real tensor on the parameter's storage.

    It shares the parameter's buffer and in-place version counter, and is an
    autograd leaf of its own. Every Python attribute, now or later, is the
    parameter's: `main_grad`, `name`, tags, `is_distributed`, hooks.

    Leaves are made by [`detach`][paramproxy.detach], by
    [`ParamView.leaf`][paramproxy.ParamView] and by the replay of
    [`recompute`][paramproxy.recompute], never by calling this class.

    Gradient values (`grad`, `clear_grad`, `register_hook`) are the leaf's own
    until its gradient is handed over; then they are the parameter's.

    !!! warning
        `leaf is param` is False, and `type(leaf)` is not `EagerParamBase`.
        Use `unwrap(leaf) is param`.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> w.tag = "mine"
        >>> leaf = paramproxy.ParamView(w).leaf
        >>> leaf.tag, leaf.name == w.name, paramproxy.unwrap(leaf) is w
        ('mine', True, True)
        >>> (leaf * 3.0).sum().backward()
        >>> leaf.grad.tolist(), w.grad
        ([3.0, 3.0], None)
    """

    __slots__ = ("_handover", "_origin")

    def __init__(self, *args: object, **kwargs: object) -> None:
        msg = (
            "Cannot create a ParamLeaf directly: it must share a parameter's storage. "
            "Use ParamView(param).leaf, or paramproxy.detach(tree)."
        )
        raise TypeError(msg)

    def __getattribute__(self, name: str) -> Any:
        origin = origin_of(self)
        if name in _PARAMETERS_OWN:
            if name in NOTIFICATION and _handover_of(self).replaying:
                return already_registered
            return getattr(origin, name)
        if name in origin.__dict__:
            return getattr(origin, name)
        if name in GRADIENT and not _handover_of(self).owns_gradient:
            return getattr(origin, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        # Only reached on a miss: a property of the parameter's own subclass.
        return getattr(origin_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in GRADIENT and _handover_of(self).owns_gradient:
            object.__setattr__(self, name, value)
            return
        if name in SHARED_STATE:
            object.__setattr__(self, name, value)
        setattr(origin_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(origin_of(self), name)

    def register_hook(self, hook: Any) -> Any:
        """Hook the leaf's own gradient; once it was handed over, the parameter's."""
        handover = _handover_of(self)
        if handover.replaying:
            return already_registered()
        if handover.done:
            return origin_of(self).register_hook(hook)
        if self.stop_gradient:
            return super().register_hook(hook)  # which says why it refuses
        return LeafHook(self, Tensor._register_grad_hook(self, hook))

    def _clear(self) -> None:
        self._on_both("_clear")

    def _clear_data(self) -> None:
        self._on_both("_clear_data")

    def _clear_dataptr(self) -> None:
        self._on_both("_clear_dataptr")

    def _clear_to_zero_allocation(self) -> None:
        self._on_both("_clear_to_zero_allocation")

    def _inplace_assign(self, *args: Any) -> None:
        self._on_both("_inplace_assign", *args)

    def _set_impl(self, *args: Any) -> None:
        self._on_both("_set_impl", *args)

    def reconstruct_from_(self, *args: Any) -> None:
        self._on_both("reconstruct_from_", *args)

    def initialize(self) -> None:
        origin = origin_of(self)
        origin.initialize()
        Tensor._set_impl(self, origin)

    def requires_grad_(self, value: bool = True) -> ParamLeaf:
        self.stop_gradient = not value
        return self

    def _on_both(self, method: str, *args: Any) -> None:
        getattr(super(), method)(*args)
        getattr(origin_of(self), method)(*args)

    def __hash__(self) -> int:
        return hash(origin_of(self))

    def __repr__(self) -> str:
        return f"ParamLeaf of {describe(origin_of(self))}"

    __str__ = __repr__

    def __copy__(self) -> Any:
        return copy_parameter(origin_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(origin_of(self), memo)

    def __reduce__(self) -> Any:
        return reduce_parameter(origin_of(self), 2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_parameter(origin_of(self), protocol)


# The slots' descriptors, taken out of the reach of `__getattribute__`: a
# parameter may well have an attribute of the same name.
_ORIGIN = vars(ParamLeaf)["_origin"]
_HANDOVER = vars(ParamLeaf)["_handover"]
_STOP_GRADIENT = vars(Tensor)["stop_gradient"]
origin_of = _ORIGIN.__get__
_handover_of = _HANDOVER.__get__


def make_leaf(param: Any, handover: Handover) -> ParamLeaf:
    """A new leaf on the storage that `param` has at this moment.

    Costs the same for a parameter of any size, whatever hangs on it: nothing
    is copied. No constructor is called: Paddle's own writes attributes, C's takes
    longer than all the rest. `_share_buffer_to` would leave a shape of `[0]`.
    """
    refuse_without_storage(param, "make a leaf of")
    origin = origin_of(param) if isinstance(param, ParamLeaf) else param
    kind: Any = type(origin)
    leaf: ParamLeaf = EagerParamBase.__new__(_leaf_class(kind))
    Tensor._set_impl(leaf, param)
    _ORIGIN.__set__(leaf, origin)
    _HANDOVER.__set__(leaf, handover)
    _STOP_GRADIENT.__set__(leaf, param.stop_gradient)
    return leaf


@functools.cache
def _leaf_class(kind: Any) -> type[ParamLeaf]:
    """`ParamLeaf`, or for a subclass of the parameter class one that is of it as well.

    So that what the subclass overrides is in force on its leaves too.
    """
    if kind is EagerParamBase:
        return ParamLeaf
    try:
        return type("ParamLeaf", (ParamLeaf, kind), {"__slots__": ()})
    except TypeError:  # the subclass has slots of its own: no class can be both
        return ParamLeaf


def take_gradient(leaf: ParamLeaf) -> Any:
    """The leaf's gradient the first time, then None. Retires the leaf."""
    handover = _handover_of(leaf)
    handover.done = True
    if id(leaf) in handover.taken:
        return None
    handover.taken.add(id(leaf))
    return leaf_gradient(leaf)


def leaf_gradient(leaf: Any) -> Any:
    """The gradient that the subgraph built on `leaf` has produced, or None."""
    return Tensor._grad_ivar(leaf)


def is_retired(tensor: object) -> bool:
    """Whether `tensor` is a leaf whose gradient was handed over already."""
    return issubclass(type(tensor), ParamLeaf) and bool(_handover_of(tensor).done)


def set_flag(leaf: ParamLeaf, stop_gradient: bool) -> None:
    """Set the leaf's own flag and leave the parameter's alone."""
    if _STOP_GRADIENT.__get__(leaf) != stop_gradient:
        _STOP_GRADIENT.__set__(leaf, stop_gradient)


def already_registered(*_: object) -> LeafHook:
    """Stands for a registration in the replay: the first run has made it."""
    return LeafHook(None)
