"""`python -m paramproxy`: the doctor."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from paramproxy._doctor import diagnose, show


def main(arguments: list[str] | None = None) -> int:
    """Diagnose the installed Paddle. Returns 0 if paramproxy is right in every row."""
    parser = argparse.ArgumentParser(
        prog="python -m paramproxy",
        description="What recompute does to a parameter, under Paddle's own and paramproxy's.",
    )
    parser.add_argument("--json", action="store_true", help="print the table for machines")
    options = parser.parse_args(arguments)
    report = diagnose()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console())
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
