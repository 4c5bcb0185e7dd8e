"""`recompute`: reads the options, picks the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

import paddle

from paramproxy import _hooked, _reentrant
from paramproxy._call import Call
from paramproxy._caller import log, warn
from paramproxy._compat import mark_recomputed, set_eval_frame, untraced
from paramproxy._dispatch import region_frame
from paramproxy._options import Options
from paramproxy._placement import AS_THEY_ARE, Placement
from paramproxy._policy import Decision, SavedTensor
from paramproxy._region import Region


__all__ = ["checkpoint", "recompute", "recompute_call"]

P = ParamSpec("P")
R = TypeVar("R")


def recompute(
    function: Callable[..., R],
    /,
    *args: Any,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    preserve_external_rng_state: bool = True,
    preserve_buffers: bool = True,
    offload_indices: Iterable[int | str] = (),
    policy: Callable[[SavedTensor], Decision] | None = None,
    debug: bool = False,
    **kwargs: Any,
) -> R:
    """Call `function(*args, **kwargs)` without keeping its activations.

    They are computed a second time in backward. A drop-in for
    `paddle.distributed.fleet.utils.recompute`, which runs that second time on
    copies of the parameters it was given, so that `main_grad`, hooks and every
    other attribute are lost (PaddlePaddle/Paddle#70508). Here it runs on leaves
    that *are* the parameters for everything but their graph.

    Args:
        function: Any callable: a function, a partial, a bound method, an
            `nn.Layer`, a `PyLayer.apply`, a C op, an object with `__call__`. It
            has to do the same each time it is called.
        *args: Its arguments: tensors of any shape and dtype, parameters, views,
            constants, None, in containers of any depth.
        use_reentrant: True for the reentrant engine, a PyLayer, as Paddle's
            default. False for the hook engine, which keeps the exact graph. The
            table below says which gives what.
        preserve_rng_state: Whether the second run draws the random numbers of
            the first: Paddle's generators of the current device, the
            hybrid-parallel tracker, numpy's and Python's global streams, and
            what is registered with Paddle's `custom_state_manager`. False
            leaves all of them alone.
        preserve_external_rng_state: False leaves numpy's and Python's streams
            alone, whose handling is most of what random streams cost.
        preserve_buffers: Whether buffers that the function writes (running
            statistics, a moving average) are written once, though it runs
            twice. Only those that the first run changed are copied.
        offload_indices: Positions of arguments whose tensors wait for backward
            in host memory, and names of keyword arguments. A position counts in
            the function's signature too, as Paddle documents it: one that was
            passed by its keyword is found. Tensors that are in
            host memory already stay where they are, and so do parameters, and
            tensors that are not contiguous.
        policy: What to do with each tensor that is saved for backward: recompute
            it, keep it, or move it to the host. See
            [`save_ops`][paramproxy.save_ops] and its like. The hook engine
            serves such a call, whatever `use_reentrant` says.
        debug: Whether to note which lines save what, so that the error can name
            them when a second run turns out to differ (hook engine).
        **kwargs: Its keyword arguments.

    Returns:
        The same containers, constants, shapes, dtypes and values as the call
        itself.

    What is raised in backward reaches the caller as an `OSError` whose text
    holds the name and the message of these: Paddle translates it.

    Raises:
        TypeError: `function` can't be called.
        ValueError: `offload_indices` names something that is no argument.
        UnsupportedError: At once for what no second run could get right; in
            backward, in reentrant mode, for `paddle.grad` and `create_graph=True`.
        MutationError: A tensor that the function reads was changed in place,
            by the function itself or between forward and backward.
        NoStorageError: A parameter was freed and not gathered again.
        ReplayError: The function raised in its second run only.
        ReplayMismatchError: Its second run gave other outputs than its first, or
            saved other tensors.

    Examples:
        >>> import paddle
        >>> from paramproxy import recompute
        >>> w = paddle.create_parameter([2, 2], "float32")
        >>> w.main_grad = paddle.zeros([2, 2])
        >>> x = paddle.ones([1, 2])
        >>> loss = recompute(lambda x, w: paddle.tanh(x @ w), x, w).sum()
        >>> loss.backward()
        >>> w.grad.shape == w.shape
        True

    | | reentrant (default) | hook engine |
    |---|---|---|
    | the graph | one node; a graph of its own in backward | the true one |
    | first run | without recording | recording |
    | parameter arguments in the second run | leaves: all but `is` | themselves |
    | `retain_graph`, a second backward | crashes Paddle: a warning before | right |
    | `paddle.grad`, double gradients | refused | right |
    | several outputs; hooks, `paddle.grad` inside | [caveats][the-reentrant-engine] | right |
    | what leaves the function by another way than its result | no gradient | right |
    | the tail after the last saved tensor | runs again | does not |
    | a gradient that comes early, by one of several outputs | waits | starts the replay |

    Three kinds of calls in reentrant mode are served by the hook engine: those
    without a differentiable input, those with a `policy`, and those inside of a
    region of the hook engine. The page *Caveats* has what neither can do.
    """
    traced = set_eval_frame(None)
    try:
        options = Options(
            use_reentrant,
            preserve_rng_state,
            preserve_external_rng_state,
            preserve_buffers,
            offload_indices,
            policy,
            debug,
        )
        result: R = recompute_call(function, args, kwargs, options)
        return result
    finally:
        set_eval_frame(traced)


@overload
def checkpoint(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def checkpoint(
    *,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    preserve_external_rng_state: bool = True,
    preserve_buffers: bool = True,
    offload_indices: Iterable[int | str] = (),
    policy: Callable[[SavedTensor], Decision] | None = None,
    debug: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Have every call of a function or method recomputed.

    Args:
        function: The function. Left out, a decorator with these options.
        **options: As of [`recompute`][paramproxy.recompute].

    Returns:
        A function with the signature of `function`.

    Raises:
        TypeError: `function` can't be called, or there is no such option.

    Examples:
        >>> import paddle, paramproxy
        >>> class Block(paddle.nn.Layer):
        ...     @paramproxy.checkpoint(use_reentrant=False)
        ...     def forward(self, x):
        ...         return paddle.tanh(x)
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> Block()(x).sum().backward()
        >>> x.grad.shape == x.shape
        True
    """
    chosen = Options.of(options)
    return _checkpointed(chosen) if function is None else _checkpointed(chosen)(function)


def _checkpointed(options: Options) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        _refuse_uncallable(function)

        @untraced
        @functools.wraps(function)
        def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = recompute_call(function, args, kwargs, options)
            return result

        return checkpointed

    return decorator


def recompute_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    placement: Callable[[Region], Placement] | None = None,
) -> Any:
    """Recompute a call.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments, without options.
        options: The options.
        placement: Says where the operands wait for backward. None for what
            `options.offload_indices` says.
    """
    _refuse_uncallable(function)
    if not paddle.in_dynamic_mode():
        call = Call.of(args, kwargs)
        return mark_recomputed(function)(*call.args, **call.kwargs)
    around = region_frame()
    if not paddle.is_grad_enabled() or _hooked.is_plain_call(around):
        call = Call.of(args, kwargs)
        return function(*call.args, **call.kwargs)
    region, tensors = Region.open(function, args, kwargs, options)
    if placement is not None:
        place = placement(region)
    elif options.offload_indices:
        place = _offloaded(region, options.offload_indices)
    else:
        place = AS_THEY_ARE
    # Whether the reentrant engine is asked for, and can do what is asked.
    is_reentrant = options.use_reentrant and options.policy is None
    if is_reentrant and region.has_differentiable_operand and not _hooked.is_served(around):
        return _reentrant.run(region, tensors, place)
    if options.use_reentrant:
        _log_engine(region, options)
    return _hooked.run(region, tensors, place, options)


def _log_engine(region: Region, options: Options) -> None:
    if options.policy is not None:
        why = "it has a policy"
    elif region.has_differentiable_operand:
        why = "it is inside of a region of that engine"
    else:
        why = "it has no differentiable input"
    log.debug("%s is served by the hook engine: %s", region.name, why)


def _refuse_uncallable(function: Any) -> None:
    if not callable(function):
        msg = f"Cannot recompute {function!r}: expected a callable, got {type(function).__name__}."
        raise TypeError(msg)


def _offloaded(region: Region, indices: tuple[int | str, ...]) -> Placement:
    """The operands that `offload_indices` names are to wait in host memory."""
    arguments = {_argument(region, index) for index in indices}
    offloaded = set()
    for index, places in enumerate(region.call.places):
        if not any(region.call.argument_at(position) in arguments for position in places):
            continue
        if region.operands[index].parameter is None:
            offloaded.add(index)
            continue
        name = region.name_operand(region.operands[index])
        warn(
            f"offload_indices names {name}, which stays where it is: a parameter is not an "
            "activation. Take it out of offload_indices."
        )
    return Placement(offloaded=offloaded)


def _argument(region: Region, index: int | str) -> int | str:
    """The argument that an index names: a position, or a keyword.

    Paddle counts positions in the function's signature, where an argument that
    was passed by its keyword, or left out, has one too.
    """
    if index in {*range(len(region.call.args)), *region.call.kwargs}:
        return index
    names = _positional_names(region.function)
    if isinstance(index, int) and 0 <= index < len(names):
        return names[index]
    msg = (
        f"Cannot offload argument {index!r} of {region.name}: it was called with "
        f"{len(region.call.args)} positional arguments and the keywords "
        f"{sorted(region.call.kwargs)}. Give positions of arguments, or keywords."
    )
    raise ValueError(msg)


def _positional_names(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in parameters.values() if parameter.kind is kind]
