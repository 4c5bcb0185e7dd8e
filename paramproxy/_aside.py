"""Parameters that a function captures: the objects stay, their place in the graph is another.

An argument is replaced by a leaf. What a function gets out of a closure or a layer
can't be, and a backward of the replay's own graph would accumulate straight into
the parameter, in the middle of the caller's backward: once for each region that
uses it, with its hooks each time, out of sight of whoever walks the caller's graph,
as `DataParallel`'s reducer does. So while the replay records, the parameter is
another leaf of the graph. What that collects goes the way of every other gradient,
through the caller's graph to the parameter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import attrs

from paramproxy._compat import EagerParamBase, Tensor
from paramproxy.exceptions import UnsupportedError


__all__ = ["Aside"]


@attrs.frozen(eq=False)
class Aside:
    """The parameters, and in their order the leaves that take their gradients."""

    parameters: list[Any]
    leaves: list[Any] = attrs.field(factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What is recorded meanwhile, is recorded on the leaves."""
        with _claims.held(self.parameters):
            own = [_in_place_of(parameter) for parameter in self.parameters]
            try:
                for parameter in self.parameters:
                    leaf = Tensor.__new__(Tensor)
                    leaf._set_impl(parameter)
                    leaf.stop_gradient = parameter.stop_gradient
                    if threading.active_count() > 1 and not leaf.stop_gradient:
                        _refuse_other_threads(leaf, parameter.name)
                    _move(parameter, leaf)
                    self.leaves.append(leaf)
                yield
            finally:
                for parameter, place in zip(self.parameters, own):
                    place._set_impl(parameter)  # which the function may have given another
                    _move(parameter, place)

    @staticmethod
    def waited_for(tensors: list[Any]) -> contextlib.AbstractContextManager[None]:
        """A block in which no other thread has one of these tensors set aside."""
        if threading.active_count() == 1:
            return contextlib.nullcontext()
        return _claims.held([tensor for tensor in tensors if isinstance(tensor, EagerParamBase)])

    def gradients(self) -> list[Any]:
        """What a backward has left on each leaf: a gradient or None."""
        return [Tensor._grad_ivar(leaf) for leaf in self.leaves]


def _refuse_other_threads(leaf: Any, name: str) -> None:
    """Raise where a graph that another thread recorded meanwhile ends in this leaf."""
    thread = threading.get_ident()

    def refuse(gradient: Any) -> None:
        if threading.get_ident() != thread:
            msg = (
                f"Cannot give parameter {name!r} its gradient: this graph was recorded while "
                "another thread replayed a region in reentrant mode that captures it. Pass the "
                "parameter to the region as an argument, or call it with use_reentrant=False."
            )
            raise UnsupportedError(msg)

    leaf.register_hook(refuse)


def _in_place_of(parameter: Any) -> Any:
    """A tensor that stands where the parameter does in the graph, hooks and all."""
    place = Tensor.__new__(Tensor)
    place.reconstruct_from_(parameter)
    return place


def _move(parameter: Any, place: Any) -> None:
    """Put the object where `place` stands. A leaf's own parameter stays where it is."""
    Tensor.reconstruct_from_(parameter, place)


@attrs.define(eq=False)
class _Claims:
    """Which thread has set which parameter aside, and how many times."""

    owners: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    @contextlib.contextmanager
    def held(self, parameters: list[Any]) -> Iterator[None]:
        """Wait until no other thread has one of them, and have them all."""
        if not parameters:
            yield
            return
        thread = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: all(self._is_free(p, thread) for p in parameters))
            for parameter in parameters:
                _, depth = self.owners.get(id(parameter), (thread, 0))
                self.owners[id(parameter)] = thread, depth + 1
        try:
            yield
        finally:
            with self.changed:
                for parameter in parameters:
                    _, depth = self.owners.pop(id(parameter))
                    if depth > 1:
                        self.owners[id(parameter)] = thread, depth - 1
                self.changed.notify_all()

    def _is_free(self, parameter: Any, thread: int) -> bool:
        return self.owners.get(id(parameter), (thread, 0))[0] == thread


_claims = _Claims()
