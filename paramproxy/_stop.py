"""Early stop: end a replay where the last tensor that anybody waits for was saved.

That is an exception through Paddle's C++. It leaves two things behind: grad mode
off, which the end of the replay restores, and the arguments that the pack hook was
called with, for good. So the tensor among them is emptied first, and the reference
that nobody will ever drop is dropped here.

What a PyLayer saves is the user's own object, and an exception in a PyLayer's
forward leaves its whole context behind. There the stop waits for the next
operator outside of it that saves something.
"""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import attrs
from paddle.autograd import PyLayerContext

from paramproxy._compat import Tensor


__all__ = ["ReplayStopped", "Stopper"]


class ReplayStopped(BaseException):
    """Raised through the user's function, in which Paddle makes an `OSError` of it."""


@attrs.define(eq=False)
class Stopper:
    """Stops the replay of one function: the context in which to call it.

    No generator: from Python 3.13 on one that ends an exception keeps the
    frames that it came through, until the garbage collector runs.

    Attributes:
        is_stopped: Whether it was asked to.
    """

    is_stopped: bool = False
    _root: types.FrameType | None = None
    _was_raised: bool = False
    _arguments: list[tuple[Any]] = attrs.field(factory=list)

    def __enter__(self) -> None:
        self._root = sys._getframe(1)

    def __exit__(self, *error: object) -> bool:
        self._root = None
        return self.is_stopped

    def stop(self, arguments: tuple[Any], is_layers: bool) -> None:
        """Called by a pack hook, again and again from the first time on.

        Args:
            arguments: The very tuple that the hook was called with: a tensor.
            is_layers: Whether a PyLayer saves it.
        """
        self.is_stopped = True
        if self._was_raised and sys.exc_info()[1] is not None:
            return  # in a `finally` of the user's, which is to be run to its end
        if not is_layers and not self._is_in_a_layer():
            arguments[0].reconstruct_from_(_EMPTY)
            self._arguments.append(arguments)
            self._was_raised = True
            raise ReplayStopped

    def clean_up(self) -> None:
        """Once the exception is gone: free what Paddle called the pack hook with."""
        while self._arguments:
            arguments = self._arguments.pop()
            if sys.getrefcount(arguments) == _OURS + 1:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(arguments))

    def _is_in_a_layer(self) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None and frame is not self._root:
            if _is_forward(frame):
                return True
            frame = frame.f_back
        return False


_EMPTY = Tensor()
# Of an object in one variable: that, and the argument of getrefcount.
_OURS = 2


def _is_forward(frame: types.FrameType) -> bool:
    """Whether the frame runs the `forward` of a PyLayer."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), PyLayerContext)
