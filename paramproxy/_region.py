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
from collections.abc import Iterator
from typing import Any

import attrs
import paddle

from paramproxy._ambient import Ambient
from paramproxy._call import Call, Metadata, Result
from paramproxy._captured import Captured, Rebinder, function_name, look_into
from paramproxy._compat import EagerParamBase
from paramproxy._operand import Operand, as_intermediates
from paramproxy._tree import alias, hidden_tensors
from paramproxy._view import Handover, leaf_gradient
from paramproxy.exceptions import (
    MutationError,
    ReplayError,
    ReplayMismatchError,
    UnsupportedError,
)


__all__ = ["Region", "Replay"]


@attrs.define(eq=False)
class Replay:
    """The second run: its result, on a fresh graph built on stand-ins."""

    result: Result
    operands: list[tuple[Operand, Any]]
    handover: Handover

    def gradients(self) -> list[Any]:
        """Hand over the gradient of each differentiable operand."""
        gradients = []
        for operand, standin in self.operands:
            if not operand.stop_gradient:
                gradient = leaf_gradient(standin)
                gradients.append(operand.no_gradient(standin) if gradient is None else gradient)
        self.handover.done = True
        return gradients


@attrs.define(eq=False)
class Region:
    """One call of `recompute`, from its first run to its replay.

    Attributes:
        function: What was called.
        call: Its arguments.
        captured: What it reads besides them.
        operands: The tensors among the arguments, then the captured ones, each
            once.
        captured_operands: The operand of each captured tensor.
        fixed: Captured tensors that no stand-in can replace, with an alias of
            each, which lends its storage to one that was freed.
        weights: Captured trainable parameters, to be compared.
        ambient: The state of the first run.
        metadata: That of the first run's result.
    """

    function: Any
    call: Call
    captured: Captured
    operands: list[Operand]
    captured_operands: list[int]
    fixed: list[tuple[Operand, Any, Any]]
    weights: list[Operand]
    ambient: Ambient
    metadata: Metadata = attrs.field(factory=list)

    @property
    def name(self) -> str:
        """How an error names this region."""
        return function_name(self.function)

    # The first run

    @classmethod
    def open(
        cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> tuple[Region, list[Any]]:
        """Take down a call before its first run, and the tensors of its operands."""
        call = Call.of(args, kwargs)
        captured = look_into(function)
        tensors = list(call.tensors)
        operands = [Operand.of(tensor, "") for tensor in tensors]
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        for where, tensor in captured.tensors:
            if indices.setdefault(id(tensor), len(tensors)) == len(tensors):
                tensors.append(tensor)
                operands.append(Operand.of(tensor, where))
        region = cls(
            function=function,
            call=call,
            captured=captured,
            operands=operands,
            captured_operands=[indices[id(tensor)] for _, tensor in captured.tensors],
            fixed=[(Operand.of(t, where), t, alias(t)) for where, t in captured.fixed],
            weights=[Operand.of(weight, "captured") for weight in captured.parameters],
            ambient=Ambient.capture(preserve_rng_state),
        )
        region._refuse_hidden_arguments()
        return region, tensors

    def first_run(self, tensors: list[Any]) -> Any:
        """Call the function without recording, on the caller's own objects."""
        with paddle.no_grad():
            value = self.function(*self.call.args, **self.call.kwargs)
        self._refuse_own_changes(tensors)
        self.call.release()
        return value

    def record(self, result: Result) -> None:
        """Take down what the replay has to give again."""
        self.metadata = result.metadata
        for leaf in result.leaves:
            if any(map(_needs_gradient, hidden_tensors(leaf))):
                msg = (
                    f"Cannot recompute {self.name}: it returns a {type(leaf).__name__} that holds "
                    "a tensor, and gradients could not reach it. Return the tensor itself, or "
                    "register the class with optree."
                )
                raise UnsupportedError(msg)

    def _refuse_hidden_arguments(self) -> None:
        for position, leaf in enumerate(self.call.leaves):
            for tensor in hidden_tensors(leaf):
                if not tensor.stop_gradient and not tensor.is_leaf:
                    msg = (
                        f"Cannot recompute {self.name}: {self.call.name_at(position)} is a "
                        f"{type(leaf).__name__} that holds a tensor which needs a gradient. Pass "
                        "the tensor itself, or register the class with optree."
                    )
                    raise UnsupportedError(msg)

    def _refuse_own_changes(self, tensors: list[Any]) -> None:
        """Refuse a function that overwrites what its replay has to start from."""
        for index, (operand, tensor) in enumerate(zip(self.operands, tensors)):
            if not operand.was_changed(tensor):
                continue
            if index >= len(self.call.places) and operand.stop_gradient:
                operand.accept(tensor)  # state that it keeps, as a layer keeps buffers
                continue
            self._refuse_own_change(self.name_operand(index))
        for operand, tensor, _ in self.fixed:
            operand.accept(tensor)
        for operand in self.weights:
            if operand.was_changed(operand.parameter):
                self._refuse_own_change(str(operand))

    def _refuse_own_change(self, what: str) -> None:
        msg = (
            f"Cannot recompute {self.name}: it changes {what} in place, so a replay would start "
            "from the changed value. Change a clone of it in the function, or change it outside."
        )
        raise MutationError(msg)

    # The replay

    def replay(self, kept: list[Any]) -> Replay:
        """Run the function again, recording, on stand-ins.

        Args:
            kept: What `Operand.keep` gave for each operand that is no parameter.

        Raises:
            MutationError: Something the function reads was changed in place.
            ReplayError: The function raised.
            ReplayMismatchError: It gave other outputs than the first time.
        """
        handover = Handover(replaying=True)
        standins = self._standins(kept, handover)
        with self.ambient.restored(), self._storage_lent():
            given = as_intermediates(self.operands, standins)
            function = self._rebound(given)
            args, kwargs = self.call.filled(given)
            try:
                result = Result.of(function(*args, **kwargs))
            except Exception as exc:
                raise ReplayError(self._replay_error(exc)) from exc
        handover.replaying = False
        self._refuse_other_outputs(result.metadata)
        return Replay(result, list(zip(self.operands, standins)), handover)

    def seems_constant(self) -> bool:
        """Whether nothing that the function reads, as far as one can see, needs a gradient."""
        return not self.weights and all(
            operand.stop_gradient
            for operand in (*self.operands, *(operand for operand, _, _ in self.fixed))
        )

    def _standins(self, kept: list[Any], handover: Handover) -> list[Any]:
        """Compare everything the function reads, then make what it gets."""
        for operand in self.weights:
            self._refuse_change(operand, operand.parameter, str(operand))
        for operand, _, twin in self.fixed:
            self._refuse_change(operand, twin, operand.where)
        remaining = iter(kept)
        standins = []
        for index, operand in enumerate(self.operands):
            tensor = next(remaining) if operand.parameter is None else operand.parameter
            self._refuse_change(operand, tensor, self.name_operand(index))
            standins.append(operand.standin(tensor, handover))
        return standins

    def _refuse_change(self, operand: Operand, tensor: Any, what: str) -> None:
        if operand.was_changed(tensor):
            msg = (
                f"Cannot replay {self.name}: {what} was changed in place after the first run "
                f"(version {operand.version}, now {tensor._inplace_version()}), so its gradients "
                "would be wrong. Change it after backward, or pass a clone of it to recompute."
            )
            raise MutationError(msg)

    def _rebound(self, standins: list[Any]) -> Any:
        """The function, reading stand-ins for what it captures, where that makes a difference."""
        replaced = {
            id(tensor): standins[index]
            for (_, tensor), index in zip(self.captured.tensors, self.captured_operands)
            if not tensor.stop_gradient or not tensor._is_initialized()
        }
        return Rebinder(self.captured.cells, replaced).rebind(self.function)

    @contextlib.contextmanager
    def _storage_lent(self) -> Iterator[None]:
        freed = [(t, twin) for _, t, twin in self.fixed if not t._is_initialized()]
        try:
            for tensor, twin in freed:
                twin._share_buffer_to(tensor)
            yield
        finally:
            for tensor, _ in freed:
                tensor._clear_dataptr()

    def no_gradients(self, kept: list[Any]) -> list[Any]:
        """What autograd takes where no output had a gradient, so nothing is rerun."""
        remaining = iter(kept)
        tensors = [
            o.parameter if o.parameter is not None else next(remaining) for o in self.operands
        ]
        pairs = zip(self.operands, tensors)
        return [o.no_gradient(tensor) for o, tensor in pairs if not o.stop_gradient]

    def _refuse_other_outputs(self, metadata: Metadata) -> None:
        if metadata == self.metadata:
            return
        first, again = map(_describe, (self.metadata, metadata))
        msg = (
            f"Cannot replay {self.name}: the first run gave {first}, the replay {again}. "
            "The function must do the same both times: look for a branch on a counter, on time "
            "or on a global that changes, and for random numbers from a stream of its own."
        )
        raise ReplayMismatchError(msg)

    def _replay_error(self, exc: Exception) -> str:
        what = "".join(traceback.format_exception_only(type(exc), exc)).strip()
        frames = traceback.extract_tb(exc.__traceback__)
        where = "".join(f"\n  at {f.filename}:{f.lineno} in {f.name}" for f in frames[1:])
        return (
            f"Cannot replay {self.name}: its first run had succeeded, its replay raised\n"
            f"{what}{where}\n"
            "Nothing is left changed; the next step can go on."
        )

    def name_operand(self, index: int) -> str:
        """How an error names an operand: `argument 1 (parameter 'linear_0.w_0')`."""
        operand = self.operands[index]
        if index >= len(self.call.places):
            return str(operand)
        name = self.call.name_at(self.call.places[index][0])
        return name if operand.parameter is None else f"{name} ({operand})"


def _needs_gradient(tensor: Any) -> bool:
    return not isinstance(tensor, EagerParamBase) and is_differentiable(tensor)


def is_differentiable(tensor: Any) -> bool:
    """Whether a tensor of this dtype can have a gradient at all."""
    return bool(paddle.is_floating_point(tensor) or paddle.is_complex(tensor))


def _describe(metadata: Metadata) -> str:
    shown = ", ".join(f"{list(shape)} {_dtype_name(dtype)}" for _, shape, dtype in metadata)
    return f"{len(metadata)} tensors ({shown})"


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
