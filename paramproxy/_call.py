"""A function's arguments and its result as flat leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from paramproxy._compat import EagerParamBase, Tensor
from paramproxy._tree import dtype_name, dtype_of, flatten, unflatten
from paramproxy._view import in_graph


__all__ = ["Call", "Metadata", "Result", "described"]

_CONSTANTS = frozenset((type(None), bool, int, float, complex, str, bytes))

Metadata = list[tuple[int, tuple[int, ...], Any]]


@attrs.define(eq=False)
class Call:
    """Arguments, flattened, with every view replaced by its parameter.

    Attributes:
        args: The positional arguments to call the function with.
        kwargs: The keyword arguments.
        leaves: Both, flat.
        spec: Their shape.
        tensors: The tensors among them, each once.
        places: For each tensor, its positions in `leaves`.
        others: The positions of what is neither a tensor nor a plain constant.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Any
    tensors: list[Any]
    places: list[list[int]]
    others: list[int]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = flatten((args, kwargs))
        replaced = False
        places: dict[int, list[int]] = {}
        tensors, others = [], []
        for position, leaf in enumerate(leaves):
            kind = type(leaf)
            if kind in _CONSTANTS:
                continue
            if kind is not Tensor and kind is not EagerParamBase:
                tensor = in_graph(leaf)
                if tensor is not leaf:
                    leaf = leaves[position] = tensor
                    replaced = True
                elif not isinstance(leaf, Tensor):
                    others.append(position)
                    continue
            if id(leaf) in places:
                places[id(leaf)].append(position)
            else:
                places[id(leaf)] = [position]
                tensors.append(leaf)
        if replaced:
            args, kwargs = unflatten(spec, leaves)
        return cls(args, kwargs, leaves, spec, tensors, list(places.values()), others)

    @property
    def other_leaves(self) -> list[Any]:
        """What is at those positions."""
        return [self.leaves[position] for position in self.others]

    def release(self) -> None:
        """Let go of the caller's tensors and containers; keep the rest."""
        for places in self.places:
            for position in places:
                self.leaves[position] = None
        self.args, self.kwargs, self.tensors = (), {}, []

    def filled(
        self, tensors: list[Any], rebind: Callable[[Any], Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New args and kwargs: these tensors in the places of the old, the rest rebound."""
        leaves = list(self.leaves)
        if rebind is not None:
            for position in self.others:
                leaves[position] = rebind(leaves[position])
        for tensor, places in zip(tensors, self.places):
            for position in places:
                leaves[position] = tensor
        args, kwargs = unflatten(self.spec, leaves)
        return args, kwargs

    def argument_at(self, position: int) -> int | str:
        """The argument that a leaf belongs to: its index or its keyword."""
        argument: int | str = self.spec.paths()[position][1]
        return argument

    def name_at(self, position: int) -> str:
        """How an error names a leaf: `argument 0`, `keyword 'mask'['left']`."""
        _, argument, *inner = self.spec.paths()[position]
        kind = "keyword" if isinstance(argument, str) else "argument"
        return f"{kind} {argument!r}" + "".join(f"[{key!r}]" for key in inner)


@attrs.define(eq=False)
class Result:
    """What a function returned, flat, and its shape."""

    leaves: list[Any]
    spec: Any

    @classmethod
    def of(cls, value: Any) -> Result:
        return cls(*flatten(value))

    @property
    def metadata(self) -> Metadata:
        """Position, shape and dtype of each tensor: what a replay has to repeat."""
        return [
            (position, tuple(leaf.shape), dtype_of(leaf))
            for position, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor)
        ]


def described(metadata: Metadata) -> str:
    """How an error tells of them: `1 tensors ([2, 3] float32)`."""
    shown = ", ".join(f"{list(shape)} {dtype_name(dtype)}" for _, shape, dtype in metadata)
    return f"{len(metadata)} tensors ({shown})"
