"""A look at the graph that autograd has recorded."""

from __future__ import annotations

from typing import Any

from paramproxy._compat import Tensor


__all__ = ["reaches"]


def reaches(outputs: list[Any], tensor: Any) -> bool:
    """Whether a backward from `outputs` would run the op that made `tensor`.

    Not for every call: Paddle never frees a node that `grad_fn` has given.
    """
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
