"""The user's code around us: what it asked a backward for, where to warn it, what to log.

What the caller of a backward asked for is on the Python stack, and nowhere else.

Paddle's autograd tells a hook neither `retain_graph` nor which function started
it. While it runs, the frame of `Tensor.backward`, `paddle.autograd.backward` or
`paddle.grad` waits on the stack with the answer among its locals.
"""

from __future__ import annotations

import logging
import sys
import types
import warnings

from paramproxy._compat import backward


__all__ = ["backward_frame", "is_paddles", "is_users", "keeps_graph", "log", "makes_graph", "warn"]

log = logging.getLogger("paramproxy")
"""Says at DEBUG what was decided for the user. (Paddle prints every INFO of the process.)"""
log.addHandler(logging.NullHandler())


def backward_frame() -> types.FrameType | None:
    """The frame of Paddle's `backward` or `grad` that is running this backward."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_backward = code.co_name in ("backward", "grad") and "retain_graph" in code.co_varnames
        if is_backward and (is_paddles(frame) or code is backward.__code__):
            return frame
        frame = frame.f_back
    return None


def keeps_graph() -> bool:
    """Whether the graph that is being run backward can be run backward again.

    `paddle.grad` works on a copy of the nodes and leaves the graph as it was,
    whatever it is asked for. Nobody knows of a backward without such a frame.
    """
    frame = backward_frame()
    if frame is None or frame.f_code.co_name == "grad":
        return True
    return bool(frame.f_locals.get("retain_graph"))


def makes_graph() -> bool:
    """Whether the gradients are to have a graph of their own."""
    frame = backward_frame()
    return frame is not None and bool(frame.f_locals.get("create_graph"))


def is_paddles(frame: types.FrameType) -> bool:
    """Whether the frame runs code of Paddle's own."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("paddle", "decorator")


def is_users(frame: types.FrameType) -> bool:
    """Whether the frame runs neither our code nor Paddle's."""
    is_ours = frame.f_globals.get("__name__", "").partition(".")[0] == "paramproxy"
    return not (is_ours or is_paddles(frame))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that has led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
