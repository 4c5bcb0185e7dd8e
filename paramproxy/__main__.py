"""`python -m paramproxy`: the doctor; `python -m paramproxy run`: a program, patched."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from paramproxy._doctor import diagnose, show
from paramproxy.patching import patch


USAGE = """python -m paramproxy [--json]
       python -m paramproxy run SCRIPT [ARGUMENT ...]
       python -m paramproxy run -m MODULE [ARGUMENT ...]"""


def main(arguments: list[str] | None = None) -> int:
    """Diagnose the installed Paddle, or run a program.

    Returns:
        For the doctor 0 if paramproxy is right in every row, else 1. A program
        ends with its own code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m paramproxy",
        usage=USAGE,
        description="What recompute does to a parameter, under Paddle's own and paramproxy's. "
        "With run: a program, as python runs it, with paramproxy in the place of Paddle's own, "
        "in it and in every Python that it starts.",
    )
    parser.add_argument("--json", action="store_true", help="print the table for machines")
    if arguments[:1] == ["run"]:
        # By hand: what comes after the program is the program's, dashes and all.
        _run(parser, arguments[1:])
        return 0
    options = parser.parse_args(arguments)
    report = diagnose()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console())
    return 0 if report["ok"] else 1


def _run(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        run_module(arguments[1], arguments[2:])
    elif arguments and not arguments[0].startswith("-"):
        if not Path(arguments[0]).exists():
            parser.error(f"Cannot run {arguments[0]!r}: there is no such file.")
        run_script(arguments[0], arguments[1:])
    else:
        _refuse(parser, arguments)


def _refuse(parser: argparse.ArgumentParser, arguments: list[str]) -> NoReturn:
    given = " ".join(arguments) or "nothing"
    parser.error(f"Cannot run {given}: expected a script, or -m and a module, after run.")


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script, or a folder or archive with a `__main__.py`, with the patch in."""
    _patch_for_good()
    sys.argv = [script, *arguments]
    path = Path(script)
    sys.path[0] = str(path.resolve().parent if path.is_file() else path.resolve())
    runpy.run_path(script, run_name="__main__")


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module as `python -m` does, with the patch in."""
    _patch_for_good()
    sys.argv = [module, *arguments]
    sys.path[0] = str(Path.cwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _patch_for_good() -> None:
    """In this process, and in those that it starts, as a launcher starts its workers."""
    os.environ["PARAMPROXY_PATCH"] = "1"
    patch()


if __name__ == "__main__":
    sys.exit(main())
