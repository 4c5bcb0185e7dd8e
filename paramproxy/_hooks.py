"""Gradient hooks that a function registers itself: once, though it runs twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES, EagerParamBase
from paramproxy._leaf import ParamLeaf, already_registered


__all__ = ["hooks_registered_once"]

_REGISTRATIONS = ("register_hook", "_register_grad_hook", "_register_backward_hook")


@contextlib.contextmanager
def hooks_registered_once(tensors: Iterable[Any]) -> Iterator[None]:
    """While it lasts, registering a hook on one of these tensors does nothing.

    The first run has registered it, on the caller's own tensor. An entry in an
    object's `__dict__` goes before a method of its class. On Paddle 2.6 only
    parameters have one.
    """
    covered = [
        (vars(tensor), [name for name in _REGISTRATIONS if name not in vars(tensor)])
        for tensor in tensors
        if type(tensor) is EagerParamBase
        or (TENSORS_HAVE_ATTRIBUTES and not isinstance(tensor, ParamLeaf))
    ]
    try:
        for attributes, names in covered:
            attributes.update((name, already_registered) for name in names)
        yield
    finally:
        for attributes, names in covered:
            for name in names:
                attributes.pop(name, None)
