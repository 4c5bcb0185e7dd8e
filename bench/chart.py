"""Draws what the docs show of a run of the benchmark, from the file that `--json` wrote.

    python bench --json bench/results.json
    python bench/chart.py bench/results.json docs/assets

writes `speed.svg`, the ratios beside their bars, and `speed.md`, the whole table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot


REACHED, MISSED, BAR = "#3f51b5", "#c62828", "#222222"


def draw(rows: list[dict[str, Any]], where: str, path: Path) -> None:
    """The ratios to what stands beside each number, with the bar as a line across."""
    shown = [row for row in rows if row["theirs"] is not None and row["ratio"] > 0.01]
    shown.reverse()
    mpl.rcParams["svg.hashsalt"] = "paramproxy"  # the same file for the same numbers
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(shown) + 1.2))
    names = [f"{row['group']}: {row['what']}\n(beside {row['beside']})" for row in shown]
    colors = [REACHED if row["reached"] else MISSED for row in shown]
    axes.barh(names, [row["ratio"] for row in shown], color=colors, height=0.62)
    for index, row in enumerate(shown):
        axes.plot([row["bar"]] * 2, [index - 0.42, index + 0.42], color=BAR, linewidth=2)
        axes.text(row["ratio"] + 0.02, index, f"{row['ratio']:.2f}", va="center", fontsize=8)
    axes.set_xlabel("ours / theirs (the line is the bar it is to reach)")
    axes.set_title(where, fontsize=10)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def table(rows: list[dict[str, Any]]) -> str:
    """The whole of it, in Markdown."""
    lines = ["| | ours | theirs | beside | ratio | bar |", "|---|---|---|---|---|---|"]
    for row in rows:
        alone = row["theirs"] is None
        theirs = "" if alone else _number(row["theirs"], row["unit"])
        digits = ".2g" if row["ratio"] < 0.01 else ".2f"
        ratio = "" if alone else format(row["ratio"], digits)
        bar = f"{row['bar']:g} {'' if row['reached'] else 'missed'}".strip()
        ours = _number(row["ours"], row["unit"])
        cells = (f"{row['group']}: {row['what']}", ours, theirs, row["beside"], ratio, bar)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{shown} {unit}"


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    results = json.loads(source.read_text())
    draw(results["rows"], results["where"], target / "speed.svg")
    (target / "speed.md").write_text(table(results["rows"]))


if __name__ == "__main__":
    main()
