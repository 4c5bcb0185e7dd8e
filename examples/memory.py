"""The memory of one training step over time, with and without recompute, as a picture.

Twelve blocks of three layers. Bytes are read from Paddle's allocator after every layer, in
forward and in the replays, and whenever a block's gradient arrives. Without recompute they
climb until forward ends. With it they climb by one input a block, and each block is a small
hill of its own in backward.

    python examples/memory.py [--svg memory.svg] [--blocks 12]
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from pathlib import Path
from typing import Any

import attrs
import matplotlib as mpl
import paddle
from matplotlib import pyplot
from paddle.base import core
from paddle.distributed.fleet.utils import recompute as paddles_recompute
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import paramproxy


ROWS, WIDTH, LAYERS = 2048, 128, 3


def allocated() -> int:
    """The bytes that Paddle's allocator has handed out on the CPU."""
    return int(core.host_memory_stat_current_value("Allocated", 0))


@attrs.define
class Timeline:
    """The bytes of one step, above what was there before it.

    Attributes:
        start: When the step began.
        before: The bytes at that time.
        milliseconds: When each sample was taken.
        nbytes: What was there.
    """

    start: float = attrs.field(factory=time.perf_counter)
    before: int = attrs.field(factory=allocated)
    milliseconds: list[float] = attrs.field(factory=list)
    nbytes: list[int] = attrs.field(factory=list)

    def sample(self, *_: object) -> None:
        self.milliseconds.append((time.perf_counter() - self.start) * 1000)
        self.nbytes.append(allocated() - self.before)

    @property
    def peak(self) -> float:
        """In MiB."""
        return max(self.nbytes) / 2**20


def step(run: Any, x: Any, blocks: list[list[Any]]) -> Timeline:
    """Forward and backward, each block called as `run(block, h, *weights)`."""
    timeline = Timeline()

    def block(h: Any, *weights: Any) -> Any:
        for weight in weights:
            h = paddle.tanh(paddle.matmul(h, weight))
            timeline.sample()
        return h

    h = x
    for weights in blocks:
        h = run(block, h, *weights)
        h.register_hook(timeline.sample)
    loss = h.mean()
    del h
    loss.backward()
    timeline.sample()
    for weight in (weight for weights in blocks for weight in weights):
        weight.clear_gradient(False)
    x.clear_gradient(False)
    return timeline


RUNS = {
    "without recompute": lambda function, *args: function(*args),
    "Paddle's own": paddles_recompute,
    "paramproxy, reentrant": paramproxy.recompute,
    "paramproxy, hooks": functools.partial(paramproxy.recompute, use_reentrant=False),
}


def measure(count: int) -> dict[str, Timeline]:
    """The timeline of each way to run the blocks. A first step is not counted."""
    paddle.seed(0)
    x = paddle.rand([ROWS, WIDTH])
    x.stop_gradient = False
    blocks = [
        [paddle.create_parameter([WIDTH, WIDTH], "float32") for _ in range(LAYERS)]
        for _ in range(count)
    ]
    console, timelines = Console(stderr=True), {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, run in progress.track(RUNS.items(), description="steps"):
            step(run, x, blocks)
            gc.collect()
            timelines[name] = step(run, x, blocks)
    return timelines


COLORS = ("#6b7280", "#d97706", "#3f51b5", "#0d9488")


def draw(timelines: dict[str, Timeline], path: Path) -> None:
    """Bytes against time, one curve for each way."""
    mpl.rcParams.update({"svg.hashsalt": "paramproxy", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(5.2, 4.0))
    for color, (name, timeline) in zip(COLORS, timelines.items()):
        nbytes = [size / 2**20 for size in timeline.nbytes]
        axes.plot(timeline.milliseconds, nbytes, color=color, linewidth=1.8, label=name)
    axes.set_xlabel("time in a step, ms")
    axes.set_ylabel("allocated above the start, MiB")
    axes.set_xlim(0)
    axes.set_ylim(0, max(timeline.peak for timeline in timelines.values()) * 1.45)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(f"Paddle {paddle.__version__}, CPU", fontsize=10, color="#4b5563")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(svg: Path = Path("memory.svg"), blocks: int = 12) -> dict[str, Timeline]:
    """Measure, draw, and print the peaks."""
    timelines = measure(blocks)
    draw(timelines, svg)
    table = Table(title=f"{blocks} blocks, Paddle {paddle.__version__}", caption=f"Drawn: {svg}")
    table.add_column("")
    table.add_column("peak", justify="right")
    table.add_column("a step", justify="right")
    for name, timeline in timelines.items():
        table.add_row(name, f"{timeline.peak:.1f} MiB", f"{timeline.milliseconds[-1]:.0f} ms")
    Console().print(table)
    return timelines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The memory of a training step, drawn.")
    parser.add_argument("--svg", type=Path, default=Path("memory.svg"))
    parser.add_argument("--blocks", type=int, default=12)
    options = parser.parse_args()
    main(options.svg, options.blocks)
