"""Buffers that a function writes: once, though it runs twice.

Running statistics, a moving average, a counter. The first run writes them; what
the replay writes is thrown away. Only what the first run changed is copied, so
constant buffers (a mask, rotary angles) cost a look at their version counter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import attrs

from paramproxy._captured import Captured
from paramproxy._compat import BATCH_NORMS, TENSORS_HAVE_ATTRIBUTES, EagerParamBase
from paramproxy._parameter import nbytes
from paramproxy._tree import alias


__all__ = ["Buffers"]

# They write without a word to the version counter.
_SILENT_WRITES = ("set_value", "copy_")


# The replay has to start from what the first run found in a buffer, and nobody
# knows before whether it will write it. A small one is copied in case it does; a
# larger one if it was written in place before; the largest never.
SMALL = 2**16
LARGEST = 2**20


@attrs.define(eq=False)
class Buffers:
    """The buffers that a function reads, and which of them it changed.

    Attributes:
        versions: Each tensor with its in-place version counter.
        bindings: The `_buffers` of each layer, with what was in it.
        snapshots: What the first run found in a tensor, by the tensor's id.
        changed: The tensors that the first run wrote into.
        rebound: Where the first run put another tensor, and what had been there.
    """

    versions: list[tuple[Any, int]]
    bindings: list[tuple[dict[str, Any], dict[str, Any]]]
    snapshots: dict[int, Any] = attrs.field(factory=dict)
    changed: list[Any] = attrs.field(factory=list)
    rebound: list[tuple[dict[str, Any], str, Any]] = attrs.field(factory=list)

    @classmethod
    def of(cls, captured: Captured) -> Buffers:
        layers = [layer for layer, _ in captured.layers if layer._buffers]
        tensors = [
            *captured.frozen,
            *(tensor for _, tensor in captured.tensors),
            *(fixed.tensor for fixed in captured.fixed),
            *(buffer for layer in layers for buffer in layer._buffers.values()),
        ]
        found = {id(t): t for t in tensors if t is not None and t.stop_gradient}
        versions = [(t, t._inplace_version()) for t in found.values() if t._is_initialized()]
        return cls(
            versions,
            bindings=[(layer._buffers, dict(layer._buffers)) for layer in layers],
            snapshots={id(t): t.clone() for t, version in versions if _may_be_written(t, version)},
        )

    @classmethod
    def none(cls) -> Buffers:
        """For `preserve_buffers=False`."""
        return cls([], [])

    @contextlib.contextmanager
    def watched(self, captured: Captured) -> Iterator[None]:
        """The first run."""
        written = [t for layer, mode in captured.layers if mode for t in _statistics(layer)]
        with contextlib.ExitStack() as stack:
            for _, before in self.bindings:
                for buffer in before.values():
                    if buffer is not None:
                        stack.enter_context(_silent_writes_noted(buffer, written))
            yield
        written += [t for t, version in self.versions if t._inplace_version() != version]
        self.changed = list({id(t): t for t in written}.values())
        self.rebound = [
            (now, name, before.get(name))
            for now, before in self.bindings
            for name, buffer in now.items()
            if before.get(name) is not buffer
        ]
        self.snapshots = {
            id(t): self.snapshots[id(t)] for t in self.changed if id(t) in self.snapshots
        }
        self.versions, self.bindings = [], []

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The replay: on what the first run found, and without a trace."""
        originals = [(t, alias(t)) for t in self.changed if t._is_initialized()]
        bound = [(where, name, where.get(name)) for where, name, _ in self.rebound]
        for tensor, original in originals:
            tensor._set_impl(self.snapshots.get(id(tensor), original).clone())
        for where, name, before in self.rebound:
            _bind(where, name, before)
        try:
            yield
        finally:
            for tensor, original in originals:
                tensor._set_impl(original)
            for where, name, now in bound:
                _bind(where, name, now)


def _bind(where: dict[str, Any], name: str, buffer: Any) -> None:
    if buffer is None:
        where.pop(name, None)
    else:
        where[name] = buffer


def _may_be_written(tensor: Any, version: int) -> bool:
    if version:
        return nbytes(tensor) <= LARGEST
    return not isinstance(tensor, EagerParamBase) and nbytes(tensor) <= SMALL


def _statistics(layer: Any) -> tuple[Any, ...]:
    """What a batch norm in training writes: its kernel bumps no version counter."""
    if not isinstance(layer, BATCH_NORMS) or layer._use_global_stats:
        return ()
    return layer._mean, layer._variance


@contextlib.contextmanager
def _silent_writes_noted(tensor: Any, noted: list[Any]) -> Iterator[None]:
    """Note the tensor where the function writes it by one of these methods.

    An entry in an object's `__dict__` goes before a method of its class. On
    Paddle 2.6 only parameters have one.
    """
    if not (TENSORS_HAVE_ATTRIBUTES or isinstance(tensor, EagerParamBase)):
        yield
        return
    attributes = vars(tensor)
    names = [name for name in _SILENT_WRITES if name not in attributes]
    for name in names:
        attributes[name] = functools.partial(_write, tensor, name, noted)
    try:
        yield
    finally:
        for name in names:
            attributes.pop(name, None)


def _write(tensor: Any, name: str, noted: list[Any], *args: Any, **kwargs: Any) -> Any:
    noted.append(tensor)
    return getattr(type(tensor), name)(tensor, *args, **kwargs)
