"""A second run with a graph of its own, which is run backward from inside backward."""

from __future__ import annotations

from typing import Any

import attrs

from paramproxy._ambient import arm_final_hooks, final_hooks_are_armed
from paramproxy._aside import Aside
from paramproxy._call import Result
from paramproxy._compat import backward
from paramproxy._leaf import Handover, leaf_gradient
from paramproxy._operand import Operand, as_roots


__all__ = ["Replay"]


@attrs.define(eq=False)
class Replay:
    """The second run: its result, on a fresh graph built on stand-ins.

    Attributes:
        result: What the function returned.
        operands: Each operand with its stand-in.
        handover: How far the leaves among them have come.
        aside: Captured parameters.
    """

    result: Result
    operands: list[tuple[Operand, Any]]
    handover: Handover
    aside: Aside

    def run_backward(self, outputs: list[tuple[Any, Any]]) -> None:
        """Run the graph backward from these outputs, each with its gradient."""
        roots = as_roots([output for output, _ in outputs])
        has_final_hooks = final_hooks_are_armed()
        try:
            backward(roots, [gradient for _, gradient in outputs])
        finally:
            if has_final_hooks:
                arm_final_hooks()

    def gradients(self) -> list[Any]:
        """Hand over the gradient of each differentiable operand and captured parameter."""
        gradients = []
        for operand, standin in self.operands:
            if not operand.stop_gradient:
                gradient = leaf_gradient(standin)
                gradients.append(operand.no_gradient(standin) if gradient is None else gradient)
        self.handover.done = True
        return gradients + self.aside.gradients()
