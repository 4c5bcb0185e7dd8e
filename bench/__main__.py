"""`make bench`: one table, every number beside what it has to be compared with.

`--json FILE` writes it, with the curves of `bench/curves.py`, and `bench/chart.py` draws the
docs' pictures from that file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import attrs
import paddle
from curves import memory_curve, trade_curve
from rich.console import Console
from rich.table import Table
from rows import GROUPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    parser.add_argument("--only", metavar="TEXT", help="only groups with this in their name")
    options = parser.parse_args()
    groups = [group for group in GROUPS if (options.only or "") in group.__name__]
    rows = [row for group in groups for row in group()]
    table = Table("", "", "ours", "beside", "theirs", "ratio", "bar", title=_where())
    for row in rows:
        theirs = "" if row.theirs is None else f"{row.theirs:.4g} {row.unit}"
        ratio = "" if row.theirs is None else f"{row.ratio:.2g}"
        style = "green" if row.is_reached else "red"
        table.add_row(
            row.group,
            row.what,
            f"{row.ours:.4g} {row.unit}",
            row.beside,
            theirs,
            ratio,
            f"[{style}]{row.bar:g}[/]",
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if options.json is not None:
        shown = [
            {**attrs.asdict(row), "ratio": row.ratio, "reached": row.is_reached} for row in rows
        ]
        results = {"where": _where(), "rows": shown}
        results |= {"memory": memory_curve(), "trade": trade_curve()}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _where() -> str:
    return f"Paddle {paddle.__version__}, Python {platform.python_version()}, CPU"


if __name__ == "__main__":
    sys.exit(main())
