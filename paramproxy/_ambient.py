"""What a replay must find as the first run did: random streams, AMP, grad mode.

Captured in one place and restored in one place, on every path out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import paddle

from paramproxy._compat import (
    amp_module,
    core,
    custom_state_manager,
    get_rng_state_tracker,
    tracer,
)
from paramproxy._streams import Snapshot, numpy_snapshot, python_snapshot


__all__ = [
    "Ambient",
    "CustomState",
    "GradMode",
    "RandomState",
    "TellingError",
    "arm_final_hooks",
    "final_hooks_are_armed",
    "grad_mode",
    "streams_kept",
]


@attrs.frozen
class CustomState:
    """A random state of the user's own.

    Attributes:
        value: The state.
        get: Gives it as it is now.
        set: Sets it.
    """

    value: Any
    get: Any
    set: Any

    @classmethod
    def capture(cls) -> CustomState | None:
        """What is registered with `custom_state_manager`, if there is anything."""
        get = custom_state_manager.custom_get_state_func
        if get is None:
            return None
        return cls(get(), get, custom_state_manager.custom_set_state_func)

    def capture_again(self) -> CustomState:
        """The same as it is now."""
        return attrs.evolve(self, value=self.get())

    def restore(self) -> None:
        self.set(self.value)


@attrs.define(eq=False)
class RandomState:
    """Every random stream that Paddle's recompute promises to replay.

    Attributes:
        paddle: The generators of the current device.
        tracker: The named states of the hybrid-parallel tracker.
        custom: A state of the user's own, or None.
        numpy: numpy's global generator; None to leave it alone.
        python: The `random` module's; None to leave it alone.
    """

    paddle: Any
    tracker: Any
    custom: CustomState | None
    numpy: Snapshot | None
    python: Snapshot | None

    @classmethod
    def capture(cls, *, numpy: bool = True, python: bool = True) -> RandomState:
        return cls(
            paddle.get_rng_state(),
            _tracker_states(),
            CustomState.capture(),
            numpy_snapshot() if numpy else None,
            python_snapshot() if python else None,
        )

    def capture_again(self) -> RandomState:
        """The same streams as they are now."""
        return RandomState(
            paddle.get_rng_state(),
            _tracker_states(),
            None if self.custom is None else self.custom.capture_again(),
            None if self.numpy is None else numpy_snapshot(),
            None if self.python is None else python_snapshot(),
        )

    def moved_on(self) -> RandomState:
        """The same streams as they are now, without those that nobody drew from since."""
        now = self.capture_again()
        if self.numpy is not None and now.numpy is not None and self.numpy.is_same(now.numpy):
            now.numpy = None
        if self.python is not None and now.python is not None and self.python.is_same(now.python):
            now.python = None
        return now

    def leave_out_untouched(self) -> None:
        """Forget numpy's and Python's stream if nothing was drawn from it since.

        Layers draw from Paddle's, and setting the other two takes longer than
        all the rest of a replay of a small function.
        """
        if self.numpy is not None and self.numpy.is_same(numpy_snapshot()):
            self.numpy = None
        if self.python is not None and self.python.is_same(python_snapshot()):
            self.python = None

    def restore(self) -> None:
        """Put every stream back, the rest of them also when one refuses."""
        try:
            paddle.set_rng_state(self.paddle)
        finally:
            try:
                if self.tracker:
                    get_rng_state_tracker().set_states_tracker(self.tracker)
            finally:
                self._restore_others()

    def _restore_others(self) -> None:
        others = [s for s in (self.numpy, self.python, self.custom) if s is not None]
        if others:
            with contextlib.ExitStack() as stack:
                for other in reversed(others):
                    stack.callback(other.restore)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """These streams for a block; afterwards as they are now."""
        now = self.capture_again()
        try:
            self.restore()
            yield
        finally:
            now.restore()


def _tracker_states() -> Any:
    """The named states; where there are none, which is quicker to see than to read, none."""
    tracker = get_rng_state_tracker()
    return tracker.get_states_tracker() if getattr(tracker, "states_", True) else {}


@attrs.define
class AmpState:
    """The autocast state: the fields that C++ reads and the one that Python does.

    `paddle.amp.auto_cast` is not used to restore it. Outside AMP even
    `auto_cast(enable=False)` makes `paddle.amp.amp_state()` truthy, and
    PaddleNLP's T5 then casts in the replay only; inside, it knows no way to
    take over lists as they are.
    """

    level: Any = attrs.field(eq=int)
    dtype: Any
    use_promote: Any
    lists: Any
    python: Any

    @classmethod
    def capture(cls) -> AmpState:
        now = tracer()
        level = now._amp_level
        # Nobody reads the lists at level O0, and fetching them is slow.
        lists = None if int(level) == _AMP_OFF else now._get_amp_op_list()
        python = amp_module._g_amp_state_
        return cls(level, now._amp_dtype, now._use_promote, lists, python)

    def restore(self) -> None:
        now = tracer()
        now._amp_level = self.level
        now._amp_dtype = self.dtype
        now._use_promote = self.use_promote
        if self.lists is not None:
            now._set_amp_op_list(*self.lists)
        amp_module._g_amp_state_ = self.python


_AMP_OFF = int(core.AmpLevel.O0)


@attrs.define
class Ambient:
    """The ambient state of a region's first run.

    Attributes:
        amp: The autocast state.
        random: The random streams, or None with `preserve_rng_state=False`.
    """

    amp: AmpState
    random: RandomState | None

    @classmethod
    def capture(cls, preserve_rng_state: bool, preserve_external: bool = True) -> Ambient:
        external = preserve_external
        random = (
            RandomState.capture(numpy=external, python=external) if preserve_rng_state else None
        )
        return cls(AmpState.capture(), random)

    def put_back(self, stack: contextlib.ExitStack) -> None:
        """Gradients on, and everything as it was; when the stack closes, as it is now."""
        now = tracer()
        amp = AmpState.capture()
        stack.callback(_restore_modes, now._has_grad, amp)
        now._has_grad = True
        if amp != self.amp:
            self.amp.restore()
        if self.random is not None:
            stack.callback(self.random.capture_again().restore)
            self.random.restore()


def _restore_modes(has_grad: bool, amp: AmpState) -> None:
    tracer()._has_grad = has_grad
    amp.restore()


class grad_mode:  # noqa: N801
    """A block with gradients on or off; afterwards as before, also where Paddle has left them off.

    No generator, as the other contexts that every call of `recompute` enters: those
    take three times as long.
    """

    __slots__ = ("before", "enabled")

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        now = tracer()
        self.before = now._has_grad
        now._has_grad = self.enabled

    def __exit__(self, *error: object) -> None:
        tracer()._has_grad = self.before


class TellingError(Exception):
    """An error that restores the grad mode when it is asked for its text.

    Paddle leaves grad mode off where an unpack hook raises. The last that it does
    before its own exception is thrown is to ask this one for its text.
    """

    def __init__(self, mode: GradMode, text: str) -> None:
        super().__init__(text)
        self.mode = mode

    def __str__(self) -> str:
        tracer()._has_grad = self.mode.enabled
        return super().__str__()


_telling: WeakKeyDictionary[type, type[TellingError]] = WeakKeyDictionary()


@attrs.define(eq=False)
class GradMode:
    """The grad mode of a backward, for the case that a hook raises in it."""

    enabled: bool = True

    def note(self, gradient: Any) -> None:
        """A gradient hook, in which the mode is still that of the caller."""
        self.enabled = paddle.is_grad_enabled()

    def restored_by(self, error: BaseException) -> TellingError:
        """The error, with a text that restores the mode."""
        # The caller sees a name and a text: Paddle makes an `OSError` of it.
        kind = type(error)
        if kind not in _telling:
            members = {"__module__": kind.__module__}
            _telling[kind] = type(kind.__name__, (TellingError,), members)
        return _telling[kind](self, str(error))


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Put every random stream back to where it is now."""
    now = RandomState.capture()
    try:
        yield
    finally:
        now.restore()


def final_hooks_are_armed() -> bool:
    """Whether AMP's master-grad hook waits for the end of the backward that is running."""
    return bool(amp_module.amp_global_state().already_register_final_backward_hook)


def arm_final_hooks() -> None:
    """Arm it again, if a backward has run and forgotten it.

    The backward inside a backward is one too: `RunBackward` in Paddle's
    backward.cc ends by running and clearing the final hooks, so gradients that
    come after the first region would stay in low precision.
    """
    if not final_hooks_are_armed():
        python = amp_module._g_amp_state_
        with paddle.amp.auto_cast(enable=False):
            amp_module._g_amp_state_ = python
