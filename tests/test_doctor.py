"""`python -m paramproxy`."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from support import ROOT

from paramproxy import _doctor
from paramproxy.__main__ import main


def run_module(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "paramproxy", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_says_that_paramproxy_is_right_in_every_row():
    done = run_module("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert len(report["rows"]) == len(_doctor.ROWS) >= 5
    for row in report["rows"]:
        for engine in ("paramproxy reentrant", "paramproxy hooks"):
            assert row["engines"][engine]["got"] == row["expected"]
            assert row["engines"][engine]["milliseconds"] > 0
    theirs = [row["engines"]["Paddle reentrant"] for row in report["rows"]]
    assert not any(outcome["right"] for outcome in theirs)


def test_prints_a_table():
    done = run_module()
    assert done.returncode == 0
    assert "#70508" in done.stdout
    assert "paramproxy gave the right answer in every row." in done.stdout


@pytest.fixture
def broken(monkeypatch):
    """A Paddle on which paramproxy crashes in one row and is wrong in another."""
    program = _doctor.ROWS[0].program

    def outcomes(engine):
        yield _doctor.Outcome("crashed the interpreter (signal 11)")
        for row in _doctor.ROWS[1:]:
            yield _doctor.Outcome(row.expected, 1.0)

    monkeypatch.setattr(_doctor, "_outcomes", outcomes)
    return program


def test_exits_1_when_a_row_is_wrong(broken, capsys):
    assert main([]) == 1
    assert main(["--json"]) == 1
    assert '"ok": false' in capsys.readouterr().out


def test_says_so_when_a_row_is_wrong(broken):
    console = Console(record=True, width=300, file=io.StringIO())
    _doctor.show(_doctor.diagnose(), console)
    text = console.export_text()
    assert "paramproxy gave a wrong answer" in text
    assert "crashed the interpreter (signal 11)" in text


def test_a_row_that_crashes_the_interpreter_does_not_stop_the_others(monkeypatch):
    crash = (
        "import os, signal; from paramproxy import _doctor as d; start = {start}\n"
        "if start == 0: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "d.work({engine!r}, start)"
    )
    monkeypatch.setattr(_doctor, "WORKER", crash)
    outcomes = list(_doctor._outcomes("paramproxy reentrant"))
    assert outcomes[0].got == "crashed the interpreter (signal 11)"
    assert [o.got for o in outcomes[1:]] == [row.expected for row in _doctor.ROWS[1:]]


def test_an_error_in_a_row_is_shown_in_short():
    def program(run):
        raise ValueError("first\n\nValueError: the last words that matter")

    outcome = _doctor._examine(_doctor.Row("title", program, "1"), lambda: None)
    assert outcome.got == "ValueError: ValueError: the last words that matter"
    assert outcome.milliseconds is None
