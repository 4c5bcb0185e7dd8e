"""Nothing crashes the interpreter but what is known to: every member, in processes of their own.

`python tests/crash_table.py` writes what is known, for the installed Paddle.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import paddle
import pytest
from crash_table import CRASHES, path_of
from support import run_command


PATH = path_of(paddle.__version__)
HOW = "If it is meant to be so, run `python tests/crash_table.py` on this Paddle."


@functools.cache
def found():
    """What crashes on the installed Paddle: `{kind: {role: {member: [call]}}}`."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "found.json"
        done = run_command(str(CRASHES.with_name("crash_table.py")), "--to", str(path))
        assert path.exists(), done.stderr[-2000:]
        return json.loads(path.read_text())


def recorded():
    """What is known to crash: here, or on any Paddle if this one has no record."""
    paths = [PATH] if PATH.exists() else CRASHES.glob("*.json")
    return [json.loads(path.read_text()) for path in paths]


def members(table, kind):
    return {(role, member) for role, calls in table[kind].items() for member in calls}


def known(kind):
    return set().union(*(members(table, kind) for table in recorded()))


def blind(member):
    """Whether it writes through its argument without a look: it crashes, or corrupts unseen."""
    return "_share_" in member[1] or ".initializer." in member[1]


def test_no_leaf_crashes_where_its_parameter_does_not():
    """A leaf is a tensor, so that every kernel takes it."""
    assert found()["leaf"] == {"self": {}, "argument": {}}


def test_no_view_crashes_as_self():
    """Its members are the parameter's, and an unbound method looks at what it is given."""
    assert found()["view"]["self"] == {}


def test_a_view_crashes_as_an_argument_only_where_that_is_known():
    new = {member: found()["view"][member[0]][member[1]] for member in members(found(), "view")}
    for member in known("view"):
        new.pop(member, None)
    assert not new, f"Crash of a view on Paddle {paddle.__version__}: {new}. {HOW}"


@pytest.mark.skipif(not PATH.exists(), reason="no record of this version of Paddle")
def test_a_view_still_crashes_where_it_is_known_to():
    """Else the record, and the documentation, are out of date."""
    gone = {member for member in known("view") - members(found(), "view") if not blind(member)}
    assert not gone, f"No crash of a view on Paddle {paddle.__version__}: {gone}. {HOW}"


@pytest.mark.skipif(not PATH.exists(), reason="no record of this version of Paddle")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the records are of Python 3.11")
def test_a_parameter_itself_crashes_where_it_is_known_to():
    """Of kernels on senseless arguments memory decides: those are not compared."""
    here, there = steady(members(found(), "parameter")), steady(known("parameter"))
    where = f"Crashes of a parameter on Paddle {paddle.__version__}"
    assert here == there, f"{where}: new {here - there}, gone {there - here}. {HOW}"


def steady(of):
    return {member for member in of if ".eager.ops." not in member[1]}
