"""One recomputed call: what was called, on what, in which state, and its replay.

What holds here, for every engine:

1. The first run gets the caller's own objects; the replay gets stand-ins: a
   leaf for a parameter, a detached alias for any other tensor.
2. A region keeps aliases of tensors, and a parameter as itself, never a copy.
   Leaves are made at replay time, so that storage which was re-gathered in
   between is picked up.
3. A replay that could give other numbers than the first run raises: something
   it reads was changed in place, or its outputs are not those of the first run.
4. Whatever a replay changes outside is put back on every path out.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import attrs

from paramproxy._ambient import Ambient, arm_final_hooks, final_hooks_are_armed, grad_mode
from paramproxy._aside import Aside
from paramproxy._buffers import NO_BUFFERS, Buffers
from paramproxy._call import Call, Metadata, Result, described
from paramproxy._captured import Captured, Fixed, function_name, put_flag_back
from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._graph import reaches
from paramproxy._hooks import hooks_registered_once
from paramproxy._leaf import Handover
from paramproxy._objects import NO_OBJECTS, Objects
from paramproxy._operand import Operand, as_intermediates
from paramproxy._options import Options
from paramproxy._placement import Placement
from paramproxy._rebind import Rebinder
from paramproxy._replay import Replay
from paramproxy._report import Meter, meter
from paramproxy._settings import begin_recomputing
from paramproxy._tree import alias, hidden_tensors, is_differentiable
from paramproxy._uses import uses_noted
from paramproxy.exceptions import (
    MutationError,
    NoStorageError,
    ReplayError,
    ReplayMismatchError,
    UnsupportedError,
)


__all__ = ["Region"]


Context = contextlib.AbstractContextManager[Any]

_NO_CONTEXT: Context = contextlib.nullcontext()


@attrs.define(eq=False)
class Region:
    """One call of `recompute`, from its first run to its replay.

    Attributes:
        function: What was called.
        call: Its arguments.
        captured: What it reads besides them.
        operands: The tensors among the arguments, then the captured ones, each
            once.
        ambient: The state of the first run.
        meter: What measures it, while somebody asks for a report.
        captured_operands: The operand of each captured tensor.
        fixed: Captured tensors that no stand-in can replace, with an alias of
            each, which lends its storage to one that was freed.
        weights: Captured trainable parameters.
        buffers: What it changed of the buffers that the function reads.
        metadata: That of the first run's result.
        hidden: Tensors inside of arguments that are no containers, each with
            the position of the argument.
        objects: What it changed of the plain objects that it was called with.
        used: The parameters, by id, that it has taken out of captured layers; None
            where nobody looked.
        own_parameters: The captured parameters whose gradients leave the region by
            the caller's graph.
        kept_calls: What the calls of `keep` in it gave.
    """

    function: Any
    call: Call
    captured: Captured
    operands: list[Operand]
    ambient: Ambient
    meter: Meter | None
    captured_operands: list[int] = attrs.field(factory=list)
    fixed: list[tuple[Operand, Fixed, Any]] = attrs.field(factory=list)
    weights: list[Operand] = attrs.field(factory=list)
    buffers: Buffers = NO_BUFFERS
    metadata: Metadata = attrs.field(factory=list)
    hidden: list[tuple[int, Any]] = attrs.field(factory=list)
    objects: Objects = NO_OBJECTS
    used: set[int] | None = None
    own_parameters: list[Any] = attrs.field(factory=list)
    kept_calls: list[Any] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        """How an error names this region."""
        return function_name(self.function)

    # The first run

    @classmethod
    def open(
        cls,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        *,
        is_measured: bool = True,
    ) -> tuple[Region, list[Any]]:
        """Take down a call before its first run, and the tensors of its operands."""
        call = Call.of(args, kwargs)
        captured = Captured.by(function, call.other_leaves)
        tensors = list(call.tensors)
        region = cls(
            function,
            call,
            captured,
            [Operand.of(tensor, "") for tensor in tensors],
            Ambient.capture(options.preserve_rng_state, options.preserve_external_rng_state),
            meter(function) if is_measured else None,
        )
        if call.others:
            region._look_into_others()
        if captured.tensors:
            region._add_captured_tensors(tensors)
        if captured.fixed:
            region.fixed = [
                (Operand.of(f.tensor, f.where), f, alias(f.tensor)) for f in captured.fixed
            ]
        if captured.parameters:
            weights = {id(weight): weight for weight in captured.parameters}
            region.weights = [Operand.of(weight, "captured") for weight in weights.values()]
        if options.preserve_buffers:
            region.buffers = Buffers.of(captured)
        return region, tensors

    def _look_into_others(self) -> None:
        """Find what hangs on the arguments that are no tensors."""
        for position in self.call.others:
            leaf = self.call.leaves[position]
            if hasattr(type(leaf), "__next__") and type(leaf).__module__ in _ITERATORS:
                self._refuse_argument(
                    position, "is an iterator, which the first run would use up. Pass a list"
                )
            for tensor in hidden_tensors(leaf):
                self.hidden.append((position, tensor))
                self.captured.add_hidden(tensor, f"a tensor in {self.call.name_at(position)}")

    def _add_captured_tensors(self, tensors: list[Any]) -> None:
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        for where, tensor in self.captured.tensors:
            if indices.setdefault(id(tensor), len(tensors)) == len(tensors):
                tensors.append(tensor)
                self.operands.append(Operand.of(tensor, where))
            self.captured_operands.append(indices[id(tensor)])

    @property
    def has_differentiable_operand(self) -> bool:
        """Whether a gradient can leave the region by one of the tensors that enter it."""
        return not all(operand.stop_gradient for operand in self.operands)

    def keep(self, tensors: list[Any], placement: Placement) -> list[Any]:
        """What to save of the operands until the replay; nothing of a parameter."""
        kept = [
            operand.keep(tensor, index, placement)
            for index, (operand, tensor) in enumerate(zip(self.operands, tensors))
            if operand.parameter is None
        ]
        if self.meter is not None:
            passed = [o.parameter for o in self.operands if o.parameter is not None]
            self.meter.leave_out([*passed, *self.captured.parameters, *self.captured.frozen])
            for tensor in kept:
                self.meter.keep(tensor)
        return kept

    def first_run(self, tensors: list[Any], *, record: bool, note_uses: bool = False) -> Any:
        """Call the function on the caller's own objects.

        Args:
            tensors: Those of the operands.
            record: Whether autograd is to record.
            note_uses: Whether to find out which of the parameters in captured
                layers it uses.
        """
        if self.call.others:
            self.objects = Objects.of(self.call.other_leaves)
        try:
            with grad_mode(record), self._watched(note_uses=note_uses):
                value = self.function(*self.call.args, **self.call.kwargs)
        finally:
            # Where the replay of a region around ends this first run, what it
            # has saved so far is waited for all the same.
            if self.ambient.random is not None:
                self.ambient.random.leave_out_untouched()
            if self.objects.before:
                self.objects.leave_out_unchanged()
            changed = self._own_change(tensors)
            self.call.release()
            self.hidden = []
        if changed is not None:
            self._refuse_own_change(changed)
        if self.buffers.exchanged:
            msg = (
                f"Cannot recompute {self.name}: it gives a layer another parameter as "
                f"{self.buffers.exchanged[0]!r}, and a replay would not know which of the two to "
                "use. Exchange it outside, or change its value."
            )
            raise UnsupportedError(msg)
        return value

    def record(self, result: Result, tensors: list[Any]) -> None:
        """Take down what the replay has to give again, and refuse what it can't."""
        self.metadata = result.metadata
        state = {id(tensor): o for o, tensor in zip(self.operands, tensors) if o.is_state}
        state |= {id(fixed.tensor): o for o, fixed, _ in self.fixed if o.is_state}
        for leaf in result.leaves:
            if type(leaf) is Tensor and not state:
                continue
            if id(leaf) in state and is_differentiable(leaf):
                msg = (
                    f"Cannot recompute {self.name}: it writes into {state[id(leaf)]} and returns "
                    "it, and the replay would write into it again. Return a new tensor."
                )
                raise MutationError(msg)
            if any(map(_needs_gradient, hidden_tensors(leaf))):
                msg = (
                    f"Cannot recompute {self.name}: it returns a {type(leaf).__name__} that holds "
                    "a tensor, and gradients could not reach it. Return the tensor itself, or "
                    "register the class with optree."
                )
                raise UnsupportedError(msg)

    def refuse_hidden(self) -> None:
        """Refuse an argument out of which a PyLayer could not take a tensor."""
        for position, tensor in self.hidden:
            if not (tensor.stop_gradient or tensor.is_leaf):
                kind = type(self.call.leaves[position]).__name__
                self._refuse_argument(
                    position,
                    f"is a {kind} that holds a tensor which needs a gradient. Pass the tensor "
                    "itself, or register the class with optree",
                )

    def _refuse_argument(self, position: int, why: str) -> None:
        msg = f"Cannot recompute {self.name}: {self.call.name_at(position)} {why}."
        raise UnsupportedError(msg)

    def _own_change(self, tensors: list[Any]) -> Operand | None:
        """What the function overwrote of what its replay has to start from.

        A captured tensor without a gradient is state, and may be written.
        """
        changed = None
        for index, (operand, tensor) in enumerate(zip(self.operands, tensors)):
            if not operand.was_changed(tensor) or operand.was_only_returned(tensor):
                continue
            if index >= len(self.call.places) and operand.stop_gradient:
                operand.is_state = True
            else:
                changed = changed or operand
        for operand, fixed, _ in self.fixed:
            operand.is_state = operand.was_changed(fixed.tensor)
        for weight in self.weights:
            if weight.was_changed(weight.parameter):
                changed = changed or weight
        return changed

    def _refuse_own_change(self, operand: Operand) -> None:
        msg = (
            f"Cannot recompute {self.name}: it changes {self.name_operand(operand)} in place, so a "
            "replay would start from the changed value. Change a clone of it in the function, or "
            "change it outside."
        )
        raise MutationError(msg)

    # The replay

    def replay(self, kept: list[Any]) -> Replay:
        """Run the function again, recording, on stand-ins whose graph is their own.

        Args:
            kept: What `keep` gave.

        Raises:
            MutationError: Something the function reads was changed in place.
            NoStorageError: Something it reads was freed for good.
            ReplayError: The function raised.
            ReplayMismatchError: It gave other outputs than the first time.
            UnsupportedError: It used an activation that nothing stands in for.
        """
        handover = Handover(replaying=True)
        tensors = self._compared(kept)
        standins = [o.standin(tensor, handover) for o, tensor in zip(self.operands, tensors)]
        aside = Aside(self.own_parameters)
        with self.restored() as stack:
            if aside.parameters:
                stack.enter_context(aside.recording())
            value = self.call_again(as_intermediates(self.operands, standins))
        handover.replaying = False
        result = Result.of(value)
        self._refuse_other_outputs(result.metadata)
        self._refuse_outside_graph(result)
        return Replay(result, list(zip(self.operands, standins)), handover, aside)

    def rerun(self, kept: list[Any], stopper: Context, announced: Context | None) -> None:
        """Run the function again for what it saves, on the parameters themselves.

        Args:
            kept: What `keep` gave.
            stopper: The context that may end it.
            announced: One in which the world is told of it.

        Raises:
            As `replay`, without what concerns outputs and the graph.
        """
        tensors = self._compared(kept)
        with self.restored() as stack:
            if announced is not None:
                stack.enter_context(announced)
            given = [o.again(t) for o, t in zip(self.operands, tensors)]
            self.call_again(given, stopper)

    def restored(self) -> contextlib.ExitStack:
        """The world of the first run; that of now when what is returned closes."""
        stack = contextlib.ExitStack()
        try:
            if final_hooks_are_armed():
                stack.callback(arm_final_hooks)
            self.ambient.put_back(stack)
            self._lend_storage(stack)
            self.buffers.put_back(stack)
            self.objects.put_back(stack)
            self.captured.put_flags_back(stack)
            for operand in self.operands:
                if operand.parameter is not None:
                    put_flag_back(stack, operand.parameter, operand.stop_gradient)
            begin_recomputing(stack)
            if self.meter is not None:
                stack.enter_context(self.meter.replay())
        except BaseException:
            stack.close()
            raise
        return stack

    def call_again(self, given: list[Any], stopper: Context = _NO_CONTEXT) -> Any:
        """What the function returns for these operands; None if `stopper` ended it."""
        try:
            with hooks_registered_once(given + self.captured.parameters), stopper:
                return self.call_now(given)
        except Exception as exc:
            raise ReplayError(self._replay_error(exc)) from exc

    def call_now(self, given: list[Any]) -> Any:
        """The same, in the world as it is now."""
        function, args, kwargs = self._rebound(given)
        return function(*args, **kwargs)

    def no_gradients(self, kept: list[Any]) -> list[Any]:
        """What autograd takes where no output had a gradient, so nothing is rerun."""
        pairs = zip(self.operands, self._tensors(kept))
        gradients = [o.no_gradient(tensor) for o, tensor in pairs if not o.stop_gradient]
        return gradients + [None] * len(self.own_parameters)

    def find_own_parameters(self) -> list[Any]:
        """After the first run: the captured parameters that it has used, where that was noted.

        The program of a `to_static` layer keeps to those that it was made with.
        """
        if self.weights and not self.captured.has_static:
            parameters = [weight.parameter for weight in self.weights]
            used, direct = self.used, self.captured.direct
            self.own_parameters = [
                p for p in parameters if used is None or id(p) in used or id(p) in direct
            ]
        return self.own_parameters

    def _watched(self, *, note_uses: bool) -> Context:
        """A block for the first run, in which everyone looks on who has to."""
        is_noted = self.captured.layers and (note_uses or self.buffers.versions)
        if not (is_noted or self.buffers.is_watched or self.meter is not None):
            return _NO_CONTEXT
        with contextlib.ExitStack() as stack:
            used: set[int] = set()
            if self.buffers.is_watched:
                stack.enter_context(self.buffers.watched(self.captured, used))
            if is_noted:
                self.used = used
                stack.enter_context(uses_noted((layer for layer, _ in self.captured.layers), used))
            if self.meter is not None:
                stack.enter_context(self.meter.first_run())
            return stack.pop_all()

    def _tensors(self, kept: list[Any]) -> list[Any]:
        """The tensor of each operand: a parameter itself, or what was kept."""
        remaining = iter(kept)
        return [
            operand.parameter if operand.parameter is not None else next(remaining)
            for operand in self.operands
        ]

    def _compared(self, kept: list[Any]) -> list[Any]:
        """The tensor of each operand, after everything the function reads was compared."""
        for operand in self.weights:
            self._refuse_change(operand, operand.parameter)
        for operand, fixed, twin in self.fixed:
            if fixed.is_read:
                self._refuse_change(operand, twin)
        if (lost := self.buffers.lost()) is not None:
            msg = (
                f"Cannot replay {self.name}: {lost}, which it reads, was changed in place after "
                "the first run, and is too large for a copy to have been kept. Change it after "
                "backward, or pass it to recompute as an argument of its own, cloned."
            )
            raise MutationError(msg)
        tensors = self._tensors(kept)
        for index, (operand, tensor) in enumerate(zip(self.operands, tensors)):
            if operand.parameter is None or operand.was_changed(tensor):
                self._refuse_change(operand, tensor)
            if operand.placed is not None:
                tensors[index] = self._whole(operand, tensor)
        return tensors

    def _whole(self, operand: Operand, tensor: Any) -> Any:
        whole = operand.whole(tensor)
        if whole is None:
            msg = (
                f"Cannot replay {self.name}: {self.name_operand(operand)} was not the same on "
                "every rank of mp_group, so no rank has it whole any more. Leave partition out of "
                "ctx where the ranks have different activations, as in sequence parallelism."
            )
            raise UnsupportedError(msg)
        return whole

    def _refuse_change(self, operand: Operand, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            msg = (
                f"Cannot replay {self.name}: the unpack hook of saved_tensors_hooks around it gave "
                f"a {type(tensor).__name__} for {self.name_operand(operand)}. Paddle does not call "
                "it where the pack hook returned a list or tuple: return another object there."
            )
            raise UnsupportedError(msg)
        if operand.pointer and operand.parameter is None and not tensor._is_initialized():
            msg = (
                f"Cannot replay {self.name}: the data of {self.name_operand(operand)} was freed "
                "for all its aliases (_clear_data). Use _clear_dataptr: it lets go of one tensor."
            )
            raise NoStorageError(msg)
        if operand.was_changed(tensor):
            versions = f"version {operand.version}, now {tensor._inplace_version()}"
            msg = (
                f"Cannot replay {self.name}: {self.name_operand(operand)} was changed in place "
                f"after the first run ({versions}), so its gradients would be wrong. Change it "
                "after backward, or pass a clone of it to recompute."
            )
            raise MutationError(msg)

    def _rebound(self, standins: list[Any]) -> tuple[Any, Any, Any]:
        """The function and its arguments, on stand-ins.

        A captured tensor without a gradient stays itself, so that `is` holds,
        unless it was freed.
        """
        captured = self.captured
        if not (captured.tensors or captured.cells):
            return (self.function, *self.call.filled(standins))
        replaced = {
            id(tensor): standins[index]
            for (_, tensor), index in zip(captured.tensors, self.captured_operands)
            if not (self.operands[index].stop_gradient and tensor._is_initialized())
        }
        rebinder = Rebinder(self.captured, replaced)
        args, kwargs = self.call.filled(standins, rebinder.rebind)
        return rebinder.rebind(self.function), args, kwargs

    def _lend_storage(self, stack: contextlib.ExitStack) -> None:
        for _, fixed, twin in self.fixed:
            if not fixed.tensor._is_initialized():
                stack.callback(fixed.tensor._clear_dataptr)
                fixed.tensor._set_impl(twin)

    def _refuse_other_outputs(self, metadata: Metadata) -> None:
        if metadata == self.metadata:
            return
        first, again = map(described, (self.metadata, metadata))
        msg = (
            f"Cannot replay {self.name}: the first run gave {first}, the replay {again}. "
            "The function must do the same both times: look for a branch on a counter, on time "
            "or on a global that changes, and for random numbers from a stream of its own."
        )
        raise ReplayMismatchError(msg)

    def _refuse_outside_graph(self, result: Result) -> None:
        """Refuse to run backward through the caller's graph, which autograd will run itself.

        The second time through an op of Paddle's raises, through a PyLayer it
        crashes the interpreter.
        """
        for operand, fixed, _ in self.fixed:
            is_outside = not (operand.is_leaf or operand.stop_gradient)
            if is_outside and reaches(result.leaves, fixed.tensor):
                msg = (
                    f"Cannot replay {self.name}: it uses {fixed.where}, an activation of the graph "
                    "around it, and no stand-in can be put there. Pass it as an argument."
                )
                raise UnsupportedError(msg)

    def _replay_error(self, exc: Exception) -> str:
        what = "".join(traceback.format_exception_only(type(exc), exc)).strip()
        frames = traceback.extract_tb(exc.__traceback__)
        where = "".join(f"\n  at {f.filename}:{f.lineno} in {f.name}" for f in frames[1:])
        return (
            f"Cannot replay {self.name}: its first run had succeeded, its replay raised\n"
            f"{what}{where}\n"
            "Nothing is left changed; the next step can go on."
        )

    def name_operand(self, operand: Operand) -> str:
        """How an error names an operand: `argument 1 (parameter 'linear_0.w_0')`."""
        if operand.where:
            return str(operand)
        index = next(i for i, known in enumerate(self.operands) if known is operand)
        name = self.call.name_at(self.call.places[index][0])
        return name if operand.parameter is None else f"{name} ({operand})"


# Where the types of iterators over a collection come from. An open file or an
# iterator class of the user's may well be passed for another use.
_ITERATORS = ("builtins", "itertools")


def _needs_gradient(tensor: Any) -> bool:
    return not isinstance(tensor, EagerParamBase) and is_differentiable(tensor)
