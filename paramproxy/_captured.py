"""What a function reads besides its arguments: closures, partials, layers, globals.

A replay happens long after the first run. In between a loop variable in a
closure moves on, a pipeline schedule frees an activation, an optimizer writes
a weight. What is captured here lets the replay find it all as it was, or say
what was changed.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

import attrs
import paddle

from paramproxy._code import attribute_names, global_names
from paramproxy._compat import EagerParamBase, StaticFunction, Tensor
from paramproxy._parameter import lacks_storage
from paramproxy._tree import attributes
from paramproxy._view import in_graph, unwrap


__all__ = ["EMPTY", "Captured", "Fixed", "cell_content", "function_name", "put_flag_back"]

# A list or dict with more entries than this is data, not a handful of
# activations, and is not searched at every call.
LARGEST_CONTAINER = 256
# No more objects than this are looked at in one call, however they are nested.
LARGEST_SEARCH = 4096
DEEPEST_CONTAINER = 16

EMPTY = object()
"""What a cell holds whose variable is not assigned yet."""


@attrs.frozen(eq=False)
class Fixed:
    """A captured tensor that sits where no stand-in can replace it.

    Attributes:
        where: The words that name it.
        tensor: The tensor.
        is_read: Whether the function's own code names it. If not, it only may
            be read, and a change of it proves nothing.
    """

    where: str
    tensor: Any
    is_read: bool


@attrs.define(eq=False)
class Captured:
    """The outside world of one function, as its first run saw it.

    Attributes:
        tensors: Captured tensors that are not parameters, each with the words
            that name it. They can be replaced in the replay.
        fixed: Those that can't: behind a global name or an attribute.
        parameters: Captured trainable parameters.
        frozen: Captured parameters that are not trained.
        direct: The parameters, by id, that were found elsewhere than under a
            name of a layer.
        layers: Captured layers, each with whether it was in training mode.
        cells: Every closure cell that was seen, with its content.
        has_static: Whether a function made by `to_static` was seen. Called for
            the first time under no_grad, it never records a gradient again.
    """

    tensors: list[tuple[str, Any]] = attrs.field(factory=list)
    fixed: list[Fixed] = attrs.field(factory=list)
    parameters: list[Any] = attrs.field(factory=list)
    frozen: list[Any] = attrs.field(factory=list)
    direct: set[int] = attrs.field(factory=set)
    layers: list[tuple[Any, bool]] = attrs.field(factory=list)
    cells: dict[int, tuple[types.CellType, Any]] = attrs.field(factory=dict)
    has_static: bool = False
    _seen: set[int] = attrs.field(factory=set)
    _is_held: bool = False

    @classmethod
    def by(cls, function: Any, arguments: Iterable[Any]) -> Captured:
        """What `function` captures, and what callables and layers among its arguments do."""
        captured = cls()
        captured.add(function, "the function")
        for argument in arguments:
            if type(argument) in _CALLABLES or isinstance(argument, paddle.nn.Layer):
                captured.add(argument, "an argument")
        return captured

    def add(self, value: Any, where: str) -> None:
        """Note `value`, or what is in it, under the name `where`."""
        kind = type(value)
        if kind in _CONSTANTS or id(value) in self._seen or len(self._seen) > LARGEST_SEARCH:
            return
        self._seen.add(id(value))
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, value, where)
        elif isinstance(tensor := in_graph(value), Tensor):
            self._add_tensor(tensor, where)
        elif issubclass(kind, paddle.nn.Layer):
            self._add_layer(value)
        elif issubclass(kind, StaticFunction):
            self._add_static(value)
        else:
            self._add_object(value)

    def _add_tensor(self, tensor: Any, where: str) -> None:
        if isinstance(tensor, EagerParamBase):
            self.direct.add(id(tensor))
            self._add_parameter(tensor)
        elif lacks_storage(tensor):  # freed before the first run: nobody reads it
            return
        elif self._is_held:
            self.fixed.append(Fixed(where, tensor, is_read=True))
        else:
            self.tensors.append((where, tensor))

    def _add_held(self, value: Any, where: str) -> None:
        """Note what a callable behind an attribute captures, where nothing can be replaced."""
        was_held, self._is_held = self._is_held, True
        self.add(value, where)
        self._is_held = was_held

    def _add_parameter(self, param: Any) -> None:
        # A frozen one may be written by the function itself, so it is not
        # compared: the running statistics of Paddle's BatchNorm are parameters.
        (self.frozen if param.stop_gradient else self.parameters).append(param)

    def _add_fixed(self, value: Any, where: str, *, is_read: bool) -> None:
        """Note the tensor, or the few tensors, behind a global name or an attribute."""
        inside = _few_items(value)
        for key, item in inside if inside is not None else ((None, value),):
            tensor = in_graph(item)
            if not isinstance(tensor, Tensor):
                continue
            if isinstance(tensor, EagerParamBase):
                self.direct.add(id(tensor))
                if is_read:
                    self._add_parameter(tensor)
            elif id(tensor) not in self._seen and not lacks_storage(tensor):
                self._seen.add(id(tensor))
                name = where if key is None else f"{where}[{key!r}]"
                self.fixed.append(Fixed(name, tensor, is_read))

    def add_hidden(self, tensor: Any, where: str) -> None:
        """Note a tensor inside of an argument that is no container."""
        self._add_fixed(tensor, where, is_read=False)

    def _add_layer(self, layer: Any, names: Set[str] | None = None) -> None:
        """A layer's weights and the tensors it keeps; only those under `names`, if given."""
        self.layers.append((layer, layer.training))
        for name, param in layer._parameters.items():
            if param is not None and (names is None or name in names):
                self._add_parameter(param)
        # Paddle makes a buffer of a tensor that is assigned to a layer, also of
        # an activation. Real buffers need no gradient.
        for name, buffer in layer._buffers.items():
            if buffer is not None and not buffer.stop_gradient:
                self._add_fixed(
                    buffer, f"attribute {name!r}", is_read=bool(names and name in names)
                )
        for name, value in vars(layer).items():
            if type(value) in _CONSTANTS or name.startswith("_"):
                continue
            if isinstance(value, StaticFunction):
                self.has_static = True
            elif type(value) in _CALLABLES:
                if names is None or name in names:
                    self._add_held(value, f"attribute {name!r}")
            else:
                self._add_fixed(value, f"attribute {name!r}", is_read=bool(names and name in names))
        for name, sublayer in layer._sub_layers.items():
            wanted = sublayer is not None and (names is None or name in names)
            if wanted and id(sublayer) not in self._seen:
                self._seen.add(id(sublayer))
                self._add_layer(sublayer)

    def _add_static(self, static: Any) -> None:
        self.has_static = True
        self.add(getattr(static, "_class_instance", None), "")

    def _add_object(self, value: Any, names: Set[str] = frozenset()) -> None:
        """Any other object: the tensors in its attributes, or the items of a container."""
        inside = _few_items(value)
        if inside is None:
            inside = _few_items(attributes(value)) or ()
        for key, item in inside:
            if type(item) not in _CONSTANTS:
                self._add_fixed(item, f"attribute {key!r}", is_read=key in names)
                if type(item) in _CALLABLES:
                    self._add_held(item, f"attribute {key!r}")

    def _add_function(self, function: Any, where: str) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            content = cell_content(cell)
            self.cells[id(cell)] = (cell, content)
            self.add(content, f"closure variable {name!r}")
        for default in function.__defaults__ or ():
            self.add(default, f"a default of {function.__name__!r}")
        for name, default in (function.__kwdefaults__ or {}).items():
            self.add(default, f"the default of {name!r}")
        scope = function.__globals__
        for name in global_names(code):
            value = scope.get(name)
            if isinstance(value, paddle.nn.Layer):
                self.add(value, f"global variable {name!r}")
            elif isinstance(unwrap(value), Tensor):
                self._add_fixed(value, f"global variable {name!r}", is_read=True)

    def _add_method(self, method: Any, where: str) -> None:
        function, owner = method.__func__, method.__self__
        self.add(function, where)
        if isinstance(unwrap(owner), Tensor) or isinstance(owner, type):
            self.add(owner, where)
        elif isinstance(function, types.FunctionType) and id(owner) not in self._seen:
            names = attribute_names(function.__code__, type(owner))
            if isinstance(owner, paddle.nn.Layer):
                self._add_layer(owner, names)
            else:
                self._add_object(owner, names)

    def _add_builtin_method(self, method: Any, where: str) -> None:
        if isinstance(method.__self__, Tensor):
            self.add(method.__self__, where)

    def _add_partial(self, partial: Any, where: str) -> None:
        self.add(partial.func, where)
        for position, value in enumerate(partial.args):
            self.add(value, f"argument {position} of a partial")
        for name, value in partial.keywords.items():
            self.add(value, f"keyword {name!r} of a partial")

    def _add_items(self, items: Any, where: str) -> None:
        if where.count("[") < DEEPEST_CONTAINER:
            for key, value in _few_items(items) or ():
                if type(value) not in _CONSTANTS:
                    self.add(value, f"{where}[{key!r}]")

    def was_searched(self, container: Any) -> bool:
        """Whether what is in `container` was looked at."""
        return id(container) in self._seen

    def put_flags_back(self, stack: contextlib.ExitStack) -> None:
        """Until the stack closes, the flags of parameters and layers are those of the first run.

        A GAN freezes and unfreezes its discriminator between forward and backward.

        Args:
            stack: Puts back the flags of now.
        """
        for param in self.parameters:
            put_flag_back(stack, param, False)
        for param in self.frozen:
            put_flag_back(stack, param, True)
        for layer, mode in self.layers:
            if layer.training != mode:
                stack.callback(setattr, layer, "training", not mode)
                layer.training = mode


_CONSTANTS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, type(EMPTY))
)
_CALLABLES: dict[type, Any] = {
    types.FunctionType: Captured._add_function,
    types.MethodType: Captured._add_method,
    types.BuiltinMethodType: Captured._add_builtin_method,
    functools.partial: Captured._add_partial,
}
_HANDLERS: dict[type, Any] = {
    **_CALLABLES,
    list: Captured._add_items,
    tuple: Captured._add_items,
    dict: Captured._add_items,
}


def put_flag_back(stack: contextlib.ExitStack, param: Any, stop_gradient: bool) -> None:
    """The same for one parameter."""
    if param.stop_gradient != stop_gradient:
        stack.callback(setattr, param, "stop_gradient", not stop_gradient)
        param.stop_gradient = stop_gradient


def function_name(function: Any) -> str:
    """How an error names a function: qualified name, file and line if it has them."""
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            return getattr(function, "__qualname__", None) or type(function).__name__
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def cell_content(cell: types.CellType) -> Any:
    """What is in a closure cell, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _few_items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a small container, by key; None for anything else."""
    if isinstance(value, Mapping):
        return value.items() if len(value) <= LARGEST_CONTAINER else ()
    if isinstance(value, (list, tuple, set, frozenset)):
        return enumerate(value) if len(value) <= LARGEST_CONTAINER else ()
    return None
