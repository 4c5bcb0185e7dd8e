"""Which parameters and buffers a function takes out of the layers that it captures.

A closure over `self` captures a whole model, of which a block uses a few weights. Only
those are to be inputs of the region: whoever waits for the gradients of the others, a
reducer or a hook, would wait for them here. And only the buffers that it has read must
be found again as they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

from wrapt import BaseObjectProxy


__all__ = ["uses_noted", "without_notes"]


@contextlib.contextmanager
def uses_noted(layers: Iterable[Any], used: set[int]) -> Iterator[None]:
    """Note what parameters and buffers are taken out of these layers meanwhile, by their ids."""
    own = []
    for layer in layers:
        attributes = vars(layer)
        for name in ("_parameters", "_buffers"):
            held = without_notes(attributes[name])
            if held:
                own.append((attributes, name, held))
    for attributes, name, held in own:
        attributes[name] = _Noted(held, used)
    try:
        yield
    finally:
        for attributes, name, held in own:
            attributes[name] = held


# Generic to a type checker; where it runs, wrapt 2.0 takes no subscript.
class _Noted(BaseObjectProxy):  # type: ignore[type-arg]
    """A layer's dict of parameters or buffers, which notes what is taken out of it."""

    def __init__(self, held: dict[str, Any], used: set[int]) -> None:
        super().__init__(held)
        self._self_used = used

    def __getitem__(self, name: str) -> Any:
        tensor = self.__wrapped__[name]
        self._self_used.add(id(tensor))
        return tensor

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.__wrapped__ else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.__wrapped__)

    def keys(self) -> Any:
        return self.__wrapped__.keys()

    def __getattr__(self, name: str) -> Any:
        """Every other method may give any of them: `values`, `items`, `pop`, `setdefault`."""
        return getattr(self._all(), name)

    def __or__(self, other: Any) -> Any:
        return self._all() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._all()

    def __reversed__(self) -> Any:
        return reversed(self.__wrapped__)

    def _all(self) -> Any:
        self._self_used.update(map(id, self.__wrapped__.values()))
        return self.__wrapped__

    def __copy__(self) -> Any:
        return copy.copy(self._all())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._all(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._all().__reduce_ex__(protocol)


def without_notes(held: Any) -> Any:
    """The dict itself, while it is noted what is taken out of it."""
    return held.__wrapped__ if type(held) is _Noted else held
