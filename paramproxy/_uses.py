"""Which parameters a function takes out of the layers that it captures.

A closure over `self` captures a whole model, of which a block uses a few weights. Only
those are to be inputs of the region: whoever waits for the gradients of the others, a
reducer or a hook, would wait for them here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

from wrapt import BaseObjectProxy


__all__ = ["uses_noted"]


@contextlib.contextmanager
def uses_noted(layers: Iterable[Any], used: set[int]) -> Iterator[None]:
    """Note each parameter that is taken out of one of these layers meanwhile, by its id."""
    own = [(vars(layer), _without_notes(layer._parameters)) for layer in layers]
    own = [(attributes, parameters) for attributes, parameters in own if parameters]
    for attributes, parameters in own:
        attributes["_parameters"] = _Noted(parameters, used)
    try:
        yield
    finally:
        for attributes, parameters in own:
            attributes["_parameters"] = parameters


class _Noted(BaseObjectProxy):  # type: ignore[type-arg]
    """A layer's dict of parameters, which notes what is taken out of it."""

    def __init__(self, parameters: dict[str, Any], used: set[int]) -> None:
        super().__init__(parameters)
        self._self_used = used

    def __getitem__(self, name: str) -> Any:
        parameter = self.__wrapped__[name]
        self._self_used.add(id(parameter))
        return parameter

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


def _without_notes(parameters: Any) -> Any:
    """The dict itself, where another thread is noting at the same time."""
    return parameters.__wrapped__ if type(parameters) is _Noted else parameters
