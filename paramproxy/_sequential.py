"""`recompute_sequential`: a row of layers, recomputed segment by segment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import paddle

from paramproxy._compat import untraced
from paramproxy._options import Options
from paramproxy._recompute import recompute_call


__all__ = ["recompute_sequential"]


@untraced
def recompute_sequential(
    ctx: Mapping[str, Any],
    functions: paddle.nn.Sequential | Iterable[Callable[..., Any]],
    /,
    *args: Any,
    use_reentrant: bool | None = None,
    offload_indices: Iterable[int | str] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a row of layers, each on what the one before it returned, in recomputed segments.

    A drop-in for `paddle.incubate.distributed.fleet.recompute_sequential`, which
    is wrong for more than one segment: it takes the tensor that a segment returns
    apart into its rows, and runs a layer that stands in two places only once.

    The last segment is called as it is, here as there and in
    `torch.utils.checkpoint.checkpoint_sequential`: its backward comes first, so
    what it saves would be recomputed at once. With one segment nothing is
    recomputed.

    Args:
        ctx: `segments`, how many chunks to make of the layers (1 by default; they
            differ by one layer at most, and more than there are layers are as many
            as there are), and any option of [`recompute`][paramproxy.recompute],
            as `preserve_rng_state`.
        functions: An `nn.Sequential` or `nn.LayerList`, or callables. A forward
            hook of the container is called once, around all segments.
        *args: What the first layer is called with. A tuple that a layer returns is
            one argument of the next, as in `nn.Sequential`.
        use_reentrant: As of `recompute`, and before what `ctx` says of it.
        offload_indices: The same: positions and keywords of the first layer's
            arguments. 0 means the one argument of every later segment too.
        **kwargs: Keyword arguments of the first layer.

    Returns:
        What the last layer returns; with no layers the one argument itself.

    Raises:
        TypeError: `ctx` is not a dict, `functions` is not a row of callables.
        ValueError: `segments` is not a positive number.

    Examples:
        >>> import paddle, paramproxy
        >>> layers = paddle.nn.Sequential(*(paddle.nn.Linear(2, 2) for _ in range(5)))
        >>> x = paddle.ones([1, 2])
        >>> y = paramproxy.recompute_sequential({"segments": 3}, layers, x)
        >>> bool(paddle.allclose(y, layers(x)))
        True
    """
    options = Options.from_ctx(ctx, ("segments",), "recompute_sequential")
    if use_reentrant is not None:
        options = attrs.evolve(options, use_reentrant=use_reentrant)
    if offload_indices is not None:
        options = attrs.evolve(options, offload_indices=offload_indices)
    segments = _segments(_layers(functions), ctx.get("segments", 1))

    def run(*args: Any, **kwargs: Any) -> Any:
        return _run(segments, options, args, kwargs)

    if isinstance(functions, paddle.nn.Layer) and _is_hooked(functions):
        container = copy.copy(functions)
        container.forward = run
        return container(*args, **kwargs)
    return run(*args, **kwargs)


@attrs.frozen(eq=False)
class _Segment:
    """Some layers in a row, as one function."""

    layers: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.layers:
            (value,) = args
            return value
        first, *rest = self.layers
        value = first(*args, **kwargs)
        for layer in rest:
            value = layer(value)
        return value


def _run(
    segments: list[_Segment], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    *recomputed, last = segments
    for segment in recomputed:
        args = (recompute_call(segment, args, kwargs, options),)
        kwargs = {}
        later = [index for index in options.offload_indices if index == 0]
        options = attrs.evolve(options, offload_indices=later)
    return last(*args, **kwargs)


def _segments(layers: list[Any], count: Any) -> list[_Segment]:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        msg = f"Cannot make {count!r} segments: expected a number of 1 or more in ctx['segments']."
        raise ValueError(msg)
    count = max(1, min(count, len(layers)))
    size, longer = divmod(len(layers), count)
    remaining = iter(layers)
    return [
        _Segment(list(itertools.islice(remaining, size + (index < longer))))
        for index in range(count)
    ]


def _layers(functions: Any) -> list[Any]:
    """The layers in a row. `children()` would leave out the second place of one that has two."""
    if isinstance(functions, (paddle.nn.Sequential, paddle.nn.LayerList)):
        layers = list(functions._sub_layers.values())
    else:
        is_row = isinstance(functions, Iterable) and not isinstance(functions, paddle.nn.Layer)
        layers = list(functions) if is_row else [None]
    if not all(map(callable, layers)) or _has_own_forward(functions):
        msg = (
            "Cannot recompute in segments: expected an nn.Sequential or callables in a row, got "
            f"{functions!r}. Call recompute on it as a whole."
        )
        raise TypeError(msg)
    return layers


def _has_own_forward(functions: Any) -> bool:
    is_sequential = isinstance(functions, paddle.nn.Sequential)
    return is_sequential and type(functions).forward is not paddle.nn.Sequential.forward


def _is_hooked(layer: Any) -> bool:
    return bool(layer._forward_pre_hooks or layer._forward_post_hooks)
