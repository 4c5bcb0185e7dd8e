"""What a function reads besides its arguments: closures, partials, layers.

A replay happens long after the first run. In between a loop variable in a
closure moves on, a pipeline schedule frees an activation, an optimizer writes
a weight. What is captured here lets the replay find it all as it was, or say
what was changed.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import attrs
import paddle

from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._view import unwrap


__all__ = ["Captured", "function_name", "look_into"]

# A list or dict with more entries than this is data, not a handful of
# activations, and is not searched at every call.
LARGEST_CONTAINER = 256

_EMPTY = object()


@attrs.define(eq=False)
class Captured:
    """The outside world of one function, as its first run saw it.

    Attributes:
        tensors: Captured tensors that are not parameters, each with the words
            that name it. They can be replaced in the replay.
        fixed: The same for those that sit where nothing can be replaced: a
            global name, an attribute of a callable object.
        parameters: Captured trainable parameters.
        cells: Every closure cell that was seen, with its content.
    """

    tensors: list[tuple[str, Any]] = attrs.field(factory=list)
    fixed: list[tuple[str, Any]] = attrs.field(factory=list)
    parameters: list[Any] = attrs.field(factory=list)
    cells: dict[int, tuple[types.CellType, Any]] = attrs.field(factory=dict)
    _seen: set[int] = attrs.field(factory=set)

    def add(self, value: Any, where: str, found: list[tuple[str, Any]]) -> None:
        """Note `value`, or what is in it, under the name `where`."""
        kind = type(value)
        if kind in _UNINTERESTING or id(value) in self._seen:
            return
        self._seen.add(id(value))
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, value, where, found)
        elif isinstance(unwrap(value), Tensor):
            self._add_tensor(unwrap(value), where, found)
        elif isinstance(value, paddle.nn.Layer):
            self._add_layer(value)

    def _add_tensor(self, tensor: Any, where: str, found: list[tuple[str, Any]]) -> None:
        if not isinstance(tensor, EagerParamBase):
            found.append((where, tensor))
        elif not tensor.stop_gradient:
            # A frozen one may be written by the function itself: the running
            # statistics of Paddle's BatchNorm are parameters.
            self.parameters.append(tensor)

    def _add_layer(self, layer: Any) -> None:
        for param in layer._parameters.values():
            if param is not None and not param.stop_gradient:
                self.parameters.append(param)
        for sublayer in layer._sub_layers.values():
            if sublayer is not None and id(sublayer) not in self._seen:
                self._seen.add(id(sublayer))
                self._add_layer(sublayer)

    def _add_function(self, function: Any, where: str, found: list[tuple[str, Any]]) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            content = _content(cell)
            self.cells[id(cell)] = (cell, content)
            self.add(content, f"closure variable {name!r}", found)
        for default in function.__defaults__ or ():
            self.add(default, f"a default of {function.__name__!r}", found)
        for name, default in (function.__kwdefaults__ or {}).items():
            self.add(default, f"the default of {name!r}", found)

    def _add_method(self, method: Any, where: str, found: list[tuple[str, Any]]) -> None:
        self.add(method.__func__, where, found)
        self._add_owner(method.__self__)

    def _add_partial(self, partial: Any, where: str, found: list[tuple[str, Any]]) -> None:
        self.add(partial.func, where, found)
        for position, value in enumerate(partial.args):
            self.add(value, f"argument {position} of a partial", found)
        for name, value in partial.keywords.items():
            self.add(value, f"keyword {name!r} of a partial", found)

    def _add_items(self, items: Any, where: str, found: list[tuple[str, Any]]) -> None:
        if len(items) <= LARGEST_CONTAINER:
            pairs = items.items() if isinstance(items, dict) else enumerate(items)
            for key, value in pairs:
                self.add(value, f"{where}[{key!r}]", found)

    def _add_owner(self, owner: Any) -> None:
        """The object a method is bound to, or a callable object."""
        if isinstance(owner, paddle.nn.Layer):
            self.add(owner, "", self.fixed)
            return
        for name, value in getattr(owner, "__dict__", {}).items():
            self.add(value, f"attribute {name!r}", self.fixed)

    def add_globals(self, function: Any) -> None:
        """The global tensors and layers that the function's own code names."""
        scope = function.__globals__
        for name in _globals_read(function.__code__):
            value = scope.get(name)
            if isinstance(value, (Tensor, paddle.nn.Layer)):
                self.add(value, f"global variable {name!r}", self.fixed)


_UNINTERESTING = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
)
_HANDLERS: dict[type, Any] = {
    types.FunctionType: Captured._add_function,
    types.MethodType: Captured._add_method,
    functools.partial: Captured._add_partial,
    list: Captured._add_items,
    tuple: Captured._add_items,
    dict: Captured._add_items,
}


def look_into(function: Any) -> Captured:
    """Everything that `function` captures and that can be seen from outside."""
    captured = Captured()
    kind = type(function)
    if kind in _HANDLERS or isinstance(function, paddle.nn.Layer):
        captured.add(function, "the function", captured.tensors)
    else:
        captured._add_owner(function)
    plain = unwrapped_function(function)
    if plain is not None:
        captured.add_globals(plain)
    return captured


def unwrapped_function(function: Any) -> Any:
    """The Python function behind partials and bound methods, or None."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            return function if isinstance(function, types.FunctionType) else None


def function_name(function: Any) -> str:
    """How an error names the function: qualified name, file and line if it has them."""
    plain = unwrapped_function(function)
    if plain is None:
        name = getattr(function, "__qualname__", None)
        return f"{name or type(function).__name__!s}"
    code = plain.__code__
    return f"{plain.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


@attrs.define(eq=False)
class Rebinder:
    """Makes the function of the replay: the same code, in the first run's world.

    Attributes:
        cells: The cells as the first run saw them.
        standins: What to put in an object's place, by the object's id.
    """

    cells: dict[int, tuple[types.CellType, Any]]
    standins: dict[int, Any]
    _done: dict[int, Any] = attrs.field(factory=dict)

    def rebind(self, value: Any) -> Any:
        """`value` with every captured tensor replaced; itself where nothing is."""
        standin = self.standins.get(id(value), _EMPTY)
        if standin is not _EMPTY:
            return standin
        rebinder = _REBINDERS.get(type(value))
        if rebinder is None:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value  # a function that holds itself
            self._done[id(value)] = rebinder(self, value)
        return self._done[id(value)]

    def _function(self, function: types.FunctionType) -> Any:
        old = function.__closure__ or ()
        names = function.__code__.co_freevars
        cells = tuple(self._cell(function, name, cell) for name, cell in zip(names, old))
        defaults = self._same_or(function.__defaults__)
        keyword_defaults = self._same_or(function.__kwdefaults__)
        if (
            all(map(_is, cells, old))
            and defaults is function.__defaults__
            and keyword_defaults is function.__kwdefaults__
        ):
            return function
        rebound = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, cells or None
        )
        rebound.__kwdefaults__ = keyword_defaults
        rebound.__dict__.update(function.__dict__)
        rebound.__qualname__ = function.__qualname__
        return rebound

    def _cell(self, function: Any, name: str, cell: types.CellType) -> types.CellType:
        """A cell with what the first run found in it.

        A variable that the function itself assigns (`nonlocal`) is its own
        business: it keeps its cell.
        """
        now = _content(cell)
        _, content = self.cells.get(id(cell), (cell, now))
        rebound = self.rebind(content)
        if rebound is now or rebound is _EMPTY or name in _assigned(function.__code__):
            return cell
        return types.CellType(rebound)

    def _method(self, method: Any) -> Any:
        function = self.rebind(method.__func__)
        if function is method.__func__:
            return method
        return types.MethodType(function, method.__self__)

    def _partial(self, partial: Any) -> Any:
        function = self.rebind(partial.func)
        args, keywords = self._same_or(partial.args), self._same_or(partial.keywords)
        if function is partial.func and args is partial.args and keywords is partial.keywords:
            return partial
        return functools.partial(function, *args, **keywords)

    def _same_or(self, items: Any) -> Any:
        """The container with its entries rebound; itself where none changed."""
        if not items or len(items) > LARGEST_CONTAINER:
            return items
        if isinstance(items, dict):
            new = {key: self.rebind(value) for key, value in items.items()}
            changed = any(new[key] is not value for key, value in items.items())
            return new if changed else items
        rebound = [self.rebind(value) for value in items]
        if all(map(_is, rebound, items)):
            return items
        return type(items)(rebound)


_REBINDERS: dict[type, Any] = {
    types.FunctionType: Rebinder._function,
    types.MethodType: Rebinder._method,
    functools.partial: Rebinder._partial,
    list: Rebinder._same_or,
    tuple: Rebinder._same_or,
    dict: Rebinder._same_or,
}


def _is(one: object, other: object) -> bool:
    return one is other


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return _EMPTY


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The outer variables that this code, or a function inside it, assigns."""
    names = _names(code, ("STORE_DEREF", "DELETE_DEREF")) & set(code.co_freevars)
    return names.union(*(_assigned(part) for part in _inner_codes(code)))


@functools.lru_cache(maxsize=4096)
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """The global names that this code, or a function inside it, reads."""
    names = _names(code, ("LOAD_GLOBAL", "LOAD_NAME"))
    return names.union(*(_globals_read(part) for part in _inner_codes(code)))


def _names(code: types.CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname in operations)


def _inner_codes(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]
