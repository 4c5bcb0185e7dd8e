"""A language model whose weights are trained by `main_grad`, with and without recompute.

PaddlePaddle/Paddle#70508 grown into a training loop. Every linear layer is a fused kernel, as
in large models: its backward adds the weight's gradient to the weight's own fp32 `main_grad`,
returns none to autograd, and the optimizer reads `main_grad`. The weights are arguments of the
block that is recomputed. Paddle's own recompute runs that block again on copies of them, so
that the gradients go into the copies: no error, and nothing is learned.

    python examples/fused_main_grad.py [--steps 60]
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
from typing import Any

import attrs
import numpy as np
import paddle
from paddle.base import core
from paddle.distributed.fleet.utils import recompute as paddles_recompute
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer
from paddle.nn import functional as F  # noqa: N812
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import paramproxy


LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 4, 64, 4, 64, 8, 32


class FusedLinear(paddle.autograd.PyLayer):
    """`x @ weight`, whose weight gradient goes to `weight.main_grad`."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return paddle.matmul(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensor()
        if getattr(weight, "main_grad", None) is None:
            weight.main_grad = paddle.zeros(weight.shape, "float32")
        rows = [tensor.reshape([-1, tensor.shape[-1]]) for tensor in (x, dy)]
        weight.main_grad.add_(paddle.matmul(*rows, transpose_x=True))
        return paddle.matmul(dy, weight, transpose_y=True), None  # none for autograd


def block(h, qkv, out, up, down):
    """One layer of a transformer. What it computes with, it is given."""
    split = FusedLinear.apply(F.layer_norm(h, WIDTH), qkv)
    split = split.reshape([BATCH, LENGTH, 3, HEADS, WIDTH // HEADS]).transpose([2, 0, 3, 1, 4])
    query, key, value = paddle.unbind(split)
    scores = paddle.matmul(query, key, transpose_y=True) / math.sqrt(WIDTH // HEADS)
    causal = paddle.triu(paddle.full([LENGTH, LENGTH], -1e9), diagonal=1)
    mixed = paddle.matmul(F.softmax(scores + causal), value)
    h = h + FusedLinear.apply(mixed.transpose([0, 2, 1, 3]).reshape(h.shape), out)
    return h + FusedLinear.apply(F.gelu(FusedLinear.apply(F.layer_norm(h, WIDTH), up)), down)


def parameter(stream, *shape):
    """A weight with its `main_grad`."""
    values = stream.randn(*shape).astype("float32") / math.sqrt(shape[0])
    weight = paddle.create_parameter(
        shape, "float32", default_initializer=paddle.nn.initializer.Assign(values)
    )
    weight.main_grad = paddle.zeros(shape, "float32")
    return weight


def batches(steps):
    """Text of a language with one rule: each token has a successor, with some noise."""
    stream = np.random.RandomState(1)
    successor = stream.permutation(VOCABULARY)
    for _ in range(steps):
        ids = [stream.randint(0, VOCABULARY, BATCH)]
        for _ in range(LENGTH):
            noise = stream.randint(0, VOCABULARY, BATCH)
            ids.append(np.where(stream.rand(BATCH) < 0.9, successor[ids[-1]], noise))
        text = np.stack(ids, axis=1)
        yield paddle.to_tensor(text[:, :-1]), paddle.to_tensor(text[:, 1:])


@attrs.frozen
class Run:
    """What came of one training.

    Attributes:
        losses: The loss of each step.
        moved: How many weights are not what they were.
        weights: How many there are.
        kept: The bytes that the layers kept for backward in the last step.
    """

    losses: list[float]
    moved: int
    weights: int
    kept: int


def train(run: Any, steps: int, tick: Any = lambda: None) -> Run:
    """Train the model, each layer of it called as `run(block, h, *weights)`."""
    stream = np.random.RandomState(0)
    embedding = paddle.to_tensor(stream.randn(VOCABULARY, WIDTH).astype("float32"))
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    layers = [[parameter(stream, *shape) for shape in shapes] for _ in range(LAYERS)]
    weights = [weight for layer in layers for weight in layer]
    at_first = [weight.clone() for weight in weights]
    optimizer = MixPrecisionOptimizer(paddle.optimizer.Adam(3e-3, parameters=weights))
    losses = []
    for ids, labels in batches(steps):
        h = F.embedding(ids, embedding)
        h.stop_gradient = False  # as behind an embedding that is trained; this one is not
        if len(losses) == steps - 1:
            gc.collect()  # not to count what an earlier step leaves at this time
        before = core.host_memory_stat_current_value("Allocated", 0)
        for layer in layers:
            h = run(block, h, *layer)
        kept = core.host_memory_stat_current_value("Allocated", 0) - before
        logits = paddle.matmul(h, embedding, transpose_y=True) / WIDTH
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
        tick()
    moved = sum(not bool((a == b).all()) for a, b in zip(at_first, weights, strict=True))
    return Run(losses, moved, len(weights), kept)


RUNS = {
    "without": lambda function, *args: function(*args),
    "paramproxy": paramproxy.recompute,
    "its hook engine": functools.partial(paramproxy.recompute, use_reentrant=False),
    "Paddle's own": paddles_recompute,
}


def main(steps: int = 60) -> dict[str, Run]:
    """Train the model in each way, from the same weights on the same text."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        results = {}
        for name, run in RUNS.items():
            task = progress.add_task(name, total=steps)
            results[name] = train(run, steps, functools.partial(progress.advance, task))
    shown = sorted({0, *range(9, steps, 10), steps - 1})
    table = Table(title=f"Paddle {paddle.__version__}", caption="A guess: ln 32 = 3.466")
    table.add_column("recompute")
    for name in results:
        table.add_column(name, justify="right")
    for step in shown:
        table.add_row(f"loss {step + 1}", *(f"{run.losses[step]:.7f}" for run in results.values()))
    table.add_row("weights moved", *(f"{r.moved} of {r.weights}" for r in results.values()))
    table.add_row("kept in forward", *(f"{r.kept / 2**20:.2f} MiB" for r in results.values()))
    Console().print(table)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model trained by main_grad, and recompute.")
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
