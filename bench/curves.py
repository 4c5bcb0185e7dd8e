"""What memory and time a chain of blocks takes, and what a model of it says they take.

A block is three times a matrix product and a tanh, on activations that are much larger
than the weights: in units of one activation, autograd keeps three for each block, and a
region one, its input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from measure import microseconds, peak

from paramproxy import recompute


ROWS, WIDTH = 2048, 128
ACTIVATION = ROWS * WIDTH * 4
LAYERS = 3
"""The products in a block, and the activations that it keeps without recompute."""
GRADIENTS = 2
"""What an operator takes and gives in backward. A PyLayer holds what it was given besides."""


def block(h: Any, *weights: Any) -> Any:
    """Three products, each followed by a tanh."""
    for w in weights:
        h = paddle.tanh(paddle.matmul(h, w))
    return h


def chain(count: int) -> tuple[Any, list[list[Any]]]:
    """An input, and the weights of so many blocks."""
    x = paddle.rand([ROWS, WIDTH])
    x.stop_gradient = False
    shape = [WIDTH, WIDTH]
    return x, [
        [paddle.create_parameter(shape, "float32") for _ in range(LAYERS)] for _ in range(count)
    ]


def step(x: Any, blocks: list[list[Any]], run: Callable[..., Any], segment: int = 1) -> None:
    """Forward and backward; `run` gets `segment` blocks at a time."""
    h = x
    for start in range(0, len(blocks), segment):
        h = run(block, h, *(w for ws in blocks[start : start + segment] for w in ws))
    h.sum().backward()
    x.clear_gradient(False)
    for w in (w for ws in blocks for w in ws):
        w.clear_gradient(False)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


hooks = functools.partial(recompute, use_reentrant=False)
SEGMENT = 4
COUNTS = (4, 8, 12, 16, 20, 24)


def memory_curve() -> list[dict[str, Any]]:
    """The peak against the number of blocks, in activations, with what the model says.

    The model: the output of every region, which is the next one's input, all that one region
    keeps while it is run backward, and the gradients on their way.
    """
    runs: dict[str, tuple[Callable[..., Any], int]] = {
        "without recompute": (plain, 1),
        "each block, reentrant": (recompute, 1),
        "each block, hooks": (hooks, 1),
        f"{SEGMENT} blocks a region, reentrant": (recompute, SEGMENT),
    }
    points = []
    for count in COUNTS:
        x, blocks = chain(count)
        for name, (run, segment) in runs.items():
            measured = peak(functools.partial(step, x, blocks, run, segment)) / ACTIVATION
            model = LAYERS * count if run is plain else count / segment + LAYERS * segment
            model += GRADIENTS + (run is recompute)
            points.append({"run": name, "blocks": count, "measured": measured, "model": model})
    return points


def trade_curve(count: int = 12) -> list[dict[str, Any]]:
    """Time against peak, as more of the blocks are recomputed."""
    x, blocks = chain(count)
    steps = {
        (name, recomputed): functools.partial(_partly, x, blocks, run, recomputed)
        for recomputed in range(0, count + 1, 3)
        for name, run in {"reentrant": recompute, "hooks": hooks}.items()
    }
    times = microseconds(steps, calls=1)
    return [
        {
            "run": name,
            "recomputed": recomputed,
            "peak": peak(steps[name, recomputed]) / ACTIVATION,
            "ms": time / 1000,
        }
        for (name, recomputed), time in times.items()
    ]


def _partly(x: Any, blocks: list[list[Any]], run: Callable[..., Any], recomputed: int) -> None:
    """A step of which the first blocks are recomputed."""
    left = iter(range(len(blocks)))
    step(x, blocks, lambda *call: (run if next(left) < recomputed else plain)(*call))
