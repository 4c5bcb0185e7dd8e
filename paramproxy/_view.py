"""`ParamView` and `ParamLeaf`: one parameter, two facets.

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
import operator
import threading
from typing import Any, NoReturn

import attrs
import paddle
import wrapt

from paramproxy._compat import (
    TENSORS_REDUCE,
    EagerParamBase,
    Tensor,
    init_tensor,
)
from paramproxy.exceptions import (
    InPlaceOperatorError,
    NoStorageError,
    NotAParameterError,
    UnsupportedError,
)


__all__ = [
    "Handover",
    "ParamLeaf",
    "ParamView",
    "already_registered",
    "is_retired",
    "leaf_gradient",
    "make_leaf",
    "set_flag",
    "take_gradient",
    "unwrap",
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
    """

    __slots__ = ("_handover", "_origin")

    def __init__(self, *args: object, **kwargs: object) -> None:
        msg = (
            "Cannot create a ParamLeaf directly: it must share a parameter's storage. "
            "Use ParamView(param).leaf, or paramproxy.detach(tree)."
        )
        raise TypeError(msg)

    def __getattribute__(self, name: str) -> Any:
        origin = _origin_of(self)
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
        return getattr(_origin_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in GRADIENT and _handover_of(self).owns_gradient:
            object.__setattr__(self, name, value)
            return
        if name in SHARED_STATE:
            object.__setattr__(self, name, value)
        setattr(_origin_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_origin_of(self), name)

    def register_hook(self, hook: Any) -> Any:
        """Hook the leaf's own gradient; once it was handed over, the parameter's."""
        handover = _handover_of(self)
        if handover.replaying:
            return already_registered()
        if handover.done:
            return _origin_of(self).register_hook(hook)
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
        origin = _origin_of(self)
        origin.initialize()
        Tensor._set_impl(self, origin)

    def requires_grad_(self, value: bool = True) -> ParamLeaf:
        self.stop_gradient = not value
        return self

    def _on_both(self, method: str, *args: Any) -> None:
        getattr(super(), method)(*args)
        getattr(_origin_of(self), method)(*args)

    def __hash__(self) -> int:
        return hash(_origin_of(self))

    def __repr__(self) -> str:
        return f"ParamLeaf of {_describe(_origin_of(self))}"

    __str__ = __repr__

    def __copy__(self) -> Any:
        return _reduced_copy(_origin_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_origin_of(self), memo)

    def __reduce__(self) -> Any:
        return _reduce(_origin_of(self), 2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(_origin_of(self), protocol)


# The slots' descriptors, taken out of the reach of `__getattribute__`: a
# parameter may well have an attribute of the same name.
_ORIGIN = vars(ParamLeaf)["_origin"]
_HANDOVER = vars(ParamLeaf)["_handover"]
_STOP_GRADIENT = vars(Tensor)["stop_gradient"]
_origin_of = _ORIGIN.__get__
_handover_of = _HANDOVER.__get__


def make_leaf(param: Any, handover: Handover) -> ParamLeaf:
    """A new leaf on the storage that `param` has at this moment.

    Costs the same for a parameter of any size, whatever hangs on it: nothing
    is copied. `EagerParamBase.__init__` is left out because it writes
    attributes, and `_share_buffer_to` because it leaves a shape of `[0]`.
    """
    _refuse_without_storage(param, "make a leaf of")
    origin = unwrap(param)
    leaf: ParamLeaf = EagerParamBase.__new__(_leaf_class(type(origin)))  # type: ignore[arg-type]
    init_tensor(leaf, param)
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


def _refuse_without_storage(param: Any, doing: str) -> None:
    # A parameter of no elements never has storage, and needs none.
    if not param._is_initialized() and 0 not in param.shape:
        msg = (
            f"Cannot {doing} parameter {param.name!r}: it has no storage now. Initialize it "
            "(LazyGuard), or gather it again (sharding) first."
        )
        raise NoStorageError(msg)


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


class ParamView(wrapt.BaseObjectProxy):  # type: ignore[type-arg]
    """A parameter as Python code sees it, with a leaf of its own for kernels.

    Every attribute read, write, delete and method call reaches the original:
    `view.main_grad` *is* the parameter's `main_grad`. Nothing is copied.

    Args:
        param: An `EagerParamBase` of any shape and dtype, or a view or a leaf
            of one, which gives a view of the same original.

    Attributes:
        leaf: The [`ParamLeaf`][paramproxy.ParamLeaf] that stands for this view
            in kernels, of the parameter's shape and dtype. Made at the first
            use and kept.
        leaf_grad: The gradient of the subgraph that was built on `leaf`, or None.

    Raises:
        NotAParameterError: `param` is not a parameter.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2, 1], "float32")
        >>> w.main_grad = paddle.zeros([2, 1])
        >>> view = paramproxy.ParamView(w)
        >>> view.main_grad is w.main_grad
        True
        >>> loss = paddle.matmul(paddle.ones([1, 2]), view.leaf).sum()
        >>> loss.backward()
        >>> view.leaf_grad.tolist(), w.grad
        ([[1.0], [1.0]], None)

    !!! warning "Hand kernels `view.leaf`, never the view"
        `isinstance(view, paddle.Tensor)` is True, yet Paddle's C++ looks at the
        C type of an object. Measured on 2.6.2 to 3.3.1:

        - `paddle.matmul(view, y)` raises (`must be Tensor, but got ParamView`).
          Operators with the view on the left, `view @ y`, work.
        - `SomePyLayer.apply(view)` takes it for a constant: **its gradient is
          dropped in silence**.
        - `t._share_buffer_to(view)`, `t._unsafe_share_buffer_to(view)` and
          `t._share_underline_tensor_to(view)` write through it blindly and
          **may crash the interpreter**.
        - `paddle.concat([view, view])`, `stack`, `add_n` and `einsum` raise from
          Paddle 3.0 on. **On 2.6 they crash the interpreter**: there Paddle
          casts the elements of a list unseen, whatever they are, so that no
          object can guard itself. So do `meshgrid`, `broadcast_tensors`,
          `multiplex` and `linalg.multi_dot`.
        - `paddle.nn.initializer.Normal()(view)` and the other initializers may
          crash the interpreter, and on a leaf they fill the leaf alone:
          initialize the parameter.
        - `tensor == view` is a plain False from Paddle 3.3 on, and raises
          before. `view == tensor` compares the elements.
        - `layer.weight = view` registers a buffer, which is never trained:
          assign the parameter.

        A parameter, its views and its leaves have one hash, and `==` gives a
        tensor, so a set or dict that holds two of them raises on look-up.
    """

    def __init__(self, param: Any) -> None:
        original = unwrap(param)
        if not isinstance(original, EagerParamBase):
            msg = (
                f"Cannot view {type(param).__name__} object as a parameter: "
                "only a parameter (EagerParamBase) has a main_grad, hooks and tags to keep. "
                "Use tensor.detach() for an ordinary tensor."
            )
            raise NotAParameterError(msg)
        super().__init__(original)
        self._self_leaf: ParamLeaf | None = None

    # numpy is to leave `array * view` to the view, as it does for a Tensor.
    __array_ufunc__ = None
    __array_priority__ = 100

    @property
    def leaf(self) -> ParamLeaf:
        with _LEAF_LOCK:
            if self._self_leaf is None or is_retired(self._self_leaf):
                refuse_static_graph("make a leaf")
                self._self_leaf = make_leaf(self.__wrapped__, Handover())
            else:
                _follow(self._self_leaf, self.__wrapped__)
            return self._self_leaf

    @property
    def leaf_grad(self) -> Any:
        return None if self._self_leaf is None else leaf_gradient(self._self_leaf)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "__wrapped__":  # wrapt would let it be pointed at something else
            msg = (
                f"Cannot point the view of {self.__wrapped__.name!r} at another object: "
                "a view is of one parameter for life. Make a new ParamView."
            )
            raise AttributeError(msg)
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        # Also what iteration goes by, as for a Tensor, which has no __iter__.
        return self.__wrapped__[key]

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return f"ParamView of {_describe(self.__wrapped__)}"

    __str__ = __repr__

    def __copy__(self) -> Any:
        return _reduced_copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self.__wrapped__, protocol)

    def __reduce__(self) -> Any:
        return _reduce(self.__wrapped__, 2)


def set_flag(leaf: ParamLeaf, stop_gradient: bool) -> None:
    """Set the leaf's own flag and leave the parameter's alone."""
    if _STOP_GRADIENT.__get__(leaf) != stop_gradient:
        _STOP_GRADIENT.__set__(leaf, stop_gradient)


# Two threads that ask one view for its leaf get the same.
_LEAF_LOCK = threading.Lock()


def _follow(leaf: ParamLeaf, param: Any) -> None:
    """Give a view's leaf the flag and the storage that its parameter has by now."""
    _refuse_without_storage(param, "make a leaf of")
    set_flag(leaf, param.stop_gradient)
    if not Tensor._is_shared_underline_tensor_with(leaf, param):
        Tensor._set_impl(leaf, param)


def refuse_static_graph(doing: str) -> None:
    """Refuse what reads a tensor's storage while a static graph is being built."""
    if not paddle.in_dynamic_mode():
        msg = (
            f"Cannot {doing} while a static graph is being built: there are no tensors to share "
            "storage with. Leave static mode first (paddle.disable_static())."
        )
        raise UnsupportedError(msg)


def _comparison(compare: Any) -> Any:
    """A comparison of the parameter, also with another view."""

    def operator(self: ParamView, other: Any) -> Any:
        return compare(self.__wrapped__, unwrap(other) if type(other) is ParamView else other)

    return operator


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ParamView, f"__{_name}__", _comparison(getattr(operator, _name)))


def _in_place_operator(method: str, symbol: str, act: str) -> Any:
    """`view <symbol>= other`, which acts on the parameter where Paddle can.

    wrapt's own would put a new tensor in the parameter's place.
    """

    def operator(self: ParamView, other: Any) -> Any:
        own = getattr(type(self.__wrapped__), method, None)
        if own is not None and own(self.__wrapped__, other) is self.__wrapped__:
            return self
        _refuse(self, symbol, act)

    operator.__name__ = method
    return operator


def _refuse(view: ParamView, symbol: str, act: str) -> NoReturn:
    msg = (
        f"Cannot apply {symbol}= to the view of {view.__wrapped__.name!r}: on a Paddle tensor "
        f"it makes a new one and rebinds the name. To change the parameter, use {act} under "
        f"paddle.no_grad(); for a new tensor, write `view {symbol} other`."
    )
    raise InPlaceOperatorError(msg)


for _method, _symbol, _act in (
    ("__iadd__", "+", "view.add_(other)"),
    ("__isub__", "-", "view.subtract_(other)"),
    ("__imul__", "*", "view.multiply_(other)"),
    ("__itruediv__", "/", "view.divide_(other)"),
    ("__ifloordiv__", "//", "view.floor_divide_(other)"),
    ("__imod__", "%", "view.remainder_(other)"),
    ("__ipow__", "**", "view.pow_(other)"),
    ("__imatmul__", "@", "view.set_value(view @ other)"),
    ("__ilshift__", "<<", "view.set_value(view << other)"),
    ("__irshift__", ">>", "view.set_value(view >> other)"),
    ("__iand__", "&", "view.set_value(view & other)"),
    ("__ior__", "|", "view.set_value(view | other)"),
    ("__ixor__", "^", "view.set_value(view ^ other)"),
):
    setattr(ParamView, _method, _in_place_operator(_method, _symbol, _act))


def unwrap(x: Any) -> Any:
    """The parameter behind a view or a leaf; anything else unchanged.

    Args:
        x: Any object.

    Returns:
        The original `EagerParamBase` if `x` is a `ParamView` or a `ParamLeaf`,
        else `x` itself.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> paramproxy.unwrap(paramproxy.ParamView(w)) is w
        True
        >>> paramproxy.unwrap("anything")
        'anything'
    """
    kind = type(x)
    if issubclass(kind, ParamLeaf):
        return _origin_of(x)
    if issubclass(kind, ParamView):
        return x.__wrapped__
    return x


def already_registered(*_: object) -> LeafHook:
    """Stands for a registration in the replay: the first run has made it."""
    return LeafHook(None)


def _describe(param: Any) -> str:
    return f"{param.name!r}: {param!r}"


def _reduce(param: Any, protocol: Any) -> Any:
    """What pickle needs: the parameter's data, loadable without paramproxy."""
    _refuse_without_storage(param, "copy")
    if TENSORS_REDUCE:
        return param.__reduce_ex__(protocol)
    return paddle.to_tensor, (param.numpy(), None, None, param.stop_gradient)


def _reduced_copy(param: Any) -> Any:
    rebuild, state, *_ = _reduce(param, 4)
    return rebuild(*state)
