"""What both facets of a parameter need of it: its words, its data, its storage."""

from __future__ import annotations

from typing import Any

import paddle

from paramproxy._compat import TENSORS_REDUCE
from paramproxy.exceptions import NoStorageError, UnsupportedError


__all__ = [
    "copy_parameter",
    "describe",
    "lacks_storage",
    "nbytes",
    "reduce_parameter",
    "refuse_static_graph",
    "refuse_without_storage",
]


def describe(param: Any) -> str:
    return f"{param.name!r}: {param!r}"


def reduce_parameter(param: Any, protocol: Any) -> Any:
    """What pickle needs: the parameter's data, loadable without paramproxy."""
    refuse_without_storage(param, "copy")
    if TENSORS_REDUCE:
        return param.__reduce_ex__(protocol)
    return paddle.to_tensor, (param.numpy(), None, None, param.stop_gradient)


def copy_parameter(param: Any) -> Any:
    rebuild, state, *_ = reduce_parameter(param, 4)
    return rebuild(*state)


def nbytes(tensor: Any) -> int:
    """The bytes of the tensor's elements."""
    return int(tensor.size) * int(tensor.element_size())


def lacks_storage(tensor: Any) -> bool:
    """Whether the tensor's data is missing. One of no elements never has any, and needs none."""
    return not tensor._is_initialized() and 0 not in tensor.shape


def refuse_without_storage(param: Any, doing: str) -> None:
    if lacks_storage(param):
        msg = (
            f"Cannot {doing} parameter {param.name!r}: it has no storage now. Initialize it "
            "(LazyGuard), or gather it again (sharding) first."
        )
        raise NoStorageError(msg)


def refuse_static_graph(doing: str) -> None:
    """Refuse what reads a tensor's storage while a static graph is being built."""
    if not paddle.in_dynamic_mode():
        msg = (
            f"Cannot {doing} while a static graph is being built: there are no tensors to share "
            "storage with. Leave static mode first (paddle.disable_static())."
        )
        raise UnsupportedError(msg)
