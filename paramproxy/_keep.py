"""`keep`: a call inside a region that is run once, whatever is run again around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from paramproxy._ambient import RandomState
from paramproxy._buffers import Writes
from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._dispatch import region_frame
from paramproxy._objects import fill
from paramproxy._region import Region
from paramproxy._saved import refuse_change
from paramproxy._tree import alias, flatten, unflatten


__all__ = ["KeptCall", "Skipped", "keep"]

R = TypeVar("R")


def keep(function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call `function(*args, **kwargs)`, once, also inside a recomputed region.

    For a call whose results are not worth recomputing: flash attention, an
    all-to-all. What it returns and what it saves for backward is kept; the rest
    of the region is still recomputed. Outside of a region it is a plain call.

    What PaddleNLP and PaddleFormers call refined recompute, by hand there.

    Args:
        function: Any callable, as for [`recompute`][paramproxy.recompute].
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returns. In a replay: the same containers, and detached tensors
        with the flags and on the storage of the first run's.

    Raises:
        MutationError: In a replay, if what it returned was changed in place.
        ReplayMismatchError: In a replay, if the region makes other calls of
            `keep` than in its first run.

    Examples:
        >>> import paddle, paramproxy
        >>> calls = []
        >>> def attention(x):
        ...     calls.append("attention")
        ...     return paddle.nn.functional.softmax(x)
        >>> def block(x):
        ...     return paddle.exp(paramproxy.keep(attention, paddle.tanh(x)))
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> paramproxy.recompute(block, x).sum().backward()
        >>> calls
        ['attention']

    !!! warning
        Do not change what it returns in place: make a new tensor of it. In
        reentrant mode what it hands on by another way than its result, in an
        object that it writes into, has no gradient.
    """
    frame = region_frame()
    if frame is None:
        return function(*args, **kwargs)
    result: R = frame.keep(function, args, kwargs)
    return result


@attrs.define(eq=False)
class Skipped:
    """What a kept call moves on, besides returning something: a replay skips the call.

    Attributes:
        random: The random streams, or None.
        objects: The objects that the region was called with, which are written by
            the end of the call.
        buffers: What it writes of the buffers that the region reads.
    """

    random: RandomState | None
    objects: list[Any]
    buffers: Writes

    @classmethod
    def by(cls, region: Region, call: Callable[[], R]) -> tuple[R, Skipped]:
        """What a call in the first run of this region gives, and what else it does."""
        random, buffers = region.ambient.random, region.buffers
        random = None if random is None else random.capture_again()
        moment = buffers.moment()
        value = call()
        return value, cls(
            None if random is None else random.moved_on(),
            region.objects.written(),
            buffers.writes_since(moment),
        )

    def again(self) -> None:
        """In a replay: as after the call."""
        if self.random is not None:
            self.random.restore()
        fill(self.objects)
        self.buffers.again()


@attrs.frozen(eq=False)
class KeptCall:
    """What a kept call returned.

    Attributes:
        leaves: The flat result, with an alias of each tensor.
        versions: The in-place version counter of each tensor, by position.
        spec: Its shape.
        skipped: What else it did.
    """

    leaves: list[Any]
    versions: dict[int, int]
    spec: Any
    skipped: Skipped

    @classmethod
    def of(cls, value: Any, skipped: Skipped) -> KeptCall:
        leaves, spec = flatten(value)
        versions = {
            position: leaf._inplace_version()
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf._is_initialized()
        }
        return cls([_alias(leaf) for leaf in leaves], versions, spec, skipped)

    def again(self) -> Any:
        """The result, for a replay."""
        for position, version in self.versions.items():
            refuse_change(self.leaves[position], version)
        self.skipped.again()
        return unflatten(self.spec, [_alias(leaf) for leaf in self.leaves])


def _alias(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not isinstance(leaf, EagerParamBase):
        return alias(leaf)
    return leaf
