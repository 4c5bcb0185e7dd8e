"""numpy's and Python's global random streams: what a region must find untouched, or put back.

Most functions draw from neither, and to build their public states takes longer than
all the rest of a small region. So a state is read as the bytes that it is in memory, at
places that are proven when they are first read, and only put back by public means.
Where they can't be proven the public state is read too.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from paramproxy._caller import log


__all__ = ["Snapshot", "numpy_snapshot", "python_snapshot"]


@attrs.frozen(eq=False)
class Snapshot:
    """A random stream as it was.

    Attributes:
        state: The state.
        put: Makes it the stream's state again.
    """

    state: Any
    put: Callable[[Any], None]

    def restore(self) -> None:
        self.put(self.state)

    def is_same(self, other: Snapshot) -> bool:
        """Whether nothing was drawn in between."""
        return _same(self.state, other.state)


# numpy: the Mersenne twister's key and position, and the second of a pair of Gaussians
# that is kept for the next call, in the C structs of numpy's mt19937.h and legacy.h.
_KEY = struct.Struct("624I i")
_GAUSS = struct.Struct("i 4x d")
_GAUSS_OFFSET = 80
# Python: index and key, behind an object's two words, in _randommodule.c.
_PYTHON = struct.Struct("i 624I")
_PYTHON_OFFSET = 16


def numpy_snapshot() -> Snapshot:
    """`numpy.random`'s global stream as it is now."""
    stream = np.random.mtrand._rand
    generator = stream._bit_generator
    if _is_numpy_proven() and type(generator) is np.random.MT19937:
        return Snapshot(_numpy_bytes(stream, generator), _put_numpy_bytes)
    return Snapshot(np.random.get_state(legacy=False), np.random.set_state)


def python_snapshot() -> Snapshot:
    """The `random` module's global stream as it is now."""
    if _is_python_proven():
        stream = random._inst
        return Snapshot(_python_bytes(stream), _put_python_bytes)
    return Snapshot(random.getstate(), random.setstate)


def _numpy_bytes(stream: Any, generator: Any) -> tuple[bytes, bytes]:
    key = ctypes.string_at(generator.ctypes.state_address, _KEY.size)
    return key, ctypes.string_at(id(stream) + _GAUSS_OFFSET, _GAUSS.size)


def _put_numpy_bytes(state: tuple[bytes, bytes]) -> None:
    np.random.set_state(_numpy_state(state))


def _numpy_state(state: tuple[bytes, bytes]) -> tuple[str, Any, int, int, float]:
    *key, position = _KEY.unpack(state[0])
    return ("MT19937", np.array(key, np.uint32), position, *_GAUSS.unpack(state[1]))


def _python_bytes(stream: Any) -> tuple[bytes, Any]:
    return ctypes.string_at(id(stream) + _PYTHON_OFFSET, _PYTHON.size), stream.gauss_next


def _put_python_bytes(state: tuple[bytes, Any]) -> None:
    random.setstate(_python_state(state))


def _python_state(state: tuple[bytes, Any]) -> tuple[int, tuple[int, ...], Any]:
    index, *key = _PYTHON.unpack(state[0])
    return (3, (*key, index), state[1])


@functools.cache
def _is_numpy_proven() -> bool:
    """Whether the bytes of a stream of our own are its state, whatever is drawn from it."""
    stream = np.random.RandomState(7)
    try:
        for draw in (stream.rand, stream.randn, stream.randn, stream.rand, stream.randn):
            read = _numpy_state(_numpy_bytes(stream, stream._bit_generator))
            if not _same(read, stream.get_state()):
                return _unproven("numpy")
            draw()
    except Exception:  # whatever another numpy may do
        return _unproven("numpy")
    return True


@functools.cache
def _is_python_proven() -> bool:
    """The same of Python's."""
    stream = random.Random(7)  # noqa: S311 - nothing is kept secret by it
    try:
        for draw in (stream.random, lambda: stream.gauss(0, 1), stream.random):
            if _python_state(_python_bytes(stream)) != stream.getstate():
                return _unproven("random")
            draw()
    except Exception:  # whatever another Python may do
        return _unproven("random")
    return type(random._inst) is random.Random


def _unproven(module: str) -> bool:
    log.debug("the random stream of %s is read by its public state, which is slower", module)
    return False


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal: nested, with arrays in them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    return bool(one == other)
