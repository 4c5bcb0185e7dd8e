"""What to do with a tensor that a region saves: recompute it, keep it, move it to the host.

A policy is any callable from a `SavedTensor` to a `Decision`. As in jax, policies
compose with `|`: the first answer that is not "recompute" holds.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import attrs

from paramproxy._caller import is_paddles
from paramproxy._code import operation_at
from paramproxy._compat import SAVE_FOR_BACKWARD
from paramproxy._parameter import nbytes


__all__ = [
    "Decision",
    "Policy",
    "SavedTensor",
    "decision_of",
    "offload_over",
    "save_everything",
    "save_nothing",
    "save_ops",
    "save_under",
]


class Decision(enum.Enum):
    """What a policy answers.

    `RECOMPUTE` is false in a condition, the other two are true.

    Examples:
        >>> import paramproxy
        >>> [decision.name for decision in paramproxy.Decision if decision]
        ['SAVE', 'OFFLOAD']
    """

    RECOMPUTE = "recompute"
    """Keep nothing: the tensor is computed a second time in backward."""
    SAVE = "save"
    """Keep the tensor, as without recompute."""
    OFFLOAD = "offload"
    """Keep a copy in host memory. What is there already, a parameter, and a
    tensor that is not contiguous are recomputed instead."""

    def __bool__(self) -> bool:
        return self is not Decision.RECOMPUTE


@attrs.frozen
class SavedTensor:
    """What a policy is told of a tensor that is saved for backward.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        nbytes: The bytes of its elements.
        ops: What saves it, innermost first: the name of the PyLayer, or of the
            operator and of the Paddle functions that called it (`"linear"`,
            `"softmax"`). Paddle does not say which kernel saves a tensor; these
            are the Python functions on the stack, so an operator that is called
            by a C function of the user's own has no name here.

    Examples:
        >>> import paddle, paramproxy
        >>> def policy(saved):
        ...     print(saved.shape, saved.nbytes, saved.ops)
        ...     return paramproxy.Decision.RECOMPUTE
        >>> x = paddle.ones([2, 3])
        >>> x.stop_gradient = False
        >>> y = paramproxy.recompute(paddle.nn.functional.softmax, x, policy=policy)
        (2, 3) 24 ('softmax',)
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    ops: tuple[str, ...]

    @classmethod
    def of(cls, tensor: Any) -> SavedTensor:
        return cls(tuple(tensor.shape), tensor.dtype, nbytes(tensor), _operations())


def decision_of(policy: Callable[[SavedTensor], Decision], tensor: Any) -> Decision:
    """What the policy answers for a tensor that is being saved."""
    decision: Any = policy(SavedTensor.of(tensor))
    if not isinstance(decision, Decision):
        msg = (
            f"Cannot take {decision!r} from the policy {policy!r}: expected Decision.SAVE, "
            "Decision.RECOMPUTE or Decision.OFFLOAD."
        )
        raise TypeError(msg)
    return decision


class Policy:
    """Base of the ready-made policies: a callable that composes with `|`.

    Examples:
        >>> import paramproxy
        >>> policy = paramproxy.save_ops("softmax") | paramproxy.save_under(1024)
        >>> mine = lambda saved: paramproxy.Decision.RECOMPUTE
        >>> both = policy | mine
    """

    def __call__(self, saved: SavedTensor) -> Decision:
        """The decision on one tensor."""
        raise NotImplementedError

    def __or__(self, other: Callable[[SavedTensor], Decision]) -> Policy:
        return _Either(self, other)

    def __ror__(self, other: Callable[[SavedTensor], Decision]) -> Policy:
        return _Either(other, self)


@attrs.frozen
class _Either(Policy):
    first: Callable[[SavedTensor], Decision]
    second: Callable[[SavedTensor], Decision]

    def __call__(self, saved: SavedTensor) -> Decision:
        return self.first(saved) or self.second(saved)


@attrs.frozen
class _Always(Policy):
    """The same decision for every tensor."""

    decision: Decision

    def __call__(self, saved: SavedTensor) -> Decision:
        return self.decision


@attrs.frozen
class _Sized(Policy):
    decision: Decision
    fits: Callable[[int], bool]

    def __call__(self, saved: SavedTensor) -> Decision:
        return self.decision if self.fits(saved.nbytes) else Decision.RECOMPUTE


@attrs.frozen
class _SaveOps(Policy):
    names: frozenset[str]

    def __call__(self, saved: SavedTensor) -> Decision:
        return Decision.RECOMPUTE if self.names.isdisjoint(saved.ops) else Decision.SAVE


save_nothing: Policy = _Always(Decision.RECOMPUTE)
"""The policy of a plain `recompute`: everything is computed a second time."""

save_everything: Policy = _Always(Decision.SAVE)
"""Nothing is computed a second time, as without recompute."""


def save_under(nbytes: int) -> Policy:
    """Keep tensors that are smaller than `nbytes` bytes.

    Args:
        nbytes: The limit. A tensor of as many bytes is recomputed.

    Returns:
        The policy.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([4])
        >>> x.stop_gradient = False
        >>> with paramproxy.report() as r:
        ...     y = paramproxy.recompute(
        ...         lambda x: paddle.tanh(x * 2.0), x, policy=paramproxy.save_under(1024)
        ...     )
        >>> r.rows[0].saved_bytes  # the input, and what tanh saves
        32
    """
    return _Sized(Decision.SAVE, functools.partial(_is_less, nbytes))


def offload_over(nbytes: int) -> Policy:
    """Move tensors that are larger than `nbytes` bytes to host memory until backward.

    Args:
        nbytes: The limit. A tensor of as many bytes is recomputed.

    Returns:
        The policy.

    Examples:
        >>> import paramproxy
        >>> policy = paramproxy.offload_over(2**20) | paramproxy.save_everything
        >>> policy(paramproxy.SavedTensor((512, 512), "float32", 2**20, ()))
        <Decision.SAVE: 'save'>
        >>> policy(paramproxy.SavedTensor((1024, 1024), "float32", 2**22, ()))
        <Decision.OFFLOAD: 'offload'>
    """
    return _Sized(Decision.OFFLOAD, functools.partial(_is_more, nbytes))


def save_ops(*names: str) -> Policy:
    """Keep what these operators, Paddle functions or PyLayers save.

    Args:
        *names: `"matmul"`, `"linear"`, `"flash_attention"`, a PyLayer's class
            name: whatever stands in [`SavedTensor.ops`][paramproxy.SavedTensor].

    Returns:
        The policy.

    Examples:
        >>> import paramproxy
        >>> policy = paramproxy.save_ops("linear", "matmul")
        >>> policy(paramproxy.SavedTensor((2, 3), "float32", 24, ("linear",)))
        <Decision.SAVE: 'save'>
        >>> policy(paramproxy.SavedTensor((2, 3), "float32", 24, ("softmax",)))
        <Decision.RECOMPUTE: 'recompute'>
    """
    return _SaveOps(frozenset(names))


def _is_less(limit: int, size: int) -> bool:
    return size < limit


def _is_more(limit: int, size: int) -> bool:
    return size > limit


# Layers of Paddle's between the user's call and the operator that say nothing.
_UNTOLD = ("forward", "__call__", "__impl__", "wrapper", "inner", "_dygraph_call_func")


def _operations() -> tuple[str, ...]:
    """What the stack says of the operator that is saving a tensor."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("paramproxy."):
        frame = frame.f_back
    if frame.f_code is SAVE_FOR_BACKWARD:
        return (_layer_name(frame),)
    if not is_paddles(frame):
        name = operation_at(frame.f_code, frame.f_lasti)
        return (name,) if name else ()
    names = []
    while frame is not None and is_paddles(frame):
        name = frame.f_code.co_name
        if name not in _UNTOLD:
            names.append(name.lstrip("_"))
        frame = frame.f_back
    return tuple(dict.fromkeys(names))


def _layer_name(frame: types.FrameType) -> str:
    """The class of the PyLayer whose context is saving."""
    context = frame.f_locals[frame.f_code.co_varnames[0]]
    return type(context).__name__.removesuffix("_backward")
