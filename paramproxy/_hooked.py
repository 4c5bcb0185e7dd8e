"""The hook engine: the true graph, with the saved tensors left out of it.

1. The first run records, on the caller's own objects. What autograd saves
   meanwhile is described, not kept: Paddle gets a ticket for it.
2. The first ticket that is handed in for its tensor runs the region again, on
   what the first run started from. The tensors which that run saves, in the same
   order, are what the tickets stand for. Its own graph is dropped.
3. A second run ends where the last tensor that somebody waits for was saved.
   A ticket whose part of the graph is gone waits for nothing.
4. A region inside a region is a plain call in the outer first run, and a region
   in the outer second run. There the outer one keeps the inner one's tickets.
5. The graph owns the recording through the unpack hook, not through the tickets:
   Paddle 2.6 never frees those, and no Paddle frees what a hook that raised was
   called with.
6. A tensor that was handed out is let go, and with the last one the function and
   its arguments, unless the caller keeps the graph for another backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs

from paramproxy._ambient import GradMode, TellingError
from paramproxy._caller import keeps_graph
from paramproxy._compat import PACKED_VALUES_LEAK, Tensor
from paramproxy._dispatch import (
    CallerHooks,
    Frame,
    caller_hooks,
    fresh_stack,
    is_registered,
    is_replay_heard,
    is_under_hooks,
    pack_arguments,
    pushed,
    region_frame,
    replay_announced,
    unpack,
)
from paramproxy._keep import KeptCall, Skipped
from paramproxy._mismatch import CAUSES, Comparison
from paramproxy._options import Options
from paramproxy._placement import Placement
from paramproxy._policy import Decision, decision_of
from paramproxy._region import Region
from paramproxy._report import Meter
from paramproxy._saved import (
    Kept,
    Loans,
    Metadata,
    Offloaded,
    Twin,
    handed_over,
    keep,
    refuse_change,
    user_lines,
)
from paramproxy._settings import debug_mode, early_stop
from paramproxy._stop import Stopper
from paramproxy._tree import flatten
from paramproxy.exceptions import ReplayMismatchError, UnsupportedError


__all__ = ["is_plain_call", "is_served", "run"]


def is_plain_call(around: Frame | None) -> bool:
    """Whether a region that opens in this frame is part of what another first run records."""
    return isinstance(around, FirstRun)


def is_served(around: Frame | None) -> bool:
    """Whether a region that opens in this frame is inside one of this engine."""
    return isinstance(around, (FirstRun, SecondRun))


def run(region: Region, tensors: list[Any], placement: Placement, options: Options) -> Any:
    """The region's result, with tickets in its graph."""
    recording = Recording(
        region=region,
        kept=region.keep(tensors, placement),
        policy=options.policy,
        lines=[] if debug_mode(options.debug) else None,
        # Who hears of a replay counts on all of it.
        stops_early=early_stop() and not is_replay_heard(),
        hooks=_hooks_around(),
    )
    frame = FirstRun(recording)
    # Inside of another region what is saved has to be its graph's, hook and all.
    is_inner = isinstance(region_frame(), (SecondRun, Once))
    with pushed(frame, None if is_inner else recording.unpack):
        frame.find_owner()
        value = region.first_run(tensors, record=True)
    recording.close()
    recording.watch_grad_mode(value, tensors)
    return value


def _hooks_around() -> CallerHooks | None:
    """A caller's own hooks around a region that opens now: they pack what it saves."""
    frame = caller_hooks() or region_frame()
    if isinstance(frame, (FirstRun, SecondRun, Once)):
        return frame.recording.hooks
    return frame if isinstance(frame, CallerHooks) and not frame.is_paddle_recompute else None


class Ticket:
    """What Paddle holds for one saved tensor.

    Attributes:
        recording: What gives the recording it belongs to.
        index: Which of the tensors that the function saves; -1 for one of a
            kept call, which is not saved again.
        is_layers: Whether a PyLayer saved it.
        twin: Its place in the graph, for a PyLayer.
        value: The tensor, or what gives it; None until there is a replay.
        version: The tensor's in-place version counter.
    """

    __slots__ = ("__weakref__", "index", "is_layers", "recording", "twin", "value", "version")

    def __init__(
        self, recording: Callable[[], Recording | None], index: int, is_layers: bool, twin: Any
    ) -> None:
        self.recording = recording
        self.index = index
        self.is_layers = is_layers
        self.twin = twin
        self.value: Any = None
        self.version = 0

    def fill(self, value: Any, tensor: Any) -> None:
        """Take the value, which stands for a tensor as it is now."""
        self.value = value
        self.version = tensor._inplace_version()

    def clear(self) -> None:
        self.value = self.twin = None

    def unpack(self) -> Any:
        """The tensor, for a backward."""
        recording = self.recording()
        assert recording is not None  # the graph owns it
        return recording.tensor(self)

    def __del__(self) -> None:
        recording = getattr(self, "recording", _nobody)()  # an interrupt may have ended __init__
        if recording is not None:
            recording.settle(self)


def _nobody() -> None: ...


@attrs.define(eq=False)
class Recording:
    """What the graph owns of a region: how to get back the tensors it saved.

    Attributes:
        region: The region. None once nobody waits for a tensor.
        kept: What the region's replay starts from.
        policy: What to keep of what is saved; None to recompute it all.
        lines: For each saved tensor the user's lines that saved it, in debug mode.
        stops_early: Whether a replay ends with the last tensor that is needed.
        hooks: A caller's own hooks around the region.
        metadata: Of each tensor that the first run saved.
        tickets: The ticket of each, weakly.
        waiting: The tickets that were not handed out for good, by id.
        calls: What its kept calls returned.
        is_open: Whether the first run is still going on.
        mode: The grad mode of the backward that is running.
        error: What the policy raised.
    """

    region: Region | None
    kept: list[Any]
    policy: Any
    lines: list[list[str]] | None
    stops_early: bool
    hooks: CallerHooks | None
    metadata: list[Metadata] = attrs.field(factory=list)
    tickets: list[weakref.ref[Ticket]] = attrs.field(factory=list)
    waiting: set[int] = attrs.field(factory=set)
    calls: list[KeptCall] = attrs.field(factory=list)
    is_open: bool = True
    mode: GradMode = attrs.field(factory=GradMode)
    error: Exception | None = None
    lock: Any = attrs.field(factory=threading.RLock)

    # The first run

    def issue(self, frame: FirstRun, tensor: Any, is_layers: bool) -> Ticket:
        """A ticket for a tensor that the first run saves."""
        index = len(self.metadata)
        self.metadata.append(Metadata.of(tensor))
        if self.lines is not None:
            self.lines.append(user_lines())
        ticket = self._ticket(frame, index, tensor, is_layers)
        self.tickets.append(weakref.ref(ticket))
        if self.policy is not None:
            self._ask_policy(ticket, tensor)
        return ticket

    def issue_kept(self, frame: FirstRun, tensor: Any, item: Any, is_layers: bool) -> Ticket:
        """A ticket for a tensor that a kept call saves."""
        ticket = self._ticket(frame, -1, tensor, is_layers)
        ticket.fill(self.packed(tensor, item, is_layers), tensor)
        self._measure(tensor)
        if PACKED_VALUES_LEAK:
            self.tickets.append(weakref.ref(ticket))
        return ticket

    def _ticket(self, frame: FirstRun, index: int, tensor: Any, is_layers: bool) -> Ticket:
        # In a second run of an outer region nobody runs this graph backward.
        has_place = is_layers and frame.outer is None
        has_place = has_place and not (tensor.stop_gradient or tensor.is_leaf)
        ticket = Ticket(frame.owner, index, is_layers, Twin(tensor) if has_place else None)
        self.waiting.add(id(ticket))
        return ticket

    def _ask_policy(self, ticket: Ticket, tensor: Any) -> None:
        decision = self._decision(tensor)
        if decision is Decision.SAVE:
            ticket.fill(self.packed(tensor, None, ticket.is_layers), tensor)
            self._measure(tensor)
        elif decision is Decision.OFFLOAD:
            offloaded = Offloaded.of(keep(tensor, ticket.is_layers))
            if offloaded is not None:
                ticket.fill(offloaded, tensor)
                self._measure(tensor)

    def _measure(self, tensor: Any) -> None:
        """Tell the meter of a tensor that is kept."""
        if self.region is not None and self.region.meter is not None:
            self.region.meter.save(tensor)

    def _decision(self, tensor: Any) -> Decision:
        """The policy's answer. Its errors wait: an exception through Paddle loses its type."""
        try:
            return decision_of(self.policy, tensor)
        except Exception as exc:
            self.error = self.error or exc
            return Decision.RECOMPUTE

    def packed(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        """What to hold of a tensor: what a frame above or the caller's own hooks made of it."""
        if item is not None:
            return item
        held = keep(tensor, is_layers)
        return held if self.hooks is None else self.hooks.packed(held)

    def close(self) -> None:
        """The first run is over."""
        if self.error is not None:
            raise self.error
        self.is_open = False
        self._release_if_done()

    def watch_grad_mode(self, value: Any, inputs: list[Any]) -> None:
        """Note the grad mode of a backward when it enters, by an output's gradient.

        Paddle turns it off around an unpack hook, and on again only if that does
        not raise. Whether it was on at all nobody can say by then.
        """
        if not self.waiting:
            return
        known = {id(tensor) for tensor in inputs}
        for leaf in flatten(value)[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known.add(id(leaf))
                if not (leaf.stop_gradient or leaf.is_leaf):
                    leaf._register_grad_hook(self.mode.note)

    # Backward

    def unpack(self, packed: Any) -> Any:
        """The unpack hook. That it is a method is what keeps the recording alive."""
        try:
            return packed.unpack()
        except TellingError:
            raise
        except BaseException as exc:
            raise self.mode.restored_by(exc) from exc

    def tensor(self, ticket: Ticket) -> Any:
        """The tensor that a ticket stands for.

        Raises:
            ReplayMismatchError: The function saved other tensors than the first time.
            MutationError: The tensor, or what it is made from, was changed in place.
            ReplayError: The function raised.
        """
        try:
            with self.lock:
                if ticket.value is None:
                    self._replay(ticket)
                value = ticket.value
            tensor = value if isinstance(value, Tensor) else value.unpack()
            if tensor is value:
                refuse_change(tensor, ticket.version)
        except BaseException as exc:
            if ticket.index >= 0:
                ticket.value = None  # Paddle never frees a ticket that it could not hand in
            raise self.mode.restored_by(exc) from exc
        if ticket.twin is not None:
            tensor = ticket.twin.filled(tensor)
        if not ticket.is_layers and not keeps_graph():
            ticket.clear()
            self.settle(ticket)
        return handed_over(tensor, ticket.is_layers)

    def settle(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket's tensor any more."""
        self.waiting.discard(id(ticket))
        self._release_if_done()

    def _release_if_done(self) -> None:
        if not (self.waiting or self.is_open):
            self.region = None
            self.kept, self.calls, self.tickets = [], [], []

    def _replay(self, ticket: Ticket) -> None:
        region = self.region
        if region is None or id(ticket) not in self.waiting:
            msg = (
                "Cannot run backward a second time through a region of the hook engine: what it "
                "saved was let go by the first. Pass retain_graph=True to that."
            )
            raise UnsupportedError(msg)
        second = SecondRun.of(self, region)
        announced = replay_announced() if is_replay_heard() else None
        try:
            with fresh_stack(), pushed(second, unpack):
                region.rerun(self.kept, second.stopper, announced)
        finally:
            second.let_go()
        second.stopper.clean_up()
        second.refuse_mismatch()

    def __del__(self) -> None:
        if PACKED_VALUES_LEAK:
            for ticket in map(weakref.ref.__call__, self.tickets):
                if ticket is not None:
                    ticket.clear()


@attrs.define(eq=False)
class FirstRun(Frame):
    """The frame of a first run.

    Attributes:
        recording: What it fills.
        owner: What a ticket knows its recording by.
        outer: The second run that this is a part of.
    """

    recording: Recording
    owner: Any = None
    outer: Frame | None = None
    below: Frame | None = None

    def find_owner(self) -> None:
        """Once pushed: a weak reference if the graph owns the recording, else a strong one."""
        self.outer = self.below if isinstance(self.below, (SecondRun, Once)) else None
        if self.outer is None and is_registered(self.recording.unpack):
            self.owner = weakref.ref(self.recording)
        else:
            recording = self.recording
            self.owner = lambda: recording

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        ticket = self.recording.issue(self, tensor, is_layers)
        return ticket if self.outer is None else self.outer.take(tensor, ticket, is_layers)

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.recording.region
        assert region is not None  # its first run is going on
        value, skipped = Skipped.by(region, lambda: self._kept(function, args, kwargs))
        self.recording.calls.append(KeptCall.of(value, skipped))
        return value

    def _kept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.below is not None and not self.below.runs_once:
            return self.below.keep(function, args, kwargs)
        with pushed(Once(self)):
            return function(*args, **kwargs)


@attrs.define(eq=False)
class Once(Frame):
    """The frame of a kept call in a first run: what it saves is kept."""

    runs_once = True

    first: FirstRun
    below: Frame | None = None

    @property
    def recording(self) -> Recording:
        return self.first.recording

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        return self.recording.issue_kept(self.first, tensor, item, is_layers)

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


@attrs.define(eq=False)
class SecondRun(Frame):
    """The frame of a replay: it fills the tickets that wait.

    Attributes:
        recording: Whose tickets.
        wanted: Those that wait, by index.
        last: The last index of them.
        comparison: What is not as it was in the first run.
        meter: What measures the region.
        count: How many tensors were saved.
        calls: How many calls were kept.
        stopper: What ends it.
        loans: What Paddle would never free of the replay's graph.
    """

    recording: Recording
    wanted: dict[int, Ticket]
    last: int
    comparison: Comparison
    meter: Meter | None
    count: int = 0
    calls: int = 0
    stopper: Stopper = attrs.field(factory=Stopper)
    loans: Loans = attrs.field(factory=Loans)
    below: Frame | None = None

    @classmethod
    def of(cls, recording: Recording, region: Region) -> SecondRun:
        tickets = [reference() for reference in recording.tickets]
        wanted = {
            ticket.index: ticket
            for ticket in tickets
            if ticket is not None and ticket.value is None and id(ticket) in recording.waiting
        }
        comparison = Comparison(
            region.name,
            recording.metadata,
            recording.lines,
            recording.is_open,
            region.buffers.replaced,
        )
        return cls(recording, wanted, max(wanted), comparison, region.meter)

    def let_go(self) -> None:
        """Afterwards."""
        self.wanted = {}
        self.loans.end()

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        index = self.count
        self.count += 1
        held = self._hold(tensor, item, is_layers)
        if not self.stopper.is_stopped:
            self._look(index, tensor, item, is_layers)
        # Hooks of the function's own may count what they pack, as those of Paddle's
        # and PaddleFormers' recompute do.
        if self.stopper.is_stopped and not is_under_hooks(self):
            self.stopper.stop(pack_arguments(), is_layers)
        return held

    def _hold(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        """For a backward inside the function itself."""
        if item is None:
            item = Kept(keep(tensor, is_layers), tensor._inplace_version(), is_layers)
        return self.loans.lent(item)

    def _look(self, index: int, tensor: Any, item: Any, is_layers: bool) -> None:
        recording = self.recording
        if not self.comparison.compare(index, tensor):
            self.stopper.is_stopped = self.comparison.error is not None
            return
        ticket = self.wanted.get(index)
        if ticket is not None:
            ticket.fill(recording.packed(tensor, item, is_layers), tensor)
            if self.meter is not None:
                self.meter.see(tensor)
        if index == self.last and (recording.stops_early or recording.is_open):
            self.stopper.is_stopped = True

    def refuse_mismatch(self) -> None:
        """Afterwards: raise what was found."""
        if not self.stopper.is_stopped:
            self.comparison.finish(self.count)
        error, self.comparison.error = self.comparison.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self.calls
        self.calls += 1
        if index < len(self.recording.calls):
            return self.recording.calls[index].again()
        msg = f"it makes {index + 1} calls of keep, and {index} in its first run. {CAUSES}"
        raise ReplayMismatchError(msg)
