"""Two processes, started as users start them, with a time limit and their logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
SECONDS = 180


def launch(tmp_path, program, *arguments, starter=(), seconds=SECONDS, **environment):
    """Run a program on two ranks with gloo. Fails with both logs if one of them did.

    Args:
        tmp_path: Where the logs go.
        program: A program in `programs/`, which prints "done" when all was right.
        *arguments: Its arguments.
        starter: What comes before `-m paddle.distributed.launch`.
        seconds: When to end it all.
        **environment: Variables to set.
    """
    logs = tmp_path / "log"
    command = [
        *(sys.executable, *starter, "-m", "paddle.distributed.launch"),
        *("--nproc_per_node", "2", "--backend", "gloo", "--log_dir", str(logs)),
        *(str(PROGRAMS / program), *arguments),
    ]
    path = os.pathsep.join(map(str, (HERE.parent.parent, HERE.parent)))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        # In the background a shell has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **environment},
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        ending = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        output = _ended(process)
        ending = f"had not ended after {seconds} s"
    texts = [(log, log.read_text()) for log in sorted(logs.glob("workerlog.*"))]
    are_done = ["done" in text.splitlines() for _, text in texts]
    if process.returncode or are_done != [True, True]:
        shown = "\n".join(f"--- {log.name}\n{text[-6000:]}" for log, text in texts)
        pytest.fail(f"{program} {ending}.\n--- launcher\n{output[-3000:]}\n{shown}", pytrace=False)


def _ended(process):
    """End the launcher, which ends its workers if it is interrupted. Returns its output."""
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output
