"""Gradient hooks that a function registers itself: once, though it runs twice."""

from __future__ import annotations

from typing import Any

from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES, EagerParamBase
from paramproxy._leaf import ParamLeaf, already_registered


__all__ = ["hooks_registered_once"]

_REGISTRATIONS = ("register_hook", "_register_grad_hook", "_register_backward_hook")


class hooks_registered_once:  # noqa: N801
    """A block in which registering a hook on one of these tensors does nothing.

    The first run has registered it, on the caller's own tensor. An entry in an
    object's `__dict__` goes before a method of its class. On Paddle 2.6 only
    parameters have one.
    """

    __slots__ = ("covered", "tensors")

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        self.covered: list[tuple[dict[str, Any], str]] = []

    def __enter__(self) -> None:
        for tensor in self.tensors:
            if type(tensor) is EagerParamBase or (
                TENSORS_HAVE_ATTRIBUTES and not isinstance(tensor, ParamLeaf)
            ):
                attributes = tensor.__dict__
                for name in _REGISTRATIONS:
                    if name not in attributes:
                        attributes[name] = already_registered
                        self.covered.append((attributes, name))

    def __exit__(self, *error: object) -> None:
        for attributes, name in self.covered:
            attributes.pop(name, None)
