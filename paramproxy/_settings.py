"""What holds for a thread or a block of code: whether it replays, early stop, debug mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar


__all__ = [
    "begin_recomputing",
    "debug_mode",
    "early_stop",
    "is_recomputing",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
]

_EARLY_STOP: ContextVar[bool] = ContextVar("early_stop", default=True)
_DEBUG: ContextVar[bool | None] = ContextVar("debug", default=None)


class _Thread(threading.local):
    replays = 0


_thread = _Thread()


def is_recomputing() -> bool:
    """Whether this thread is running a region for the second time.

    For code that is to do something once: count a step, log, draw from a stream
    that nobody restores.

    Returns:
        True inside a replay, in either engine. False in a first run, outside of
        any region, and in every other thread.

    Examples:
        >>> import paddle, paramproxy
        >>> seen = []
        >>> def block(x):
        ...     seen.append(paramproxy.is_recomputing())
        ...     return paddle.tanh(x)
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> paramproxy.recompute(block, x).sum().backward()
        >>> seen
        [False, True]
    """
    return _thread.replays > 0


def begin_recomputing(stack: contextlib.ExitStack) -> None:
    """From now on, and until the stack closes, this thread is in a replay."""
    stack.callback(_end_recomputing)
    _thread.replays += 1


def _end_recomputing() -> None:
    _thread.replays -= 1


@contextlib.contextmanager
def set_checkpoint_early_stop(enabled: bool) -> Iterator[None]:
    """Whether regions of the hook engine that are opened in this block stop early.

    A replay ends where the last tensor that backward waits for was saved; what
    the function does after that is not run again. Turned off, the function is
    run to its end, which a function with side effects may want.

    Args:
        enabled: False to turn it off. It is on by default.

    Examples:
        >>> import paddle, paramproxy
        >>> calls = []
        >>> def block(x):
        ...     y = paddle.exp(x)
        ...     calls.append("tail")
        ...     return y + 1.0
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> with paramproxy.set_checkpoint_early_stop(False):
        ...     y = paramproxy.recompute(block, x, use_reentrant=False)
        >>> y.sum().backward()
        >>> calls
        ['tail', 'tail']
    """
    token = _EARLY_STOP.set(enabled)
    try:
        yield
    finally:
        _EARLY_STOP.reset(token)


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Whether regions that are opened in this block note which lines save what.

    When a replay turns out to differ from its first run, the error then names
    the lines of both. It costs a look at the stack for every saved tensor.

    Args:
        enabled: True or False for every region in the block, whatever its
            `debug` argument says; None to leave it to that.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> with paramproxy.set_checkpoint_debug_enabled(True):
        ...     y = paramproxy.recompute(paddle.tanh, x, use_reentrant=False)
    """
    token = _DEBUG.set(enabled)
    try:
        yield
    finally:
        _DEBUG.reset(token)


def early_stop() -> bool:
    """Whether a region that is opened now stops early."""
    return _EARLY_STOP.get()


def debug_mode(debug: bool) -> bool:
    """Whether a region that is opened now is debugged, with this `debug` argument."""
    enabled = _DEBUG.get()
    return debug if enabled is None else enabled
