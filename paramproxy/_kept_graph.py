"""Kept calls of the reentrant engine: a graph of their own, made in the first run.

That run records nothing, so a kept call is recorded apart, on stand-ins. In the
replay a PyLayer ties its outputs to the tensors that are passed then, and runs
the graph that is there already backward.
"""

from __future__ import annotations

from typing import Any

import attrs
import paddle
from paddle.autograd import PyLayer

from paramproxy._ambient import grad_mode
from paramproxy._aside import Aside
from paramproxy._call import Result
from paramproxy._compat import Tensor, with_own_header
from paramproxy._dispatch import Frame, pass_through, pushed, unpack
from paramproxy._keep import Skipped
from paramproxy._leaf import Handover, leaf_gradient
from paramproxy._operand import as_intermediates
from paramproxy._options import Options
from paramproxy._region import Region
from paramproxy._replay import Replay
from paramproxy._report import Meter
from paramproxy._saved import Loans
from paramproxy._tree import alias, is_differentiable, unflatten
from paramproxy._view import unwrap
from paramproxy.exceptions import ReplayMismatchError


__all__ = ["FirstRun", "SecondRun"]

_ONLY_THE_CALL = Options(preserve_rng_state=False, preserve_buffers=False)


@attrs.define(eq=False)
class KeptGraph:
    """One kept call: its operands and its result, with the graph between them.

    Attributes:
        region: The call.
        replay: Its one run.
        shapes: Shape and dtype of each operand that is no parameter.
        skipped: What else it did.
    """

    region: Region
    replay: Replay
    shapes: list[tuple[Any, Any] | None]
    skipped: Skipped

    @classmethod
    def of(
        cls,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constants: set[int],
        around: Region,
    ) -> KeptGraph:
        """Run the call, recording.

        Without grad mode every tensor looks like a constant. Only those that the
        region around was called with are known to be.
        """
        region, tensors = _opened(function, args, kwargs)
        for operand, tensor in zip(region.operands, tensors):
            if operand.parameter is None and id(tensor) not in constants:
                operand.stop_gradient = not is_differentiable(tensor)
                operand.is_leaf = operand.stop_gradient
        handover = Handover()
        standins = [o.standin(alias(t), handover) for o, t in zip(region.operands, tensors)]
        hook = None if around.meter is None else unpack
        aside = Aside(region.find_own_parameters())
        with grad_mode(True), pushed(_Inside(meter=around.meter), hook), aside.recording():
            given = as_intermediates(region.operands, standins)
            value, skipped = Skipped.by(around, lambda: region.call_now(given))
        region.call.release()
        shapes: list[tuple[Any, Any] | None] = []
        for operand, standin in zip(region.operands, standins):
            shapes.append(None if operand.parameter is not None else (standin.shape, standin.dtype))
        for standin, inner in zip(standins, given):
            if inner is not standin:
                standin._clear_dataptr()  # the graph holds what it needs of the other one
        pairs = list(zip(region.operands, standins))
        return cls(region, Replay(Result.of(value), pairs, handover, aside), shapes, skipped)

    def value(self, outputs: dict[int, Any] | None = None) -> Any:
        """The result: these outputs, detached tensors in the other places."""
        outputs = outputs or {}
        leaves = [
            outputs.get(position, leaf.detach()) if isinstance(leaf, Tensor) else leaf
            for position, leaf in enumerate(self.replay.result.leaves)
        ]
        return unflatten(self.replay.result.spec, leaves)

    @property
    def differentiable(self) -> list[int]:
        """The positions of outputs that have a gradient."""
        return [
            position
            for position, leaf in enumerate(self.replay.result.leaves)
            if isinstance(leaf, Tensor) and not leaf.stop_gradient
        ]

    def gradients(self) -> list[Any]:
        """Hand over the gradient of each differentiable operand and captured parameter."""
        gradients = []
        for (operand, standin), shape in zip(self.replay.operands, self.shapes):
            if operand.stop_gradient:
                continue
            gradient = leaf_gradient(standin)
            if gradient is None and shape is not None and not operand.is_leaf:
                gradient = paddle.zeros(*shape)
            gradients.append(gradient)
        self.replay.handover.done = True
        return gradients + self.replay.aside.gradients()

    def tied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, in the graph of these arguments."""
        again, tensors = _opened(function, args, kwargs)
        if len(tensors) != len(self.region.operands):
            msg = (
                f"Cannot replay the kept call of {again.name}: it reads {len(tensors)} tensors, "
                f"and {len(self.region.operands)} in the first run."
            )
            raise ReplayMismatchError(msg)
        inputs = []
        for operand, tensor in zip(self.region.operands, tensors):
            if not operand.stop_gradient:
                operand.is_leaf = tensor.is_leaf
                inputs.append(tensor)
        # Those that the region was called with are leaves now.
        standins = {id(unwrap(w.parameter)): w.parameter for w in reversed(again.weights)}
        inputs += [standins.get(id(p), p) for p in self.replay.aside.parameters]
        positions = self.differentiable
        if not positions:
            return self.value()
        if all(tensor.stop_gradient for tensor in inputs):
            if all(fixed.tensor.stop_gradient for fixed in self.region.captured.fixed):
                return self.value()
            inputs.append(_dummy())
        return self.value(dict(zip(positions, _KeptCall.apply(_Box(self, positions), *inputs))))


def _dummy() -> Any:
    """Something differentiable to hang the call on, where only a captured tensor needs one."""
    dummy = paddle.zeros([1])
    dummy.stop_gradient = False
    return dummy


def _opened(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Region, list[Any]]:
    return Region.open(function, args, kwargs, _ONLY_THE_CALL, is_measured=False)


@attrs.frozen(eq=False)
class _Box:
    """What the PyLayer must not take for one more input."""

    graph: KeptGraph
    positions: list[int]


class _KeptCall(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, box: _Box, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.box = box
        ctx.flags = [tensor.stop_gradient for tensor in inputs]
        leaves = box.graph.replay.result.leaves
        return tuple(with_own_header(leaves[position].detach()) for position in box.positions)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> tuple[Any, ...]:
        replay = ctx.box.graph.replay
        pairs = [
            (replay.result.leaves[position], grad)
            for position, grad in zip(ctx.box.positions, output_grads)
            if grad is not None
        ]
        if pairs:
            replay.run_backward(pairs)
        gradients = ctx.box.graph.gradients()
        known = [None if flag else grad for flag, grad in zip(ctx.flags, gradients)]
        return (*known, *[None] * (len(ctx.flags) - len(known)))


@attrs.define(eq=False)
class _Transparent(Frame):
    """A frame that only wants to be found: what is saved goes to the one beneath."""

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        if self.under is None:
            return item or pass_through(tensor, is_layers)
        return self.under.take(tensor, item, is_layers)


@attrs.define(eq=False)
class _Inside(_Transparent):
    """The frame of a kept call."""

    runs_once = True

    meter: Meter | None = None

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        if self.meter is not None:
            self.meter.save(tensor)
        return super().take(tensor, item, is_layers)

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


@attrs.define(eq=False)
class FirstRun(_Transparent):
    """The frame of a first run, which makes graphs.

    Attributes:
        region: The region, whose kept calls are these graphs.
        constants: The tensors that are known to need no gradient, by id.
    """

    region: Region
    constants: set[int]

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.below, SecondRun):
            graph = self.below.next_graph()
        else:
            graph = KeptGraph.of(function, args, kwargs, self.constants, self.region)
        self.region.kept_calls.append(graph)
        return graph.value()


@attrs.define(eq=False)
class SecondRun(_Transparent):
    """The frame of a replay, which ties them in."""

    region: Region
    calls: int = 0
    loans: Loans = attrs.field(factory=Loans)

    def take(self, tensor: Any, item: Any, is_layers: bool) -> Any:
        if self.region.meter is not None:
            self.region.meter.see(tensor)
        return self.loans.lent(super().take(tensor, item, is_layers))

    def next_graph(self) -> KeptGraph:
        """The graph of the call that is made now. What it had drawn counts as drawn."""
        index = self.calls
        self.calls += 1
        if index == len(self.region.kept_calls):
            msg = (
                f"Cannot replay: the region makes more calls of keep than the {index} of its "
                "first run. A region has to do the same each time."
            )
            raise ReplayMismatchError(msg)
        graph: KeptGraph = self.region.kept_calls[index]
        graph.skipped.again()
        return graph

    def keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.next_graph().tied(function, args, kwargs)
