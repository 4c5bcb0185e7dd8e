"""Buffers that a function writes: once, though it runs twice.

Running statistics, a moving average, a counter. The first run writes them; what
the replay writes is thrown away. Only what the first run changed is copied, so
constant buffers (a mask, rotary angles) cost a look at their version counter.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

import attrs
import paddle

from paramproxy._captured import Captured
from paramproxy._compat import BATCH_NORMS, TENSORS_HAVE_ATTRIBUTES, EagerParamBase
from paramproxy._parameter import nbytes
from paramproxy._tree import alias
from paramproxy._uses import without_notes


__all__ = ["NO_BUFFERS", "Buffers", "Moment", "Writes"]

# They write without a word to the version counter.
_SILENT_WRITES = ("set_value", "copy_")


# The replay has to start from what the first run found in a buffer, and nobody
# knows before whether it will write it. A small one is copied in case it does; a
# larger one if it was written in place before; the largest never.
SMALL = 2**16
LARGEST = 2**20


@attrs.frozen(eq=False)
class Bindings:
    """Which tensors a layer had under which names.

    A layer that keeps a tensor under a name makes a buffer of it, also where the
    attribute had been None.

    Attributes:
        layer: The layer.
        buffers: Its buffers.
        parameters: Its parameters.
        attributes: Everything else.
    """

    layer: Any
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, layer: Any) -> Bindings:
        buffers, parameters = _held(layer)
        return cls(layer, dict(buffers), dict(parameters), dict(vars(layer)))

    def are_as_before(self) -> bool:
        buffers, parameters = _held(self.layer)
        return _same(buffers, self.buffers) and _same(parameters, self.parameters)

    def exchanged(self) -> list[str]:
        """The names under which the layer has another parameter than it had."""
        now = self.layer._parameters
        return [
            name
            for name, parameter in self.parameters.items()
            if now.get(name) is not None and now[name] is not parameter
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """While it lasts, the layer has what it had; what it has now is put back then.

        What is new stays, but for buffers: a layer that makes them when it first
        runs makes them again, and what tells it to, a flag or a length, is as it was.
        """
        now = Bindings.of(self.layer)
        names = self.changed_attributes(now)
        parameters = {**now.parameters, **self.parameters}
        self.rebind(names, parameters)
        try:
            yield
        finally:
            now.rebind(names, now.parameters)

    def rebind(self, names: set[str], parameters: dict[str, Any]) -> None:
        """Give the layer its buffers, these parameters, and its attributes of these names."""
        layer = self.layer
        _rebind(layer._buffers, self.buffers)
        _rebind(layer._parameters, parameters)
        _set(vars(layer), {name: self.attributes.get(name, _NOTHING) for name in names})

    def changed_attributes(self, now: Bindings) -> set[str]:
        """The attributes to put back: those that became buffers; all if other buffers are there."""
        names: set[str] = {name for name in self.attributes if name not in now.attributes}
        if not _same(now.buffers, self.buffers):
            names |= {
                name
                for name in (self.attributes.keys() | now.attributes.keys()) - _LAYERS_OWN
                if self.attributes.get(name, _NOTHING) is not now.attributes.get(name, _NOTHING)
            }
        return names


def _held(layer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layer's buffers and parameters, without a note that somebody looks at them."""
    return without_notes(layer._buffers), without_notes(layer._parameters)


_NOTHING = object()
_LAYERS_OWN = {"_parameters", "_buffers", "_sub_layers"}


def _set(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _NOTHING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))


def _rebind(where: dict[str, Any], what: dict[str, Any]) -> None:
    if not _same(where, what):
        where.clear()
        where.update(what)


@attrs.define(eq=False)
class Buffers:
    """The buffers that a function reads, and which of them it changed.

    Attributes:
        bindings: What each layer had when the first run began.
        versions: Each tensor with its in-place version counter.
        snapshots: What the first run found in a tensor, by the tensor's id.
        noted: Those that the first run has written in silence so far.
        changed: The tensors that the first run wrote into.
        unchanged: The buffers and frozen parameters that it has only read, each with
            its version and its storage.
        replaced: The storages that a replay has put in the place of others.
        rebound: The layers that it gave other tensors.
        exchanged: The names under which it gave one another parameter.
    """

    bindings: list[Bindings]
    versions: list[tuple[Any, int]]
    snapshots: dict[int, Any] = attrs.field(factory=dict)
    noted: list[Any] = attrs.field(factory=list)
    changed: list[Any] = attrs.field(factory=list)
    unchanged: list[tuple[Any, int, int]] = attrs.field(factory=list)
    replaced: set[int] = attrs.field(factory=set)
    rebound: list[Bindings] = attrs.field(factory=list)
    exchanged: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, captured: Captured) -> Buffers:
        if not (captured.layers or captured.frozen or captured.tensors or captured.fixed):
            return NO_BUFFERS
        bindings = [Bindings.of(layer) for layer, _ in captured.layers]
        tensors = [
            *captured.frozen,
            *(tensor for _, tensor in captured.tensors),
            *(fixed.tensor for fixed in captured.fixed),
            *(buffer for layer in bindings for buffer in layer.buffers.values()),
        ]
        found = {id(t): t for t in tensors if t is not None and t.stop_gradient}
        versions = [(t, t._inplace_version()) for t in found.values() if t._is_initialized()]
        return cls(
            bindings,
            versions,
            snapshots={id(t): t.clone() for t, version in versions if _may_be_written(t, version)},
        )

    @property
    def is_watched(self) -> bool:
        """Whether there is anything that the first run could write."""
        return bool(self.bindings or self.versions)

    @contextlib.contextmanager
    def watched(self, captured: Captured, used: set[int]) -> Iterator[None]:
        """The first run, which takes these tensors, by their ids, out of captured layers."""
        with contextlib.ExitStack() as stack:
            for layer in self.bindings:
                for buffer in layer.buffers.values():
                    if buffer is not None:
                        stack.enter_context(_silent_writes_noted(buffer, self.noted))
            try:
                yield
            finally:  # also where the replay of a region around ends this first run
                self._note(captured, used)

    def _note(self, captured: Captured, used: set[int]) -> None:
        written = list(self.noted)
        if self.bindings:
            written += [t for layer, mode in captured.layers if mode for t in _statistics(layer)]
        written += [t for t, version in self.versions if t._inplace_version() != version]
        if not TENSORS_HAVE_ATTRIBUTES:
            written += [t for t, _ in self.versions if _differs(t, self.snapshots)]
        changed = {id(t): t for t in written}
        self.changed = list(changed.values())
        self.unchanged = [
            (t, version, t.data_ptr())
            for t, version in self.versions
            if id(t) in used and id(t) not in changed and t._is_initialized()
        ]
        found = [*self.changed, *(t for t, _, _ in self.unchanged)]
        self.snapshots = {id(t): self.snapshots[id(t)] for t in found if id(t) in self.snapshots}
        self.versions, self.noted = [], []
        self.rebound = [layer for layer in self.bindings if not layer.are_as_before()]
        self.exchanged = [name for layer in self.rebound for name in layer.exchanged()]

    def moment(self) -> Moment:
        """How they are in the middle of the first run."""
        copies = {}
        if not TENSORS_HAVE_ATTRIBUTES:
            copies = {id(t): t.clone() for t, _ in self.versions if id(t) in self.snapshots}
        return Moment(
            [t._inplace_version() for t, _ in self.versions],
            len(self.noted),
            [Bindings.of(bindings.layer) for bindings in self.bindings],
            copies,
        )

    def writes_since(self, before: Moment) -> Writes:
        """What was written since that moment of the first run."""
        written = self.noted[before.noted :]
        for (tensor, _), version in zip(self.versions, before.versions):
            if tensor._inplace_version() != version or _differs(tensor, before.copies):
                written.append(tensor)
        for bindings in self.bindings:
            if bindings.layer.training:
                written += _statistics(bindings.layer)
        found = {id(tensor): tensor for tensor in written}
        return Writes(
            [(tensor, tensor.clone()) for tensor in found.values()],
            [
                (bindings, Bindings.of(bindings.layer))
                for bindings in before.bindings
                if not bindings.are_as_before()
            ],
        )

    def put_back(self, stack: contextlib.ExitStack) -> None:
        """For the replay what the first run found; when the stack closes, what is there now."""
        if not (self.changed or self.unchanged or self.bindings):
            return
        changed = [*self.changed, *self._changed_since()]
        originals = [(t, alias(t)) for t in changed if t._is_initialized()]
        for layer in self.bindings:
            if layer in self.rebound or not layer.are_as_before():
                stack.enter_context(layer.restored())
        for tensor, original in originals:
            stack.callback(tensor._set_impl, original)
            tensor._set_impl(self.snapshots.get(id(tensor), original).clone())
            self.replaced.add(tensor.data_ptr())

    def _changed_since(self) -> list[Any]:
        """What the first run has only read, and somebody has written after it."""
        return [
            tensor
            for tensor, version, pointer in self.unchanged
            if tensor._is_initialized()
            and tensor._inplace_version() != version
            # A sharding stage swaps the storage of a parameter.
            and not (isinstance(tensor, EagerParamBase) and tensor.data_ptr() != pointer)
        ]

    def lost(self) -> str | None:
        """The name of one that was written after the first run, and that nobody has a copy of."""
        for tensor in self._changed_since():
            if id(tensor) not in self.snapshots:
                names = [
                    name
                    for layer in self.bindings
                    for name, buffer in layer.buffers.items()
                    if buffer is tensor
                ]
                return f"buffer {names[0]!r}" if names else f"frozen parameter {tensor.name!r}"
        return None


NO_BUFFERS = Buffers([], [])
"""Of a function that reads none, and for `preserve_buffers=False`."""


@attrs.frozen(eq=False)
class Moment:
    """How buffers are in the middle of a first run.

    Attributes:
        versions: The in-place version counter of each tensor.
        noted: How many were written in silence so far.
        bindings: What each layer has.
        copies: Of tensors whose writes can't be noted, by id.
    """

    versions: list[int]
    noted: int
    bindings: list[Bindings]
    copies: dict[int, Any]


@attrs.frozen(eq=False)
class Writes:
    """What a part of a first run has written, for a replay that skips it.

    Attributes:
        tensors: Each tensor with what was in it afterwards.
        bindings: What each layer that was given other tensors had before and
            has afterwards.
    """

    tensors: list[tuple[Any, Any]]
    bindings: list[tuple[Bindings, Bindings]]

    def again(self) -> None:
        """Write it, where the first run had written it."""
        for tensor, value in self.tensors:
            version = tensor._inplace_version()
            tensor._set_impl(value.clone())
            for _ in range(version + 1):  # a write, for whoever is watching
                tensor._bump_inplace_version()
        for before, after in self.bindings:
            after.rebind(before.changed_attributes(after), after.layer._parameters)


def _differs(tensor: Any, copies: dict[int, Any]) -> bool:
    """Whether a tensor whose writes cannot be noted was written in silence."""
    copy = copies.get(id(tensor))
    return copy is not None and not bool(paddle.equal_all(tensor, copy))


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
