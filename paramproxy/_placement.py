"""Where an operand waits for backward: in host memory, or a part of it on each rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs
import paddle

from paramproxy._ambient import grad_mode
from paramproxy._compat import core
from paramproxy._tree import copy_attributes, dtype_name


__all__ = ["AS_THEY_ARE", "Partition", "Placed", "Placement", "can_be_offloaded", "to_host"]

# What both NCCL and gloo can gather.
_GATHERED = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")

# How many elements of a tensor tell whether all ranks hold the same one.
_SAMPLE = 64


@attrs.frozen
class Placement:
    """Where the operands of a region are to wait. As they are, unless it is said here.

    Attributes:
        offloaded: Those that wait in host memory, by index.
        partitioned: Those of which each rank keeps a part.
        group: The ranks among which they are parted.
    """

    offloaded: Collection[int] = ()
    partitioned: Collection[int] = ()
    group: Any = None

    def put(self, index: int, tensor: Any) -> tuple[Any, Placed | None]:
        """What to hold of an operand, and how to get it back; None where it is held whole."""
        held = tensor
        partition = place = None
        if index in self.partitioned and Partition.is_possible(tensor, self.group):
            partition = Partition.of(tensor, self.group)
            held = partition.part_of(tensor)
        if index in self.offloaded and can_be_offloaded(held):
            place = held.place
            held = to_host(held)
        if held is tensor:
            return tensor, None
        held.stop_gradient = tensor.stop_gradient
        copy_attributes(tensor, held)
        return held, Placed(tuple(tensor.shape), tensor.dtype, place, partition)


AS_THEY_ARE = Placement()


@attrs.frozen(eq=False)
class Placed:
    """How to get back an operand that does not wait where it was.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        place: The device to bring it back to, or None.
        partition: How it was parted, or None.
    """

    shape: tuple[int, ...]
    dtype: Any
    place: Any
    partition: Partition | None

    def whole(self, held: Any) -> Any:
        """The operand. None if it was not the same on every rank."""
        tensor = held if self.place is None else held._copy_to(self.place, True)
        if self.partition is not None:
            tensor = self.partition.merged(tensor, self.shape)
        if tensor is not None:
            copy_attributes(held, tensor)
        return tensor


@attrs.frozen(eq=False)
class Partition:
    """A tensor that every rank of a group has, of which each keeps its part.

    Attributes:
        group: The ranks.
        sample: Some elements of the tensor, evenly spread. A tensor that is not
            the same on every rank would come back as another one, in silence.
    """

    group: Any
    sample: Any

    @classmethod
    def is_possible(cls, tensor: Any, group: Any) -> bool:
        """Whether a part for each rank can be cut off, and gathered again.

        A strided tensor would come back with another layout, which Paddle reads
        what an operator saved with.
        """
        if group.nranks < 2 or not tensor.is_dense() or not tensor._is_initialized():
            return False
        numel = tensor.size
        is_cut = numel > 0 and numel % group.nranks == 0 and tensor.is_contiguous()
        return is_cut and dtype_name(tensor.dtype) in _GATHERED

    @classmethod
    def of(cls, tensor: Any, group: Any) -> Partition:
        return cls(group, _sample(tensor))

    def part_of(self, tensor: Any) -> Any:
        """A copy of this rank's part, flat."""
        size = tensor.size // self.group.nranks
        start = size * self.group.rank
        with grad_mode(False):
            return tensor.detach().flatten()[start : start + size].clone()

    def merged(self, part: Any, shape: tuple[int, ...]) -> Any:
        """The tensor, gathered from all ranks; None if theirs was another one."""
        with grad_mode(False):
            flat = paddle.empty([part.size * self.group.nranks], part.dtype)
            paddle.distributed.stream.all_gather(flat, part.detach(), group=self.group)
            # Bit by bit, so that one NaN is another's equal.
            if _sample(flat).numpy().tobytes() != self.sample.numpy().tobytes():
                return None
            return flat.reshape(shape)


def _sample(tensor: Any) -> Any:
    with grad_mode(False):
        step = max(1, tensor.size // _SAMPLE)
        return tensor.detach().flatten()[::step].clone()


def can_be_offloaded(tensor: Any) -> bool:
    """Whether it is in device memory, and its copy would have the same layout.

    Paddle reads what an operator saved with the strides of the first run.
    """
    if tensor.place.is_cpu_place() or tensor.place.is_cuda_pinned_place():
        return False
    return not tensor.is_dense() or bool(tensor.is_contiguous())


def to_host(tensor: Any) -> Any:
    """A copy in host memory, pinned where the device can use that."""
    return tensor.pin_memory() if core.is_compiled_with_cuda() else tensor.cpu()
