"""`recompute`: reads the options, picks the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import paddle

from paramproxy import _hooked, _reentrant
from paramproxy._call import Call
from paramproxy._compat import mark_recomputed, untraced
from paramproxy._policy import Decision, SavedTensor
from paramproxy._region import Options, Region


__all__ = ["recompute"]

R = TypeVar("R")


@untraced
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
        use_reentrant: True for the PyLayer engine, the one there is so far.
        preserve_rng_state: Whether the second run draws the random numbers of
            the first: Paddle's generators of the current device, the
            hybrid-parallel tracker, numpy's and Python's global streams, and
            what is registered with Paddle's `custom_state_manager`. False
            leaves all of them alone.
        offload_indices: Positions of arguments whose tensors wait for backward
            in host memory, and names of keyword arguments. Tensors that are in
            host memory already stay where they are, and so do parameters.
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
            backward for `paddle.grad` and `create_graph=True`.
        MutationError: A tensor that the function reads was changed in place,
            by the function itself or between forward and backward.
        NoStorageError: A parameter was freed and not gathered again.
        ReplayError: The function raised in its second run only.
        ReplayMismatchError: Its second run gave other outputs than its first.

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

    !!! warning "What the reentrant engine cannot do"
        - **A second backward** through any PyLayer crashes Paddle. Asking for
          `retain_graph=True` gives a `RetainGraphWarning`.
        - `paddle.grad` and `create_graph=True` are refused.
        - The first run records nothing. What leaves the function by another way
          than its result (a loss kept on a layer) has no gradient, and of
          several outputs one that was cut off has `stop_gradient=False`.
        - In the second run a leaf stands for a parameter argument:
          `isinstance`, `name` and every attribute are the parameter's, `is` is not.
        - A parameter that several regions *capture* has its hooks called once
          for each. Pass it as an argument, and they are called once.
        - Buffers are written by both runs.

        The page *Caveats* of the documentation has the whole list.
    """
    options = Options(
        preserve_rng_state=preserve_rng_state,
        preserve_external_rng_state=preserve_external_rng_state,
        preserve_buffers=preserve_buffers,
        debug=debug,
        policy=policy,
    )
    offloaded = tuple(offload_indices)
    result: R = _recompute(function, args, kwargs, use_reentrant, offloaded, options)
    return result


def _recompute(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool,
    offload_indices: tuple[int | str, ...],
    options: Options,
) -> Any:
    if not callable(function):
        msg = f"Cannot recompute {function!r}: expected a callable, got {type(function).__name__}."
        raise TypeError(msg)
    if not paddle.in_dynamic_mode():
        call = Call.of(args, kwargs)
        return mark_recomputed(function)(*call.args, **call.kwargs)
    if not paddle.is_grad_enabled() or _hooked.is_plain_call():
        call = Call.of(args, kwargs)
        return function(*call.args, **call.kwargs)
    region, tensors = Region.open(function, args, kwargs, options)
    offload = _offloaded(region, offload_indices)
    is_reentrant = use_reentrant and region.has_differentiable_operand and options.policy is None
    if is_reentrant and not _hooked.is_served():
        return _reentrant.run(region, tensors, offload)
    return _hooked.run(region, tensors, offload, options)


def _offloaded(region: Region, indices: tuple[int | str, ...]) -> set[int]:
    """The operands that `offload_indices` names."""
    if not indices:
        return set()
    _refuse_unknown(region, indices)
    offloaded = set()
    for index, places in enumerate(region.call.places):
        if not any(region.call.argument_at(position) in indices for position in places):
            continue
        if region.operands[index].parameter is None:
            offloaded.add(index)
            continue
        name = region.name_operand(region.operands[index])
        warnings.warn(
            f"offload_indices names {name}, which stays where it is: a parameter is not an "
            "activation. Take it out of offload_indices.",
            stacklevel=5,
        )
    return offloaded


def _refuse_unknown(region: Region, indices: tuple[int | str, ...]) -> None:
    known = {*range(len(region.call.args)), *region.call.kwargs}
    for index in indices:
        if index not in known:
            msg = (
                f"Cannot offload argument {index!r} of {region.name}: it was called with "
                f"{len(region.call.args)} positional arguments and the keywords "
                f"{sorted(region.call.kwargs)}. Give positions of arguments, or keywords."
            )
            raise ValueError(msg)
