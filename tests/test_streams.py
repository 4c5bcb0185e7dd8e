"""numpy's and Python's streams, read as bytes: every way to draw from them is seen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paramproxy import _streams
from paramproxy._streams import numpy_snapshot, python_snapshot


# Without what they have found out before.
IS_NUMPY_PROVEN = _streams._is_numpy_proven.__wrapped__
IS_PYTHON_PROVEN = _streams._is_python_proven.__wrapped__

NUMPY = {
    "rand": lambda: np.random.rand(),
    "randn": lambda: np.random.randn(),
    "an odd number of Gaussians": lambda: np.random.randn(3),
    "permutation": lambda: np.random.permutation(5),
    "choice": lambda: np.random.choice(5),
    "bytes": lambda: np.random.bytes(3),
    "a whole key": lambda: np.random.rand(624),
    "two whole keys": lambda: np.random.rand(2 * 624),
    "seed": lambda: np.random.seed(3),
    "a generator on the same bits": lambda: np.random.Generator(
        np.random.mtrand._rand._bit_generator
    ).random(),
}
PYTHON = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "getrandbits": lambda: random.getrandbits(3),
    "a whole key": lambda: [random.random() for _ in range(312)],
    "seed": lambda: random.seed(3),
    "randbytes": lambda: random.randbytes(3),
}


@pytest.fixture(params=["bytes", "public states"])
def _reading(request, monkeypatch):
    """Both ways to read; the second is for a numpy or Python of another layout."""
    assert _streams._is_numpy_proven()
    assert _streams._is_python_proven()
    if request.param == "public states":
        monkeypatch.setattr(_streams, "_is_numpy_proven", lambda: False)
        monkeypatch.setattr(_streams, "_is_python_proven", lambda: False)


pytestmark = pytest.mark.usefixtures("_reading")


@pytest.mark.parametrize("gaussian_kept", [False, True])
@pytest.mark.parametrize("draw", NUMPY)
def test_numpys(draw, gaussian_kept):
    np.random.seed(1)
    if gaussian_kept:
        np.random.randn()
    before = numpy_snapshot()
    assert before.is_same(numpy_snapshot())
    NUMPY[draw]()
    assert not before.is_same(numpy_snapshot())
    following = np.random.rand(3).tolist(), np.random.randn(3).tolist()
    before.restore()
    assert before.is_same(numpy_snapshot())
    NUMPY[draw]()
    assert (np.random.rand(3).tolist(), np.random.randn(3).tolist()) == following


@pytest.mark.parametrize("gaussian_kept", [False, True])
@pytest.mark.parametrize("draw", PYTHON)
def test_pythons(draw, gaussian_kept):
    random.seed(1)
    if gaussian_kept:
        random.gauss(0, 1)
    before = python_snapshot()
    assert before.is_same(python_snapshot())
    PYTHON[draw]()
    assert not before.is_same(python_snapshot())
    following = random.random(), random.gauss(0, 1)
    before.restore()
    assert before.is_same(python_snapshot())
    PYTHON[draw]()
    assert (random.random(), random.gauss(0, 1)) == following


def test_a_kept_gaussian_that_is_used_up_moves_no_key():
    """The one change that the key and its position do not show."""
    np.random.seed(1)
    np.random.randn()
    before = numpy_snapshot()
    np.random.randn()
    assert not before.is_same(numpy_snapshot())


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="came with numpy 1.24")
def test_a_bit_generator_that_somebody_has_exchanged():
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = numpy_snapshot()
        drawn = np.random.rand()
        assert not before.is_same(numpy_snapshot())
        before.restore()
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(old)


@pytest.mark.parametrize("what", ["numpy", "python"])
def test_another_layout_is_found_out(monkeypatch, what):
    monkeypatch.setattr(_streams, "_GAUSS_OFFSET", 88)
    monkeypatch.setattr(_streams, "_PYTHON_OFFSET", 24)
    proven = {"numpy": IS_NUMPY_PROVEN, "python": IS_PYTHON_PROVEN}[what]
    assert not proven()
