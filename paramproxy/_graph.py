"""A look at the graph that autograd has recorded.

Each time that `grad_fn` is asked for, Paddle gives the node one reference too many,
and so never frees it, nor what hangs on it. The reference is taken back here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from paramproxy._compat import Tensor


__all__ = ["layers_since", "node_of", "reaches"]


def _holders(node: Any) -> int:
    """How many hold the node, for callers that have it in one variable."""
    return sys.getrefcount(node)


def _holders_of_a_local() -> int:
    probe = object()
    return _holders(probe)


_ONE = _holders_of_a_local()


def _made_by(tensor: Any) -> Any:
    """The node of the op that made the tensor. Not to be held when this is called again."""
    node = tensor.grad_fn
    if node is not None and _holders(node) == _ONE + 1:  # we, and nobody
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(node))
    return node


def node_of(tensor: Any) -> int:
    """Which op made the tensor; 0 if none did."""
    node = _made_by(tensor)
    return 0 if node is None else int(node.node_ptr())


def layers_since(tensor: Any, node: int) -> int:
    """How many PyLayers in a row have returned the tensor since `node` had made it.

    Each counts as a write into the tensor, and writes nothing. 0 if something
    else was among them.
    """
    waiting = [(_made_by(tensor), 0)]
    while waiting:
        now, layers = waiting.pop()
        if now is None:
            continue
        if now.node_ptr() == node:
            return layers
        if now.name().startswith("GradNodePyLayer"):
            waiting += [(following, layers + 1) for following in now.next_functions]
    return 0


def reaches(outputs: list[Any], tensor: Any) -> bool:
    """Whether a backward from `outputs` would run the op that made `tensor`."""
    wanted = node_of(tensor)
    if not wanted:
        return False
    seen: set[int] = set()
    for output in outputs:
        if isinstance(output, Tensor) and not output.stop_gradient:
            waiting = [_made_by(output)]
            while waiting:
                node = waiting.pop()
                if node is None or node.node_ptr() in seen:
                    continue
                seen.add(node.node_ptr())
                waiting += node.next_functions
            del node
    return wanted in seen
