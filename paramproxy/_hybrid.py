"""`recompute_hybrid`: recompute among ranks that hold the same activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paramproxy._compat import untraced
from paramproxy._options import Options
from paramproxy._placement import Placement
from paramproxy._recompute import recompute_call
from paramproxy._region import Region


__all__ = ["recompute_hybrid"]

R = TypeVar("R")


@untraced
def recompute_hybrid(
    ctx: Mapping[str, Any], function: Callable[..., R], /, *args: Any, **kwargs: Any
) -> R:
    """Recompute a call whose arguments every rank of a group has.

    A drop-in for `paddle.incubate.distributed.fleet.recompute_hybrid`. Paddle's
    replays on copies of the parameters, as its `recompute` does, refuses CPU,
    and returns a tuple for whatever the function returns.

    Args:
        ctx: `mp_group`, the group of the tensor-parallel ranks; `offload`, whether
            the activations that the function is called with wait for backward in
            host memory; `partition`, whether each rank keeps only its part of
            them. Both are False by default. Besides these, any option of
            [`recompute`][paramproxy.recompute].
        function: The function or layer.
        *args: Its arguments, as of `recompute`.
        **kwargs: Its keyword arguments.

    What stays where and as it is: parameters, what the function reads besides its
    arguments, and, of what would be parted, a tensor that is strided, of a dtype
    that gloo or NCCL can't gather, or of a size that the ranks can't share evenly.

    Returns:
        What the function returns.

    Raises:
        TypeError: `ctx` is not a dict, `function` can't be called.
        ValueError: There is no `mp_group` in `ctx`.
        UnsupportedError: In backward, where an activation was parted that was not
            the same on every rank. It is found by a sample of its elements.

    !!! warning
        With `partition` the replay of a region is a collective call: every rank of
        the group has to run the same regions backward, in the same order.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> group = paddle.distributed.communication.group.Group(0, 0, [0])  # this process
        >>> ctx = {"mp_group": group, "offload": True}
        >>> paramproxy.recompute_hybrid(ctx, paddle.exp, x).sum().backward()
        >>> x.grad.shape == x.shape
        True
    """
    options = Options.from_ctx(ctx, ("mp_group", "offload", "partition"), "recompute_hybrid")
    group = ctx.get("mp_group")
    if group is None:
        msg = (
            "Cannot call recompute_hybrid: there is no mp_group in ctx. Give the group of the "
            "tensor-parallel ranks, as fleet.get_hybrid_communicate_group() has it, or call "
            "recompute."
        )
        raise ValueError(msg)

    def placement(region: Region) -> Placement:
        activations = [
            index
            for index in range(len(region.call.places))
            if region.operands[index].parameter is None
        ]
        return Placement(
            offloaded=activations if ctx.get("offload", False) else (),
            partitioned=activations if ctx.get("partition", False) else (),
            group=group,
        )

    result: R = recompute_call(function, args, kwargs, options, placement)
    return result
