"""A tensor that a region reads: how it was, how it is kept, what replaces it."""

from __future__ import annotations

from typing import Any

import attrs
import paddle
from paddle.autograd import PyLayer

from paramproxy._ambient import grad_mode
from paramproxy._compat import EagerParamBase, with_own_counter, with_own_header
from paramproxy._graph import layers_since, node_of
from paramproxy._leaf import Handover, make_leaf, set_flag
from paramproxy._placement import Placed, Placement
from paramproxy._tree import alias, copy_attributes


__all__ = ["Operand", "as_intermediates", "as_roots"]


@attrs.define(eq=False)
class Operand:
    """One tensor that a region reads, as it was at the first run.

    Attributes:
        where: The words that name it, `closure variable 'h'`; empty for an
            argument, whose name is looked up when it is needed.
        parameter: The parameter itself; None for any other tensor, of which an
            alias is kept in its stead.
        stop_gradient: Its flag. A caller's saved-tensor hooks lose it.
        is_leaf: Whether it is a leaf of the caller's graph.
        started: Its in-place version counter when the first run began.
        version: The counter to compare with: the same, unless the function
            itself moves it and writes nothing.
        pointer: Its storage. Versions are compared on one storage only: a
            sharding stage swaps a parameter's, an offloading hook a tensor's.
        placed: How to get it back; None if it waits where it was.
        is_state: Whether the function wrote it itself, as a layer writes its
            buffers.
        node: What made it; 0 for a leaf.
    """

    where: str
    parameter: Any
    stop_gradient: bool
    is_leaf: bool
    started: int
    version: int
    pointer: int | None
    placed: Placed | None = None
    is_state: bool = False
    node: int = 0

    @classmethod
    def of(cls, tensor: Any, where: str) -> Operand:
        pointer = _pointer(tensor)
        version = 0 if pointer is None else tensor._inplace_version()
        stop_gradient, is_leaf = tensor.stop_gradient, tensor.is_leaf
        return cls(
            where,
            tensor if isinstance(tensor, EagerParamBase) else None,
            stop_gradient,
            is_leaf,
            version,
            version,
            pointer,
            node=0 if stop_gradient or is_leaf else node_of(tensor),
        )

    def keep(self, tensor: Any, index: int, placement: Placement) -> Any:
        """What to save of `tensor`, the operand of that index, until the replay."""
        kept, self.placed = placement.put(index, alias(tensor))
        return kept

    def whole(self, kept: Any) -> Any:
        """The tensor that was kept, brought back. None if it can't be had again."""
        assert self.placed is not None
        return self.placed.whole(kept)

    def standin(self, kept: Any, handover: Handover) -> Any:
        """What the replay gets: a leaf of the parameter, or what was kept."""
        if self.parameter is not None:
            standin = make_leaf(self.parameter, handover)
            set_flag(standin, self.stop_gradient)
            return standin
        kept.stop_gradient = self.stop_gradient
        return kept

    def again(self, kept: Any) -> Any:
        """What a replay gets whose graph nobody runs backward: the parameter itself.

        An intermediate tensor gives one: what works in place is refused a leaf.
        """
        if self.parameter is not None:
            return self.parameter
        tensor = alias(kept)
        tensor.stop_gradient = self.stop_gradient
        if self.is_leaf or self.stop_gradient:
            return tensor
        inner = with_own_header(with_own_counter(tensor, self.started))
        copy_attributes(tensor, inner)
        return inner

    def no_gradient(self, standin: Any) -> Any:
        """What autograd takes for "this operand has no gradient".

        A leaf may get None. The op that made any other tensor would be run on
        an empty gradient, which crashes the interpreter in Paddle's C++.
        """
        if self.is_leaf:
            return None
        if self.placed is not None:
            return paddle.zeros(self.placed.shape, self.placed.dtype)
        if standin.is_dense():
            return paddle.zeros_like(standin)
        return paddle.sparse.subtract(standin.detach(), standin.detach())

    def was_changed(self, tensor: Any) -> bool:
        """Whether the storage recorded here was written since."""
        if self.is_state or self.pointer is None or not tensor._is_initialized():
            return False
        if tensor._inplace_version() == self.version:
            return False
        return _pointer(tensor) == self.pointer

    def was_only_returned(self, tensor: Any) -> bool:
        """Whether all that changed it were PyLayers that return their input.

        Its version now is then the one to compare with.
        """
        version = tensor._inplace_version()
        if self.node and layers_since(tensor, self.node) == version - self.version:
            self.version = version
            return True
        return False

    def __str__(self) -> str:
        if self.parameter is None:
            return self.where
        return f"{self.where} parameter {self.parameter.name!r}".lstrip()


class _Relay(PyLayer):  # type: ignore[misc]
    """The same tensors, one node further from the leaves."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        return tuple(with_own_counter(tensor.detach()) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return gradients


def as_roots(tensors: list[Any]) -> list[Any]:
    """The tensors, none of which is on the way to another.

    Paddle can't start a backward from both a tensor and one computed from it:
    "Unable to find next node in the GradTensorHolder" (2.6.2 and 3.0.0).
    """
    if len(tensors) == 1 or not all(tensor.is_dense() for tensor in tensors):
        return tensors
    with grad_mode(True):
        return list(_Relay.apply(*tensors))


def as_intermediates(operands: list[Operand], leaves: list[Any]) -> list[Any]:
    """Stand-ins that are leaves of the graph only where the operand was one.

    An identity PyLayer (`forward` returns its input) works in place, which
    Paddle refuses on a leaf that needs a gradient.
    """
    standins = list(leaves)
    inner = [
        index
        for index, operand in enumerate(operands)
        if operand.parameter is None
        and not (operand.is_leaf or operand.stop_gradient)
        and leaves[index].is_dense()
    ]
    if inner:
        relayed = _Relay.apply(*(leaves[index] for index in inner))
        for index, tensor in zip(inner, relayed):
            copy_attributes(leaves[index], tensor)
            standins[index] = tensor
    return standins


def _pointer(tensor: Any) -> int | None:
    if not tensor._is_initialized() or not tensor.is_dense():
        return None  # freed, empty or sparse
    return int(tensor.data_ptr())
