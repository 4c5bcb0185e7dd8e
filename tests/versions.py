"""What was run on which Paddle, and what it gave: the table of the docs.

    python tests/versions.py run [--cases DIR]    on the Paddle of this interpreter
    python tests/versions.py table                of all that was run, into the docs

`run` runs the suite, many random programs, and the programs of `DIR`, each of which
takes what it is to recompute with from the environment and exits with 0 where it came
out right. It writes what they gave to `docs/assets/versions/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "assets" / "versions"
TABLE = ROOT / "docs" / "assets" / "versions.md"
PROGRAMS = int(os.environ.get("PROGRAMS", "500"))
ENGINES = {"hooks": "0", "reentrant": "1"}


def run(cases):
    """Run it all, print it, and write it down. The exit code."""
    suite, suite_failed = _pytest()
    programs, programs_failed = _pytest("--hypothesis-profile=many", "tests/test_programs.py")
    found = {
        "paddle": _paddle_version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "tests": suite,
        "random programs": programs.get("passed", 0) * PROGRAMS,
    }
    if cases is not None:
        found["cases"] = {engine: _cases(cases, mode) for engine, mode in ENGINES.items()}
    print(json.dumps(found, indent=2))
    if suite_failed or programs_failed:
        return 1
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{found['paddle']}.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _pytest(*args):
    """What pytest counted, and whether anything failed."""
    command = [sys.executable, "-m", "pytest", "-q", *args]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PROGRAMS": str(PROGRAMS)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(result.stdout)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", result.stdout.splitlines()[-1])
    return {what: int(count) for count, what in counts}, result.returncode != 0


def _cases(directory, mode):
    """How many of the programs came out right, and the numbers of the others."""
    environment = {
        **os.environ,
        "RECOMPUTE": "paramproxy:recompute",
        "RECOMPUTE_SEQ": "paramproxy:recompute_sequential",
        "REENTRANT": mode,
    }
    right, wrong = 0, []
    for case in sorted(Path(directory).glob("*.py")):
        result = subprocess.run(
            [sys.executable, case], env=environment, capture_output=True, check=False
        )
        if result.returncode == 0:
            right += 1
        else:
            wrong.append(case.name.partition("_")[0])
    return {"right": right, "others": wrong}


def _paddle_version():
    import paddle

    return paddle.__version__


def table():
    """The table, of the newest Paddle first."""
    files = sorted(RESULTS.glob("*.json"), key=_version, reverse=True)
    found = [json.loads(file.read_text()) for file in files]
    lines = [
        "| Paddle | Python | tests | random programs | cases, hooks | cases, reentrant | run |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        tests = one["tests"]
        told = f"{tests['passed']} passed"
        if "skipped" in tests:
            told += f", {tests['skipped']} skipped"
        cases = [_told(one.get("cases", {}).get(engine)) for engine in ENGINES]
        cells = [one["paddle"], one["python"], told, str(one["random programs"]), *cases]
        lines.append("| " + " | ".join([*cells, one["date"]]) + " |")
    TABLE.write_text("\n".join(lines) + "\n")
    print(TABLE.read_text())


def _told(cases):
    if cases is None:
        return ""
    total = cases["right"] + len(cases["others"])
    return f"{cases['right']} of {total}"


def _version(file):
    return tuple(int(part) for part in file.stem.split("."))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--cases", type=Path)
    asked = parser.parse_args()
    sys.exit(run(asked.cases) if asked.what == "run" else table())
