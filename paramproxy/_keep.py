"""`keep`: a call inside a region that is run once, whatever is run again around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from paramproxy._ambient import RandomState
from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._dispatch import region_frame
from paramproxy._saved import refuse_change
from paramproxy._tree import alias, flatten, unflatten


__all__ = ["KeptCall", "keep"]

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
        Do not change what it returns in place: make a new tensor of it.
    """
    frame = region_frame()
    if frame is None:
        return function(*args, **kwargs)
    result: R = frame.keep(function, args, kwargs)
    return result


@attrs.frozen(eq=False)
class KeptCall:
    """What a kept call returned.

    Attributes:
        leaves: The flat result, with an alias of each tensor.
        versions: The in-place version counter of each tensor, by position.
        spec: Its shape.
        random: The random streams after the call, which a replay skips.
    """

    leaves: list[Any]
    versions: dict[int, int]
    spec: Any
    random: RandomState | None

    @classmethod
    def of(cls, value: Any, random: RandomState | None) -> KeptCall:
        leaves, spec = flatten(value)
        versions = {
            position: leaf._inplace_version()
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf._is_initialized()
        }
        return cls([_alias(leaf) for leaf in leaves], versions, spec, random)

    def again(self) -> Any:
        """The result, for a replay."""
        for position, version in self.versions.items():
            refuse_change(self.leaves[position], version)
        if self.random is not None:
            self.random.restore()
        return unflatten(self.spec, [_alias(leaf) for leaf in self.leaves])


def _alias(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not isinstance(leaf, EagerParamBase):
        return alias(leaf)
    return leaf
