"""`ParamView`: a parameter as Python code sees it."""

from __future__ import annotations

import copy
import operator
import threading
from typing import Any, NoReturn

import wrapt

from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._leaf import (
    Handover,
    ParamLeaf,
    is_retired,
    leaf_gradient,
    make_leaf,
    origin_of,
    set_flag,
)
from paramproxy._parameter import (
    copy_parameter,
    describe,
    reduce_parameter,
    refuse_static_graph,
    refuse_without_storage,
)
from paramproxy.exceptions import InPlaceOperatorError, NotAParameterError


__all__ = ["ParamView", "in_graph", "unwrap"]


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
          `multiplex`, `linalg.multi_dot`, `t.index_put((view,), value)` and
          some kernels of `paddle._C_ops`: see the page *Caveats*.
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
        return f"ParamView of {describe(self.__wrapped__)}"

    __str__ = __repr__

    def __copy__(self) -> Any:
        return copy_parameter(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_parameter(self.__wrapped__, protocol)

    def __reduce__(self) -> Any:
        return reduce_parameter(self.__wrapped__, 2)


# Two threads that ask one view for its leaf get the same.
_LEAF_LOCK = threading.Lock()


def _follow(leaf: ParamLeaf, param: Any) -> None:
    """Give a view's leaf the flag and the storage that its parameter has by now."""
    refuse_without_storage(param, "make a leaf of")
    set_flag(leaf, param.stop_gradient)
    if not Tensor._is_shared_underline_tensor_with(leaf, param):
        Tensor._set_impl(leaf, param)


def _comparison(compare: Any) -> Any:
    """A comparison of the parameter, also with another view."""

    def operator(self: ParamView, other: Any) -> Any:
        return compare(
            self.__wrapped__, unwrap(other) if issubclass(type(other), ParamView) else other
        )

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
        return origin_of(x)
    if issubclass(kind, ParamView):
        return x.__wrapped__
    return x


def in_graph(x: Any) -> Any:
    """What stands in the graph for `x`: a live leaf for itself, or the parameter of a view.

    A leaf whose gradient was handed over has no place of its own any more.
    """
    return unwrap(x) if issubclass(type(x), ParamView) or is_retired(x) else x
