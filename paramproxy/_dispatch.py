"""The dispatcher: one pair of saved-tensor hooks for Paddle, a stack of frames for us.

Paddle takes one pair of `saved_tensors_hooks` in the whole process, and calls it
for every thread. So one pair is registered here while anyone needs it, and each
thread has a stack of *frames*. A tensor that is saved goes to the top frame of
its thread, which packs it or asks the frame below.

1. In a thread without a frame tensors pass through, as if there were no hooks.
2. A caller's own hooks are a frame too: those of Paddle's `saved_tensors_hooks`,
   and of whatever a client has put in its place, because both end in the two C
   functions that are wrapped here. While no region needs the hooks they are
   registered with Paddle itself, untouched.
3. The registered unpack hook belongs to the region that opened last: Paddle
   keeps it with every node that packs, so the graph itself owns its region.
4. Once a second thread was seen to save tensors, the pair stays registered:
   taking it away in the middle of another thread's operator would crash it.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import attrs
import paddle
import wrapt
from paddle.autograd import PyLayerContext

from paramproxy._ambient import grad_mode
from paramproxy._compat import (
    LAYERS_MAY_SAVE_NONE,
    SAVE_FOR_BACKWARD,
    core,
    paddle_recompute,
    register_saved_tensors_hooks,
    reset_saved_tensors_hooks,
    saved_tensors_hooks,
    set_eval_frame,
)
from paramproxy._saved import NONE, NOTHING, Kept, Packed, keep
from paramproxy.exceptions import UnsupportedError


__all__ = [
    "CallerHooks",
    "Frame",
    "caller_hooks",
    "fresh_stack",
    "is_registered",
    "is_replay_heard",
    "is_under_hooks",
    "pack_arguments",
    "pass_through",
    "pushed",
    "region_frame",
    "replay_announced",
    "unpack",
]


class Frame:
    """What a tensor that is saved for backward goes through, in one thread."""

    runs_once = False
    """Whether it is that of a kept call."""
    under: Frame | None = None
    """The next frame down."""
    below: Frame | None = None
    """The next frame down that belongs to a region."""

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        """Pack a tensor.

        Args:
            tensor: The tensor.
            item: What the frame above packed it into; None at the top.
            is_layers: Whether a PyLayer saves it, and not an operator.

        Returns:
            What Paddle gets in its place, or the frame below gets as `item`.
        """
        raise NotImplementedError

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is to be run once."""
        raise NotImplementedError


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        # What is still to be reset of what was registered here; None for what
        # made no frame.
        self.entered: list[CallerHooks | None] = []
        # What Paddle has called the pack hook with that is running.
        self.arguments: tuple[Any, ...] = ()


_local = _Local()


@attrs.define(eq=False)
class _Dispatcher:
    """Who is registered with Paddle.

    Attributes:
        users: How many frames need the pair of this module.
        registered: The unpack hook that is registered, or None.
        thread: The thread that registered it.
        is_shared: Whether another thread was seen to save tensors meanwhile.
        native: A caller's own hooks that Paddle called before that, or None.
    """

    users: int = 0
    registered: Any = None
    thread: int = 0
    is_shared: bool = False
    native: Any = None
    lock: Any = attrs.field(factory=threading.RLock)

    def enter(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Register with this unpack hook, if it can be. What was registered before."""
        with self.lock:
            before = self.registered or unpack
            if self.users and self.thread != threading.get_ident():
                self.is_shared = True
            if not self.is_shared or self.registered is None:
                if self.registered is not None or self.native is not None:
                    reset_saved_tensors_hooks()
                try:
                    self._register(hook)
                except BaseException:
                    self._put_back(before)
                    raise
            self.users += 1
            return before

    def leave(self, before: Callable[[Any], Any]) -> None:
        """Take off what `enter` put on, and put back what was there."""
        with self.lock:
            self.users -= 1
            if self.is_shared and (self.users or threading.active_count() > 1):
                return
            self.is_shared = False
            reset_saved_tensors_hooks()
            self._put_back(before)

    def _put_back(self, before: Callable[[Any], Any]) -> None:
        """Register what was registered before, now that nothing is."""
        self.registered = None
        if self.users:
            self._register(before)
        elif self.native is not None:
            _register(self.native.pack_hook, self.native.unpack_hook)

    def see_other_thread(self) -> None:
        """A thread without a frame saves a tensor. Unless it is the last one, that goes on."""
        with self.lock:
            if self.registered is None:
                return  # it was on its way here when the pair was taken off
            self.is_shared = True
            if not self.users and threading.active_count() == 1:
                self.users = 1
                self.leave(unpack)

    def shut_down(self) -> None:
        """At the end of the process."""
        if self.registered or self.native:
            reset_saved_tensors_hooks()

    def _register(self, hook: Callable[[Any], Any]) -> None:
        try:
            _register(_Pack, hook)
        except ValueError as exc:
            msg = (
                "Cannot open a region of the hook engine: saved-tensor hooks are registered that "
                "paramproxy does not know of, and Paddle takes one pair. Enter "
                "paddle.autograd.saved_tensors_hooks after paramproxy was imported."
            )
            raise UnsupportedError(msg) from exc
        self.registered = hook
        self.thread = threading.get_ident()


def _register(pack: Any, unpack_hook: Any) -> None:
    """Register a pair. Without grad mode Paddle would do nothing, and say nothing."""
    with grad_mode(True):
        register_saved_tensors_hooks(pack, unpack_hook)


_dispatcher = _Dispatcher()
# Paddle frees its hooks after Python has gone, and waits for the GIL for ever.
atexit.register(_dispatcher.shut_down)


class _Pack(Exception):
    """The pack hook, the only one that Paddle knows, and what it gives for a tensor.

    An exception, though it is never raised, because the constructor of one keeps the
    very tuple that it was called with (`BaseException_new` in CPython's exceptions.c).
    No other callable of Python's sees that of a call from C++, and Paddle never frees it
    where the hook raises: see `Stopper`.
    """

    __slots__ = ("item",)

    def __init__(self, tensor: Any) -> None:
        around, _local.arguments = _local.arguments, self.args
        self.args = ()
        traced = set_eval_frame(None)
        try:
            is_layers = sys._getframe(1).f_code is SAVE_FOR_BACKWARD
            if tensor is NONE:  # which a PyLayer may save
                self.item: Any = NOTHING
            elif _local.frames:
                self.item = _local.frames[-1].take(tensor, None, is_layers)
            else:
                _dispatcher.see_other_thread()
                self.item = pass_through(tensor, is_layers)
        finally:
            _local.arguments = around
            set_eval_frame(traced)

    def unpack(self) -> Any:
        return self.item.unpack()


def pack_arguments() -> tuple[Any, ...]:
    """In the pack hook: the tuple that Paddle called it with."""
    return _local.arguments


def unpack(packed: Any) -> Any:
    """The unpack hook that belongs to no region."""
    return packed.unpack()


def pass_through(tensor: Any, is_layers: bool) -> Kept:
    """What Paddle would do with a tensor if there were no hooks."""
    held = tensor if is_layers else keep(tensor, is_layers)
    return Kept(held, tensor._inplace_version(), is_layers)


class pushed:  # noqa: N801
    """A block for whose time a frame is pushed.

    Args:
        frame: The frame.
        hook: The unpack hook to register. None for a frame on top of one that
            did, and for one that only wants to be found.
    """

    __slots__ = ("before", "frame", "hook")

    def __init__(self, frame: Frame, hook: Callable[[Any], Any] | None = None) -> None:
        self.frame = frame
        self.hook = hook

    def __enter__(self) -> None:
        self.before = None
        frames = _local.frames
        if frames:
            self.frame.under = frames[-1]
            self.frame.below = region_frame()
        frames.append(self.frame)
        if self.hook is not None:
            try:
                self.before = _dispatcher.enter(self.hook)
            except BaseException:
                frames.remove(self.frame)
                raise

    def __exit__(self, *error: object) -> None:
        _local.frames.remove(self.frame)
        if self.before is not None:
            _dispatcher.leave(self.before)


class fresh_stack:  # noqa: N801
    """A block in which this thread's frames are hidden: what a replay saves is not for them."""

    __slots__ = ("entered", "hidden")

    def __enter__(self) -> None:
        local = _local
        self.hidden, local.frames = local.frames, []
        self.entered, local.entered = local.entered, []

    def __exit__(self, *error: object) -> None:
        left, _local.frames = _local.frames, self.hidden
        _local.entered = self.entered
        for frame in left:  # entered by hand, and never left
            if isinstance(frame, CallerHooks) and frame.before is not None:
                _dispatcher.leave(frame.before)


def is_registered(hook: Callable[[Any], Any]) -> bool:
    """Whether Paddle keeps this unpack hook with what is saved at the moment."""
    return bool(_dispatcher.registered == hook)


def region_frame() -> Frame | None:
    """The innermost frame of this thread that is not a caller's own hooks."""
    for frame in reversed(_local.frames):
        if not isinstance(frame, CallerHooks):
            return frame
    return None


def is_under_hooks(frame: Frame) -> bool:
    """Whether somebody's own hooks have been entered since the frame was pushed."""
    above = _local.frames[_local.frames.index(frame) + 1 :]
    return any(isinstance(other, CallerHooks) for other in above)


def caller_hooks() -> CallerHooks | None:
    """A caller's own hooks, if they are on top: those around what is called next."""
    top = _local.frames[-1] if _local.frames else None
    return top if isinstance(top, CallerHooks) else None


@attrs.define(eq=False)
class CallerHooks(Frame):
    """A caller's own `saved_tensors_hooks`, while their block lasts.

    Attributes:
        pack_hook: The hook that packs.
        unpack_hook: The one that undoes it.
        before: What the dispatcher had registered. None where Paddle calls the
            hooks itself.
    """

    pack_hook: Any
    unpack_hook: Any
    before: Any
    below: Frame | None = None

    @property
    def is_paddle_recompute(self) -> bool:
        """Whether they are those of Paddle's own hook mode, which counts what it packs."""
        module = getattr(self.pack_hook, "__module__", "")
        return bool(module == paddle_recompute().__name__)

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        if self.below is None:
            return self.packed(tensor)
        # An early stop of the region around empties what the hook was called with.
        held = keep(tensor, is_layers)
        if held is not tensor:
            held.name = tensor.name  # by which PaddleFormers knows what it keeps
        return self.below.take(tensor, self.packed(held), is_layers)

    def packed(self, tensor: Any) -> Packed:
        return Packed(self.pack_hook(tensor), self.unpack_hook)


@wrapt.patch_function_wrapper(core.eager, "register_saved_tensors_hooks")
def _enter_hooks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Paddle's own, unless the dispatcher is in its place: then a frame."""
    pack_hook, unpack_hook = args
    if pack_hook is inner_pack:
        _local.entered.append(None)
        return
    if not paddle.is_grad_enabled():
        wrapped(*args, **kwargs)  # which does nothing
        _local.entered.append(None)
        return
    frame = CallerHooks(pack_hook, unpack_hook, None)
    frame.below = region_frame()
    with _dispatcher.lock:
        if _dispatcher.registered is None:
            wrapped(*args, **kwargs)
            _dispatcher.native = frame
        else:
            frame.before = _dispatcher.enter(_dispatcher.registered)
    _local.frames.append(frame)
    _local.entered.append(frame)


@wrapt.patch_function_wrapper(core.eager, "reset_saved_tensors_hooks")
def _exit_hooks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take off the hooks that this thread entered last, and no others."""
    if not _local.entered:
        if not (_dispatcher.registered or _dispatcher.native):
            wrapped(*args, **kwargs)
        return
    frame = _local.entered.pop()
    if frame is None:
        return  # Paddle would take off whatever is registered
    _local.frames.remove(frame)
    with _dispatcher.lock:
        if frame.before is not None:
            _dispatcher.leave(frame.before)
            return
        _dispatcher.native = None
        if _dispatcher.registered is None:
            wrapped(*args, **kwargs)


def inner_pack(tensor: Any) -> None:
    """By its name and its module clients know a replay of Paddle's: see `replay_announced`."""


def inner_unpack(packed: Any) -> None:
    """Never called either."""


inner_pack.__module__ = inner_unpack.__module__ = paddle_recompute().__name__


def is_replay_heard() -> bool:
    """Whether a client has put something in the place of Paddle's `saved_tensors_hooks`."""
    return paddle.autograd.saved_tensors_hooks is not saved_tensors_hooks()


def replay_announced() -> contextlib.AbstractContextManager[Any]:
    """Tell such a client that a replay is going on.

    Paddle's own replay enters hooks of these names. ERNIE's refined recompute
    waits for them, and gives what it has kept instead of computing it again.
    """
    hooks: contextlib.AbstractContextManager[Any] = paddle.autograd.saved_tensors_hooks(
        inner_pack, inner_unpack
    )
    return hooks


if not LAYERS_MAY_SAVE_NONE:

    def _replaced(saved: Any, old: Any, new: Any) -> Any:
        if isinstance(saved, (list, tuple)):
            return type(saved)(_replaced(item, old, new) for item in saved)
        return new if saved is old else saved

    @wrapt.patch_function_wrapper(PyLayerContext, "save_for_backward")
    def _save_for_backward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        """A tensor in the place of None, while there are hooks."""
        wrapped(*(_replaced(args, None, NONE) if _dispatcher.registered else args), **kwargs)

    @wrapt.patch_function_wrapper(PyLayerContext, "saved_tensor")
    def _saved_tensor(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return _replaced(wrapped(*args, **kwargs), NONE, None)
