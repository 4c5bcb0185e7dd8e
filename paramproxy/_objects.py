"""Plain Python objects that a function is called with and writes into: a KV cache.

The first run writes into the caller's own object. The replay finds it as the first run
did, and what it writes is put away again: a cache that every layer adds to would be
added to twice. What is looked at is what hangs on the arguments by attributes, lists,
dicts and sets; a function's own attributes and globals are its own business.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

import attrs
import paddle

from paramproxy._compat import Tensor


__all__ = ["NO_OBJECTS", "Objects", "fill"]

# No more objects than this are looked at in one call.
LARGEST_SEARCH = 1024

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Tensor)
_OPAQUE = (type, paddle.nn.Layer, types.FunctionType, types.MethodType, types.ModuleType)
_Holder = dict[Any, Any] | list[Any] | set[Any]


@attrs.define(eq=False)
class Objects:
    """What of the objects among a call's arguments its first run has changed.

    Attributes:
        before: Each dict, list and set, an object's `__dict__` among them, with
            what was in it before the first run; afterwards only the changed ones.
    """

    before: list[tuple[_Holder, _Holder]] = attrs.field(factory=list)

    @classmethod
    def of(cls, leaves: Iterable[Any]) -> Objects:
        """Those that hang on these arguments, before the first run."""
        objects = cls()
        waiting = [leaf for leaf in leaves if not isinstance(leaf, _CONSTANTS)]
        seen: set[int] = set()
        while waiting and len(seen) < LARGEST_SEARCH:
            value = waiting.pop()
            if isinstance(value, (*_CONSTANTS, *_OPAQUE)) or callable(value) or id(value) in seen:
                continue
            seen.add(id(value))
            holder: Any = value if _is_holder(value) else getattr(value, "__dict__", None)
            if _is_holder(holder):
                objects.before.append((holder, holder.copy()))
                waiting += holder.values() if isinstance(holder, dict) else holder
            elif isinstance(value, (tuple, frozenset)):
                waiting += value
        return objects

    def leave_out_unchanged(self) -> None:
        """After the first run."""
        self.before = [pair for pair in self.before if not _same(*pair)]

    def written(self) -> list[tuple[_Holder, _Holder]]:
        """Those that were changed so far, with what is in them now."""
        return [(holder, holder.copy()) for holder, old in self.before if not _same(holder, old)]

    def put_back(self, stack: contextlib.ExitStack) -> None:
        """As the first run found them; when the stack closes, as they are now."""
        if self.before:
            stack.callback(fill, [(holder, holder.copy()) for holder, _ in self.before])
            fill(self.before)


NO_OBJECTS = Objects()
"""Of a call that has none."""


def _is_holder(value: Any) -> bool:
    return type(value) in (dict, list, set)


def _same(one: Any, other: Any) -> bool:
    """Whether two of one type hold the very same objects in the same places."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and not _same(list(one), list(other)):
        return False
    items = one.values() if isinstance(one, dict) else one
    twins = other.values() if isinstance(other, dict) else other
    return all(item is twin for item, twin in zip(items, twins))


def fill(contents: list[tuple[Any, Any]]) -> None:
    """Put into each holder what belongs into it."""
    for holder, content in contents:
        holder.clear()
        if isinstance(holder, list):
            holder.extend(content)
        else:
            holder.update(content)
