"""Random programs: what recompute gives is what the plain call gives, whatever is combined.

Each is a list of steps on the tensors made so far, drawn from a seed. Regions
and kept calls contain programs of their own.
"""

from __future__ import annotations

import functools
import random

import attrs
import numpy as np
import paddle
import pytest
from support import Reverse, hooked, param, plain, tensor

from paramproxy import keep, recompute, save_everything, save_ops, save_under


SIZE = 4
functional = paddle.nn.functional


class Square(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a * 0.5

    @staticmethod
    def backward(ctx, dy):
        (a,) = ctx.saved_tensor()
        return dy * a


class Linear(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w, None)
        return paddle.matmul(a, w)

    @staticmethod
    def backward(ctx, dy):
        a, w, _ = ctx.saved_tensor()
        return paddle.matmul(dy, w, transpose_y=True), paddle.matmul(a, dy, transpose_x=True)


OPERATORS = {
    "tanh": lambda a, b, w: paddle.tanh(a),
    "exp": lambda a, b, w: paddle.exp(paddle.clip(a, -1.0, 1.0)),
    "matmul": lambda a, b, w: paddle.matmul(a, w) * 0.3,
    "multiply": lambda a, b, w: a * b * 0.5,
    "add": lambda a, b, w: a + b,
    "transpose": lambda a, b, w: a.transpose([1, 0]),
    "slices": lambda a, b, w: paddle.concat([a[1:], b[:1]], axis=0),
    "dropout": lambda a, b, w: functional.dropout(a, 0.3),
    "square": lambda a, b, w: Square.apply(a),
    "linear": lambda a, b, w: Linear.apply(a, w) * 0.3,
    "reverse": lambda a, b, w: Reverse.apply(a * 1.0),
    "in place": lambda a, b, w: (a + 1.0).add_(b * 0.1),
    "relu in place": lambda a, b, w: functional.relu_(a * 1.0) + b * 0.1,
    "mean of both": lambda a, b, w: paddle.stack([a, b]).mean(axis=0),
    "layer norm": lambda a, b, w: functional.layer_norm(a, [SIZE]),
    "softmax": lambda a, b, w: functional.softmax(a),
    "gelu": lambda a, b, w: functional.gelu(a),
    "random": lambda a, b, w: a * paddle.rand([SIZE, SIZE]),
    "where": lambda a, b, w: paddle.where(a > 0, a, b * 0.5),
}
POLICIES = [None, save_ops("tanh", "matmul", "Square"), save_under(65), save_everything]


@attrs.frozen
class Step:
    name: str
    one: int
    other: int
    weight: int
    inside: list[Step]


def draw(rng, depth, steps):
    """A program."""
    names = [*OPERATORS, *(["region", "kept"] * 3 if depth else [])]
    program = []
    for _ in range(steps):
        name = rng.choice(names)
        inside = draw(rng, depth - 1, rng.randrange(1, 5)) if name in ("region", "kept") else []
        program.append(Step(name, rng.randrange(99), rng.randrange(99), rng.randrange(2), inside))
    return program


@attrs.frozen
class Machine:
    """Runs programs with this `recompute`, or one of these, and this `keep`."""

    runs: list
    keep: object

    def execute(self, program, tensors, weights):
        made = list(tensors)
        for step in program:
            a, b = made[step.one % len(made)], made[step.other % len(made)]
            inner = functools.partial(self.execute, step.inside)
            if step.name in OPERATORS:
                new = OPERATORS[step.name](a, b, weights[step.weight])
            elif step.name == "region":
                new = self.region(step, inner, a, b, weights)
            elif step.weight:
                new = self.keep(lambda q, u, f=inner: f([q, u], weights), a, b) * 0.8
            else:
                new = self.keep(lambda f=inner, a=a, b=b: f([a, b], weights)) * 0.8
            made.append(new)
        return made[-1]

    def region(self, step, inner, a, b, weights):
        run = self.runs[step.one % len(self.runs)]
        if run is hooked:
            run = functools.partial(run, policy=POLICIES[step.other % len(POLICIES)])
        if step.weight:
            return run(lambda d, *ws: inner([d["a"], b], list(ws)), {"a": a}, *weights) * 0.7
        return run(lambda q: inner([q, b], weights), a) * 0.7


def outcome(seed, runs, kept):
    """Result, gradients and the stream afterwards, of the program of a seed."""
    rng, values = random.Random(seed), np.random.RandomState(seed)
    program = draw(rng, 2, rng.randrange(2, 9))
    paddle.seed(seed)
    x, u = (tensor(values.randn(SIZE, SIZE)) for _ in range(2))
    weights = [param(values.randn(SIZE, SIZE) * 0.5) for _ in range(2)]
    machine = Machine(runs, kept)
    top = runs[seed % len(runs)]
    y = top(lambda a, b: machine.execute(program, [a, b], weights), x * 1.0, u * 1.0)
    y.sum().backward()
    grads = [np.zeros([SIZE, SIZE]) if t.grad is None else t.grad.numpy() for t in (x, u, *weights)]
    return [y.numpy(), *grads, paddle.rand([2]).numpy()]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(
    "runs", [[recompute], [hooked], [recompute, hooked]], ids=["reentrant", "hooks", "both"]
)
def test_a_random_program(seed, runs):
    expected = outcome(seed, [plain], lambda f, *a: f(*a))
    for got, wanted in zip(outcome(seed, runs, keep), expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
