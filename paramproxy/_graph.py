"""A look at the graph that autograd has recorded."""

from __future__ import annotations

from typing import Any

from paramproxy._compat import Tensor


__all__ = ["layers_since", "node_of", "reaches"]


def reaches(outputs: list[Any], tensor: Any) -> bool:
    """Whether a backward from `outputs` would run the op that made `tensor`."""
    node = tensor.grad_fn
    if node is None:
        return False
    wanted = node.node_ptr()
    waiting = [out.grad_fn for out in outputs if isinstance(out, Tensor) and not out.stop_gradient]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node.node_ptr() in seen:
            continue
        seen.add(node.node_ptr())
        if node.node_ptr() == wanted:
            return True
        waiting += node.next_functions
    return False


def node_of(tensor: Any) -> int:
    """Which op made the tensor; 0 if none did."""
    node = tensor.grad_fn
    return 0 if node is None else int(node.node_ptr())


def layers_since(tensor: Any, node: int) -> int:
    """How many PyLayers in a row have returned the tensor since `node` had made it.

    Each counts as a write into the tensor, and writes nothing. 0 if something
    else was among them.
    """
    waiting = [(tensor.grad_fn, 0)]
    while waiting:
        now, layers = waiting.pop()
        if now is None:
            continue
        if now.node_ptr() == node:
            return layers
        if now.name().startswith("GradNodePyLayer"):
            waiting += [(following, layers + 1) for following in now.next_functions]
    return 0
