"""Random programs: what recompute gives is what the plain call gives, whatever is combined."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, reject
from programs import FLAGS_UNKNOWN, RESULTS, differences, outcome
from strategies import Scope


pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")

KNOWN = tuple(name for name in RESULTS if name not in FLAGS_UNKNOWN)


RUNNING = Path(__file__).parent.parent / ".hypothesis" / "running.txt"
"""The program that is being run: what is left to read if it crashes the interpreter."""


def check(program, *, exact, wanted=None):
    RUNNING.parent.mkdir(exist_ok=True)
    RUNNING.write_text(f"{program!r}\nexact={exact}\n")
    wanted = wanted or outcome(program, recomputes=False)
    got = outcome(program, recomputes=True)
    names = differences(got, wanted, exact=exact)
    assert not names, {name: (got[name], wanted[name]) for name in names}


@given(Scope(("hooks",)).programs())
def test_the_hook_engine(program):
    check(program, exact=True)


@given(Scope(("hooks",), backwards=3, lasts=("backward", "grad")).programs())
def test_the_hook_engine_with_several_backwards(program):
    check(program, exact=True)


@given(Scope(("hooks",), ("one", "tuple", "dict", "twice"), lasts=("penalty",)).programs())
def test_the_hook_engine_with_a_gradient_penalty(program):
    try:
        wanted = outcome(program, recomputes=False)
    except (RuntimeError, SystemError, OSError):
        reject()  # Paddle has no second gradient of it
    check(program, exact=True, wanted=wanted)


@given(Scope(("reentrant",), KNOWN).programs())
def test_the_reentrant_engine(program):
    check(program, exact=False)


@given(Scope(("reentrant", "hooks", "plain"), KNOWN).programs())
def test_both_engines(program):
    check(program, exact=False)
