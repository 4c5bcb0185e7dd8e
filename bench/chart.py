"""Draws what the docs show of a run of the benchmark, from the file that `--json` wrote.

    python bench --json bench/results.json
    python bench/chart.py bench/results.json docs/assets

writes `speed.svg`, the ratios beside their bars, `speed.md`, the whole table, and the two
curves, `peak.svg` and `trade.svg`. All are legible on a telephone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot


REACHED, MISSED, BAR = "#3f51b5", "#c62828", "#222222"
COLORS = ("#6b7280", "#3f51b5", "#0d9488", "#d97706")
WIDTH = 5.2
"""Inches of 72 points: as wide as a picture is shown, so that 11 points stay 11 points."""

mpl.rcParams.update(
    {
        "svg.hashsalt": "paramproxy",  # the same file for the same numbers
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.linewidth": 2,
    }
)


def draw_ratios(rows: list[dict[str, Any]], where: str, path: Path) -> None:
    """The ratios to what stands beside each number, with the bar as a line across."""
    shown = [row for row in rows if row["theirs"] is not None and row["ratio"] > 0.01]
    shown.reverse()
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.62 * len(shown) + 1.0))
    for index, row in enumerate(shown):
        color = REACHED if row["reached"] else MISSED
        axes.barh(index, row["ratio"], color=color, height=0.4)
        axes.plot([row["bar"]] * 2, [index - 0.22, index + 0.22], color=BAR, linewidth=2)
        end = max(row["ratio"], row["bar"]) + 0.02
        axes.text(end, index, f"{row['ratio']:.2f}", va="center", fontsize=10)
        what = row["what"].replace("preserve_rng_state=False", "no random state")
        axes.text(0, index + 0.3, f"{row['group']}, {what}; beside {row['beside']}", fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(0, 1.3)
    axes.set_ylim(-0.6, len(shown) - 0.1)
    axes.set_xlabel("ours / theirs (the line is the bar to reach)")
    _save(figure, path, where)


def draw_peaks(points: list[dict[str, Any]], where: str, path: Path) -> None:
    """The peak of a step against the number of blocks: measured, and the model's line."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4.2))
    for color, (name, curve) in zip(COLORS, _curves(points)):
        blocks = [point["blocks"] for point in curve]
        axes.plot(blocks, [point["model"] for point in curve], color=color, linewidth=1.2)
        axes.plot(blocks, [point["measured"] for point in curve], "o", color=color, label=name)
    axes.set_xlabel("blocks")
    axes.set_xticks(sorted({point["blocks"] for point in points}))
    axes.set_ylabel("peak, in activations")
    axes.set_ylim(0, max(point["measured"] for point in points) * 1.35)
    axes.legend(title="dots measured, lines the model", loc="upper left")
    _save(figure, path, where)


def draw_trade(points: list[dict[str, Any]], where: str, path: Path) -> None:
    """The time of a step against its peak, as more of twelve blocks are recomputed."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4.0))
    for color, (name, curve) in zip(COLORS[1:], _curves(points)):
        peaks, times = [point["peak"] for point in curve], [point["ms"] for point in curve]
        axes.plot(peaks, times, "o-", color=color, label=name)
        if name == "reentrant":
            for point in curve:
                at = (point["peak"], point["ms"])
                label = f"{point['recomputed']} of 12"
                axes.annotate(label, at, xytext=(6, 8), textcoords="offset points", fontsize=10)
    axes.set_xlabel("peak, in activations")
    axes.set_ylabel("a step, ms")
    axes.set_xlim(0, max(point["peak"] for point in points) * 1.15)
    axes.set_ylim(0)
    axes.legend(loc="lower left")
    _save(figure, path, where)


def _curves(points: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name in dict.fromkeys(point["run"] for point in points):
        yield name, [point for point in points if point["run"] == name]


def _save(figure: Any, path: Path, where: str) -> None:
    figure.axes[0].set_title(where, fontsize=10, color="#4b5563")
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
    where = results["where"]
    draw_ratios(results["rows"], where, target / "speed.svg")
    draw_peaks(results["memory"], where, target / "peak.svg")
    draw_trade(results["trade"], where, target / "trade.svg")
    (target / "speed.md").write_text(table(results["rows"]))


if __name__ == "__main__":
    main()
