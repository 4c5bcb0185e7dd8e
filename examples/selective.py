"""What to keep: policies and `keep` on a small transformer, and what each choice comes to.

Every layer is a region. A policy says of each tensor that is saved for backward whether it is
kept, computed again, or moved to the host; `keep` marks a call that is to run once. The
gradients are the same to the last bit whatever is chosen; bytes and time are not.

    python examples/selective.py [--layers 6]
"""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import attrs
import paddle
from paddle.nn import functional as F  # noqa: N812
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paramproxy import (
    keep,
    offload_over,
    recompute,
    report,
    save_everything,
    save_ops,
    save_under,
)


BATCH, LENGTH, WIDTH, HEADS = 4, 128, 128, 4


def attention(query: Any, key: Any, value: Any) -> Any:
    """The dear part: two products and a softmax of `LENGTH` squared."""
    scores = paddle.matmul(query, key, transpose_y=True) / math.sqrt(WIDTH // HEADS)
    return paddle.matmul(F.softmax(scores), value)


class Layer(paddle.nn.Layer):
    """A layer of a transformer. `once` keeps the attention, which then runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = paddle.nn.LayerList([paddle.nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = paddle.nn.Linear(WIDTH, 3 * WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = paddle.nn.Linear(WIDTH, 4 * WIDTH), paddle.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Any, once: bool = False) -> Any:
        split = self.qkv(self.norms[0](h)).reshape([BATCH, LENGTH, 3, HEADS, WIDTH // HEADS])
        query, key, value = paddle.unbind(split.transpose([2, 0, 3, 1, 4]))
        mixed = keep(attention, query, key, value) if once else attention(query, key, value)
        h = h + self.out(mixed.transpose([0, 2, 1, 3]).reshape(h.shape))
        return h + self.down(F.gelu(self.up(self.norms[1](h))))


@attrs.frozen
class Choice:
    """What is kept of a layer, and what came of it.

    Attributes:
        saved: The bytes that all layers kept for backward.
        plain: Those that they would have kept without recompute.
        replays: How many layers were run again.
        milliseconds: The time of forward and replays.
        gradients: Of the input and all parameters.
    """

    saved: int
    plain: int
    replays: int
    milliseconds: float
    gradients: list[Any]


CHOICES: dict[str, dict[str, Any]] = {
    "nothing kept": {},
    "save_ops gelu": {"policy": save_ops("gelu")},
    "save_under 300 kB": {"policy": save_under(300_000)},
    "offload_over 1 MB": {"policy": offload_over(1_000_000)},
    "keep attention": {"once": True},
    "keep it, and gelu": {"once": True, "policy": save_ops("gelu")},
    "save everything": {"policy": save_everything},
}


def step(layers: list[Layer], x: Any, run: Any) -> list[Any]:
    """The gradients of one step, every layer called as `run(layer, h)`."""
    h = x
    for layer in layers:
        h = run(layer, h)
    h.mean().backward()
    owners = [x, *(weight for layer in layers for weight in layer.parameters())]
    gradients = [owner.grad.clone() for owner in owners]
    for owner in owners:
        owner.clear_gradient(False)
    return gradients


def choose(layers: list[Layer], x: Any, **options: Any) -> Choice:
    """One step, every layer recomputed with these options."""
    run = functools.partial(recompute, use_reentrant=False, **options)
    with report() as r:
        gradients = step(layers, x, run)
    (row,) = r.rows
    seconds = row.first_seconds + row.replay_seconds
    return Choice(row.saved_bytes, row.plain_bytes, row.replays, seconds * 1000, gradients)


def main(count: int = 6) -> dict[str, Choice]:
    """Train one step with each choice, and compare."""
    paddle.seed(0)
    layers = [Layer() for _ in range(count)]
    x = paddle.rand([BATCH, LENGTH, WIDTH])
    x.stop_gradient = False
    console, results = Console(stderr=True), {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, options in progress.track(CHOICES.items(), description="choices"):
            choose(layers, x, **options)  # a first step of each is not counted
            results[name] = choose(layers, x, **options)
    expected = step(layers, x, lambda layer, h: layer(h))
    show(count, results, expected)
    return results


def show(count: int, results: dict[str, Choice], expected: list[Any]) -> None:
    """Print a row for each choice."""
    table = Table(
        title=f"{count} layers, Paddle {paddle.__version__}",
        caption="Gradients: beside those without recompute. A CPU has nowhere to offload to.",
    )
    table.add_column("", no_wrap=True)
    for title in ("kept", "without recompute", "replays", "forward and replays", "gradients"):
        table.add_column(title, justify="right")
    for name, choice in results.items():
        are_same = all(bool((a == b).all()) for a, b in zip(expected, choice.gradients))
        table.add_row(
            name,
            f"{choice.saved / 2**20:.1f} MiB",
            f"{choice.plain / 2**20:.1f} MiB",
            str(choice.replays),
            f"{choice.milliseconds:.0f} ms",
            "the same" if are_same else "others",
        )
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Policies and keep, and what each comes to.")
    parser.add_argument("--layers", type=int, default=6)
    main(parser.parse_args().layers)
