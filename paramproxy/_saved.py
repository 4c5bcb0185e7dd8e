"""A tensor that autograd saves for backward: what is known of it, what stands for it.

Paddle packs what an operator saves as a new Python object, and what a PyLayer
saves as the object it holds. What comes back to an operator gets its place in
the graph from C++; what comes back to a PyLayer is what its backward reads, so
it has to be the parameter itself, or a tensor with the flag and the history of
the one that was saved.
"""

from __future__ import annotations

import sys
from typing import Any

import attrs

from paramproxy._caller import is_users, makes_graph
from paramproxy._compat import (
    LAYERS_MAY_SAVE_NONE,
    PACKED_VALUES_LEAK,
    EagerParamBase,
    Tensor,
    with_own_header,
    with_own_storage,
)
from paramproxy._placement import can_be_offloaded, to_host
from paramproxy._tree import alias, copy_attributes, dtype_name, dtype_of
from paramproxy.exceptions import MutationError, UnsupportedError


__all__ = [
    "NONE",
    "NOTHING",
    "Kept",
    "Loans",
    "Metadata",
    "Offloaded",
    "Packed",
    "Twin",
    "handed_over",
    "keep",
    "refuse_change",
    "user_lines",
]


@attrs.define
class Metadata:
    """What two runs of a function must agree on for each tensor that they save.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        layout: Strides and offset. Paddle reads the storage of the second run
            with those of the first.
        pointer: Its storage.
        version: The storage's in-place version counter. On one storage it is
            the same in both runs, unless something wrote there in between.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: Any
    pointer: int = attrs.field(default=0, eq=False)
    version: int = attrs.field(default=0, eq=False)

    @classmethod
    def of(cls, tensor: Any) -> Metadata:
        # What Paddle 2.6's einsum saves of no elements has no strides to ask for.
        if not tensor.is_dense() or 0 in tensor.shape:
            return cls(tuple(tensor.shape), dtype_of(tensor), None)
        return cls(
            tuple(tensor.shape),
            dtype_of(tensor),
            (tensor.strides, tensor.offset),
            tensor.data_ptr(),
            tensor._inplace_version(),
        )

    def was_written(self, before: Metadata) -> bool:
        """Whether this is the storage of `before`, written since."""
        return (
            bool(self.pointer) and self.pointer == before.pointer and self.version != before.version
        )

    def __str__(self) -> str:
        return f"{list(self.shape)} {dtype_name(self.dtype)}"

    def told(self, other: Metadata) -> str:
        """In words, with the layout where only that is different."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return str(self)
        return f"{self} with strides and offset {self.layout}"


@attrs.frozen(eq=False)
class Kept:
    """A saved tensor that is simply kept, as it would be without hooks.

    Attributes:
        tensor: The tensor, or an alias of it.
        version: Its in-place version counter when it was saved.
        is_layers: Whether a PyLayer saved it.
    """

    tensor: Any
    version: int
    is_layers: bool

    def unpack(self) -> Any:
        refuse_change(self.tensor, self.version)
        return handed_over(self.tensor, self.is_layers)


@attrs.define(eq=False)
class Loan:
    """What was packed, in a box that is emptied when it is not needed any more."""

    item: Any

    def unpack(self) -> Any:
        return self.item.unpack()


@attrs.define(eq=False)
class Loans:
    """What Paddle would never free of the graph of a second run."""

    loans: list[Loan] = attrs.field(factory=list)

    def lent(self, item: Any) -> Any:
        """What to give Paddle for `item`: on 2.6 a loan of it."""
        if not PACKED_VALUES_LEAK:
            return item
        self.loans.append(Loan(item))
        return self.loans[-1]

    def end(self) -> None:
        """Afterwards."""
        for loan in self.loans:
            loan.item = None


@attrs.frozen(eq=False)
class Packed:
    """What a caller's own pack hook made of a tensor, and the hook that undoes it."""

    value: Any
    hook: Any

    def unpack(self) -> Any:
        return self.hook(self.value)


@attrs.frozen(eq=False)
class Offloaded:
    """A saved tensor that waits in host memory."""

    host: Any
    place: Any

    @classmethod
    def of(cls, tensor: Any) -> Offloaded | None:
        """None for a tensor that has to stay where it is.

        A parameter is not an activation, and a copy of a strided tensor would
        not have its layout.
        """
        if isinstance(tensor, EagerParamBase) or not can_be_offloaded(tensor):
            return None
        return cls(to_host(tensor), tensor.place)

    def unpack(self) -> Any:
        return self.host._copy_to(self.place, True)


NONE: Any = None if LAYERS_MAY_SAVE_NONE else Tensor()
"""What stands for a None that a PyLayer saves among its tensors."""


class _Nothing:
    """What Paddle gets for that."""

    def unpack(self) -> Any:
        """Paddle forgets to turn grad mode on again after an unpack hook gave None."""
        if makes_graph():
            msg = (
                "Cannot run backward with create_graph=True through a PyLayer that saved None: "
                "around a region of the hook engine Paddle would lose the graph of its gradient. "
                "Leave the None out of save_for_backward."
            )
            raise UnsupportedError(msg)
        return NONE


NOTHING = _Nothing()


class Twin:
    """The place in the graph of a tensor that a PyLayer saved, without its storage.

    A gradient of a gradient runs back through the saved tensor itself.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = Tensor.__new__(Tensor)  # the constructor of Paddle 3.2 and 3.3 leaks
        self.tensor.reconstruct_from_(tensor)
        self.tensor._clear_dataptr()

    def filled(self, value: Any) -> Any:
        """The tensor in that place, on the storage of `value`."""
        if not self.tensor._is_initialized():
            self.tensor._set_impl(value)
            copy_attributes(value, self.tensor)
        return self.tensor


def keep(tensor: Any, is_layers: bool) -> Any:
    """What to hold of a saved tensor: an alias without a graph, a parameter as itself.

    An operator's own output, held by the node of that operator, would hold
    itself for ever: a cycle through C++.
    """
    if isinstance(tensor, EagerParamBase):
        return tensor
    return alias(tensor) if is_layers else tensor.detach()


def handed_over(tensor: Any, is_layers: bool) -> Any:
    """What an unpack hook may give Paddle, which keeps its hands on it in 2.6."""
    if PACKED_VALUES_LEAK and not is_layers:
        return with_own_storage(tensor) if 0 in tensor.shape else with_own_header(tensor)
    return tensor


def refuse_change(tensor: Any, version: int) -> None:
    """Paddle checks this itself, but not where there are hooks."""
    now = tensor._inplace_version()
    if now != version:
        msg = (
            f"Cannot run backward: a tensor of shape {list(tensor.shape)} that was saved for it "
            f"has been changed in place since (version {version}, now {now}). Change a clone."
        )
        raise MutationError(msg)


def user_lines() -> list[str]:
    """Where in the user's code this is being run, innermost last."""
    lines = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            code = frame.f_code
            lines.append(f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return lines[::-1]
