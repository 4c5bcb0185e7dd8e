"""The function of the replay: the same code, in the world that its first run found."""

from __future__ import annotations

import functools
import types
from typing import Any

import attrs

from paramproxy._captured import EMPTY, LARGEST_CONTAINER, Captured, cell_content
from paramproxy._code import assigned_names


__all__ = ["Rebinder"]


@attrs.define(eq=False)
class Rebinder:
    """Makes the function of the replay: the same code, in the first run's world.

    Attributes:
        captured: The first run's world.
        standins: What to put in an object's place, by the object's id.
    """

    captured: Captured
    standins: dict[int, Any]
    _done: dict[int, Any] = attrs.field(factory=dict)

    def rebind(self, value: Any) -> Any:
        """`value` with every captured tensor replaced; itself where nothing is."""
        standin = self.standins.get(id(value), EMPTY)
        if standin is not EMPTY:
            return standin
        rebinder = _REBINDERS.get(type(value))
        if rebinder is None or not self.captured.was_searched(value):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = rebinder(self, value)
        return self._done[id(value)]

    def _function(self, function: types.FunctionType) -> Any:
        """The function on new cells, each with what the first run found in it.

        A variable that the function itself assigns (`nonlocal`) is its own
        business, and keeps its cell.
        """
        old = function.__closure__ or ()
        own = assigned_names(function.__code__)
        new = tuple(
            cell if name in own or cell_content(cell) is EMPTY else types.CellType()
            for name, cell in zip(function.__code__.co_freevars, old)
        )
        rebound = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, new or None
        )
        self._done[id(function)] = rebound  # for a function that captures itself
        changed = [self._fill(new_cell, cell) for new_cell, cell in zip(new, old)]
        rebound.__defaults__ = self._items(function.__defaults__)
        rebound.__kwdefaults__ = self._items(function.__kwdefaults__)
        if (
            not any(changed)
            and rebound.__defaults__ is function.__defaults__
            and rebound.__kwdefaults__ is function.__kwdefaults__
        ):
            return function
        rebound.__dict__.update(function.__dict__)
        rebound.__qualname__ = function.__qualname__
        return rebound

    def _fill(self, new: types.CellType, old: types.CellType) -> bool:
        if new is old:
            return False
        now = old.cell_contents
        _, content = self.captured.cells.get(id(old), (old, now))
        new.cell_contents = self.rebind(content)
        return new.cell_contents is not now

    def _method(self, method: Any) -> Any:
        function, owner = self.rebind(method.__func__), method.__self__
        standin = self.standins.get(id(owner), owner)
        if function is method.__func__ and standin is owner:
            return method
        return types.MethodType(function, standin)

    def _builtin_method(self, method: Any) -> Any:
        standin = self.standins.get(id(method.__self__))
        return method if standin is None else getattr(standin, method.__name__)

    def _partial(self, partial: Any) -> Any:
        function = self.rebind(partial.func)
        args, keywords = self._items(partial.args), self._items(partial.keywords)
        if function is partial.func and args is partial.args and keywords is partial.keywords:
            return partial
        return functools.partial(function, *args, **keywords)

    def _items(self, items: Any) -> Any:
        """The container with its entries rebound; itself where none changed."""
        if not items or len(items) > LARGEST_CONTAINER:
            return items
        self._done[id(items)] = items  # for a container that holds itself
        if isinstance(items, dict):
            new = {key: self.rebind(value) for key, value in items.items()}
            changed = any(new[key] is not value for key, value in items.items())
            return new if changed else items
        rebound = [self.rebind(value) for value in items]
        if all(one is other for one, other in zip(rebound, items)):
            return items
        return type(items)(rebound)


_REBINDERS: dict[type, Any] = {
    types.FunctionType: Rebinder._function,
    types.MethodType: Rebinder._method,
    types.BuiltinMethodType: Rebinder._builtin_method,
    functools.partial: Rebinder._partial,
    list: Rebinder._items,
    tuple: Rebinder._items,
    dict: Rebinder._items,
}
