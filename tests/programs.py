"""Random programs: what they are made of, and how they are run with and without recompute.

A program is a list of steps on the tensors made so far. A step is an operation, or
a call of a function that is a program of its own: recomputed, kept, or plain.
`strategies.py` draws them, `test_programs.py` runs them.
"""

from __future__ import annotations

import contextlib
import functools
import random

import attrs
import numpy as np
import optree
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from support import Reverse, amp, hooked, param, plain, tensor

import paramproxy
from paramproxy import ParamView, keep, recompute, save_everything, save_ops, save_under
from paramproxy._compat import tracer


SIZE = 4
functional = paddle.nn.functional


def wanted(*tensors):
    """Which of them need a gradient: Paddle refuses one for any other."""
    return [not tensor.stop_gradient for tensor in tensors]


class FusedLinear(paddle.autograd.PyLayer):
    """Adds the weight's gradient to its main_grad, and returns none for it."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        ctx.wanted = wanted(a, w)
        return paddle.matmul(a, w)

    @staticmethod
    def backward(ctx, dy):
        a, w = ctx.saved_tensor()
        if ctx.wanted[1]:
            w.main_grad.add_(paddle.matmul(a, dy, transpose_x=True))
            if bool((dy != 0).any()):  # zeros may come where plain autograd sends nothing
                w.hits = getattr(w, "hits", 0) + 1
        return paddle.matmul(dy, w, transpose_y=True) if ctx.wanted[0] else None, None


class Square(paddle.autograd.PyLayer):
    """Reads what it has saved twice, as one that guards it first does."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a * 0.5

    @staticmethod
    def backward(ctx, dy):
        assert ctx.saved_tensor()[0].shape == dy.shape
        (a,) = ctx.saved_tensor()
        return dy * a


class Linear(paddle.autograd.PyLayer):
    """With a bias that is absent."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w, None)
        ctx.wanted = wanted(a, w)
        return paddle.matmul(a, w)

    @staticmethod
    def backward(ctx, dy):
        a, w, _ = ctx.saved_tensor()
        da, dw = paddle.matmul(dy, w, transpose_y=True), paddle.matmul(a, dy, transpose_x=True)
        return da if ctx.wanted[0] else None, dw if ctx.wanted[1] else None


class Halves(paddle.autograd.PyLayer):
    """Two outputs, of which one may never get a gradient."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.wanted = wanted(a, b)
        return a * 0.5, b * 0.5

    @staticmethod
    def backward(ctx, da, db):
        return da * 0.5 if ctx.wanted[0] else None, db * 0.5 if ctx.wanted[1] else None


class Statistics(paddle.nn.Layer):
    """Buffers that every call writes and reads: a moving average, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", paddle.zeros([SIZE], "float64"))
        self.norm = paddle.nn.BatchNorm1D(SIZE)
        self.norm.to(dtype="float64")

    def forward(self, a):
        with paddle.no_grad():
            self.average.scale_(0.5).add_(a.mean(axis=0))
        return a + self.average * 0.1


def attention(a, b, w):
    scores = paddle.matmul(paddle.matmul(a, w), b, transpose_y=True) * 0.5
    return paddle.matmul(functional.softmax(scores), b)


def in_place_on_a_view(a, b):
    y = a * 1.0
    y[1:3] = b[1:3] * 0.5
    return y


def in_place_at_the_end(a, b):
    return (a + 1.0).add_(b * 0.1).scale_(0.5)


def rows_of_the_largest(a, b):
    return paddle.gather(b, paddle.argmax(a, axis=-1)) + a * 0.1


def with_amp_level(a):
    """Other values under AMP, which itself changes none on a CPU."""
    level = int(tracer()._amp_level)
    return a * (1.0 + 0.25 * level)


def without_grad(a, b):
    with paddle.no_grad():
        scale = b.mean()
    return a * scale


OPERATIONS = {
    "tanh": lambda a, b, w, s: paddle.tanh(a),
    "exp": lambda a, b, w, s: paddle.exp(paddle.clip(a, -1.0, 1.0)),
    "matmul": lambda a, b, w, s: paddle.matmul(a, w) * 0.3,
    "multiply": lambda a, b, w, s: a * b * 0.5,
    "add": lambda a, b, w, s: a + b,
    "transpose": lambda a, b, w, s: a.transpose([1, 0]),
    "reshape": lambda a, b, w, s: a.reshape([2, 8]).reshape([SIZE, SIZE]) + b.reshape([16])[:4],
    "concat and slices": lambda a, b, w, s: paddle.concat([a[1:], b[:1]], axis=0),
    "parts": lambda a, b, w, s: paddle.add(*paddle.unbind(a.reshape([2, 2, 4]))).tile([2, 1]),
    "attention": lambda a, b, w, s: attention(a, b, w),
    "layer norm": lambda a, b, w, s: functional.layer_norm(a, [SIZE], w[0], w[1]),
    "dropout": lambda a, b, w, s: functional.dropout(a, 0.3),
    "random": lambda a, b, w, s: a * paddle.rand([SIZE, SIZE], "float64"),
    "numpy's random": lambda a, b, w, s: a * float(np.random.randn()),
    "Python's random": lambda a, b, w, s: a + random.gauss(0.0, 1.0),
    "fused linear": lambda a, b, w, s: FusedLinear.apply(a, w) * 0.3,
    "linear": lambda a, b, w, s: Linear.apply(a, w) * 0.3,
    "square": lambda a, b, w, s: Square.apply(a),
    "reverse": lambda a, b, w, s: Reverse.apply(a * 1.0),
    "first half": lambda a, b, w, s: Halves.apply(a, b)[0],
    "in place on a view": lambda a, b, w, s: in_place_on_a_view(a, b),
    "in place at the end": lambda a, b, w, s: in_place_at_the_end(a, b),
    "relu in place": lambda a, b, w, s: functional.relu_(a * 1.0) + b * 0.1,
    "rows of the largest": lambda a, b, w, s: rows_of_the_largest(a, b),
    "where": lambda a, b, w, s: paddle.where(a > 0, a, b * 0.5),
    "mean of both": lambda a, b, w, s: paddle.stack([a, b]).mean(axis=0),
    "cut off": lambda a, b, w, s: a.detach() * 0.5 + b,
    "without grad": lambda a, b, w, s: without_grad(a, b),
    "amp level": lambda a, b, w, s: with_amp_level(a),
    "moving average": lambda a, b, w, s: s(a),
    "read of the average": lambda a, b, w, s: a * (s.average.clone() + 1.0),
    "batch norm": lambda a, b, w, s: s.norm(a),
}


# How a function is called with two tensors and some weights.


def _positional(run, body, a, b, weights):
    return run(lambda q, r, *ws: body(q, r, list(ws)), a, b, *weights)


def _keywords(run, body, a, b, weights):
    def function(q, *, r, **ws):
        return body(q, r, list(ws.values()))

    return run(function, a, r=b, **{f"w{i}": w for i, w in enumerate(weights)})


def _containers(run, body, a, b, weights):
    def function(tensors, ws, nothing=None):
        return body(tensors["a"], tensors["more"][0], list(ws))

    return run(function, {"a": a, "more": [b, 3, None]}, tuple(weights), nothing=None)


def _captured(run, body, a, b, weights):
    return run(lambda q: body(q, b, weights), a)


def _nothing_passed(run, body, a, b, weights):
    return run(lambda: body(a, b, weights))


def _partial(run, body, a, b, weights):
    return run(functools.partial(lambda r, ws, q: body(q, r, ws), b, list(weights)), a)


def _twice_the_same(run, body, a, b, weights):
    return run(lambda q, r, p, ws, w: body(q + p * 0.5, r, [*ws, w]), a, b, a, weights, weights[0])


def _view(weight):
    """Of a parameter. In a replay of a region around it may be a leaf, which stays one."""
    return ParamView(weight) if type(weight) is EagerParamBase else weight


def is_recompute(run):
    return run is recompute or (isinstance(run, functools.partial) and is_recompute(run.func))


def _views(run, body, a, b, weights):
    # A plain call would leave the gradients on the leaves of the views.
    passed = map(_view, weights) if is_recompute(run) else weights
    return run(lambda q, r, *ws: body(q, r, list(ws)), a, b, *passed)


class _Owner:
    def __init__(self, body, weights):
        self.body, self.weights = body, weights

    def call(self, q, r):
        return self.body(q, r, self.weights)


def _method(run, body, a, b, weights):
    return run(_Owner(body, weights).call, a, b)


class _Layer(paddle.nn.Layer):
    def __init__(self, body, weights):
        super().__init__()
        self.body = body
        for index, weight in enumerate(weights):
            self.add_parameter(f"w{index}", weight)

    def forward(self, q, r):
        return self.body(q, r, [getattr(self, name) for name in self._parameters])


def _layer(run, body, a, b, weights):
    return run(_Layer(body, weights), a, b)


FORMS = {
    "positional": _positional,
    "keywords": _keywords,
    "containers": _containers,
    "captured": _captured,
    "nothing passed": _nothing_passed,
    "partial": _partial,
    "twice the same": _twice_the_same,
    "views": _views,
    "method": _method,
    "layer": _layer,
}

# What a function returns, of the last two tensors that it has made, and what its
# caller makes of that.
RESULTS = {
    "one": (lambda y, z: y, lambda r: r),
    "tuple": (lambda y, z: (y, z * 1.0), lambda r: r[0] + r[1] * 0.5),
    "one unused": (lambda y, z: (z * 1.0, y), lambda r: r[1]),
    "dict": (
        lambda y, z: {"y": y, "count": 3, "none": None, "more": [z * 0.5, "text"]},
        lambda r: r["y"] * r["count"] * 0.3 + r["more"][0],
    ),
    "mask": (lambda y, z: (y, z > 0), lambda r: paddle.where(r[1], r[0], r[0] * 0.5)),
    "integers": (
        lambda y, z: (paddle.argmax(z, axis=-1), y),
        lambda r: paddle.gather(r[1], r[0]) + r[1],
    ),
    "cut off": (lambda y, z: (y, z.detach() * 2.0), lambda r: r[0] + r[1] * 0.1),
    "twice": (lambda y, z: [y, {"again": y}], lambda r: r[0] + r[1]["again"] * 0.5),
}
FLAGS_UNKNOWN = ("cut off",)
"""The first run of the reentrant engine can't know that one of these needs no gradient."""

POLICIES = {
    "none": None,
    "some ops": save_ops("tanh", "matmul", "Square"),
    "small ones": save_under(129),
    "all": save_everything,
}
ENGINES = {"reentrant": recompute, "hooks": hooked, "plain": plain}


@attrs.frozen
class Operation:
    """On two of the tensors made so far, and one of the weights."""

    name: str
    a: int
    b: int
    w: int


ONCE_ONLY = (
    *("attention", "concat and slices", "dropout", "exp", "in place on a view"),
    *("layer norm", "mean of both", "rows of the largest", "where"),
)
"""Of which one Paddle or another has no second gradient."""
PYLAYERS = ("fused linear", "linear", "square", "reverse", "first half")
"""Through which a second backward crashes Paddle."""


@attrs.frozen
class Call:
    """Of a function.

    Attributes:
        kind: "region" or "kept".
        engine: That of a region.
        policy: That of a region of the hook engine.
        form: How it is called.
        result: What it returns.
        amp: The level of `auto_cast` around it.
        a: Which tensor it is called with.
        b: Which other one.
        weights: How many of the weights, from the first on.
        body: What it does.
    """

    kind: str
    engine: str
    policy: str
    form: str
    result: str
    amp: str
    a: int
    b: int
    weights: int
    body: list[Operation | Call]


@attrs.frozen
class Program:
    """What is trained for some steps.

    Attributes:
        steps: What makes the loss.
        trained: Of each input and each weight whether it is.
        rounds: How many forwards and backwards.
        backwards: How many backwards each.
        last: How the last one is run: "backward", by `paddle.grad` ("grad"), or as a
            gradient penalty, backward through a backward ("penalty").
        seed: Of all values.
    """

    steps: list[Operation | Call]
    trained: tuple[bool, ...]
    rounds: int = 1
    backwards: int = 1
    last: str = "backward"
    seed: int = 1


WEIGHTS = 3


@attrs.frozen
class Machine:
    """Runs programs: with recompute, or each call as it is.

    Attributes:
        recomputes: Whether it does.
        outputs: Dtype and shape of each tensor that a call has returned.
        flags: Its stop_gradient, of the outermost calls: in others nothing may be recorded.
    """

    recomputes: bool
    outputs: list = attrs.field(factory=list)
    flags: list = attrs.field(factory=list)

    def execute(self, steps, made, weights, statistics, *, is_outermost=False):
        for step in steps:
            a, b = made[step.a % len(made)], made[step.b % len(made)]
            if isinstance(step, Operation):
                w = weights[step.w % len(weights)]
                new = OPERATIONS[step.name](a, b, w, statistics)
            else:
                new = self.call(step, a, b, weights, statistics, is_outermost=is_outermost)
            made = [*made, new]
        return made

    def call(self, step, a, b, weights, statistics, *, is_outermost):
        make, use = RESULTS[step.result]
        machine = self

        def body(q, r, ws):
            made = machine.execute(step.body, [q, r], ws, statistics)
            return make(made[-1], made[-2])

        with self.within(step.amp):
            result = FORMS[step.form](self.run(step), body, a, b, weights[: step.weights])
        tensors = [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, paddle.Tensor)]
        if not paramproxy.is_recomputing():
            self.outputs.extend((str(t.dtype), tuple(t.shape)) for t in tensors)
        if is_outermost:
            self.flags.extend(t.stop_gradient for t in tensors)
        return use(result) * 0.7

    def run(self, step):
        if not self.recomputes:
            return plain
        if step.kind == "kept":
            return keep
        run = ENGINES[step.engine]
        policy = POLICIES[step.policy]
        return run if policy is None else functools.partial(run, policy=policy)

    @staticmethod
    def within(level):
        if level == "O0":
            return contextlib.nullcontext()
        return amp(getattr(core.AmpLevel, level), "bfloat16")


def outcome(program, recomputes):
    """Everything that a program leaves behind, by name."""
    values = np.random.RandomState(program.seed)
    paddle.seed(program.seed)
    np.random.seed(program.seed)
    random.seed(program.seed)
    trained = iter(program.trained)
    inputs = [tensor(values.randn(SIZE, SIZE), next(trained), "float64") for _ in range(2)]
    weights = [
        param(values.randn(SIZE, SIZE) * 0.5, next(trained), "float64") for _ in range(WEIGHTS)
    ]
    for weight in weights:
        weight.main_grad = paddle.zeros([SIZE, SIZE], "float64")
    called = []
    for name, leaf in zip("xuabc", [*inputs, *weights]):
        if not leaf.stop_gradient:
            leaf.register_hook(functools.partial(_note, called, name))
    statistics = Statistics()
    found = {}
    for round_ in range(program.rounds):
        machine = Machine(recomputes)
        made = [leaf * 1.0 for leaf in inputs]
        made = machine.execute(program.steps, made, weights, statistics, is_outermost=True)
        y, z = made[-1], made[-2]
        loss = (y + z * 0.5).sum()
        found[f"output {round_}"] = y, z
        found[f"outputs of calls {round_}"] = machine.outputs
        found[f"flags {round_}"] = [*machine.flags, y.stop_gradient, z.stop_gradient]
        if not loss.stop_gradient:
            for time in range(program.backwards - 1):
                loss.backward(retain_graph=True)
                found[f"streams {round_}.{time}"] = paddle.rand([2])
            wanted = [t for t in (*inputs, *weights) if not t.stop_gradient]
            if program.last == "backward" or not wanted:
                loss.backward()
            else:
                is_penalty = program.last == "penalty"
                grads = paddle.grad(loss, wanted, create_graph=is_penalty, allow_unused=True)
                found[f"grad {round_}"] = grads
                none = paddle.zeros([], "float64")
                penalty = sum(((g * g).sum() for g in grads if g is not None), none)
                if is_penalty and not penalty.stop_gradient:
                    penalty.backward()
    for name, leaf in zip("xuabc", [*inputs, *weights]):
        found[f"gradient of {name}"] = leaf.grad
    found["main_grads"] = [weight.main_grad for weight in weights]
    found["hits"] = [getattr(weight, "hits", 0) for weight in weights]
    found["hooks called"] = sorted(called)
    found["buffers"] = list(statistics.buffers())
    found["streams"] = paddle.rand([2]), np.random.rand(), random.random()
    found["kept second of a pair"] = np.random.randn(), random.gauss(0.0, 1.0)
    found["modes"] = paddle.is_grad_enabled(), paramproxy.is_recomputing()
    return {name: _read(value) for name, value in found.items()}


def _note(called, name, gradient):
    """A gradient hook. Where nothing comes, the reentrant engine may call it all the same.

    With None, or on Paddle 2.6 with an empty tensor.
    """
    if gradient is not None and gradient._is_initialized() and bool((gradient != 0).any()):
        called.append(name)


def _read(value):
    if isinstance(value, paddle.Tensor):
        return value.numpy()
    if isinstance(value, (list, tuple)):
        return [_read(item) for item in value]
    return value


def differences(got, wanted, *, exact):
    """The names of what is not the same.

    Args:
        got: One outcome.
        wanted: The other.
        exact: Whether every bit has to be. Otherwise gradients may have been added
            up in another order, and zeros may stand for none.
    """
    return [
        name
        for name in wanted
        if not (
            _lose_no_gradient(got[name], wanted[name])
            if name.startswith("flags") and not exact
            else _same(got[name], wanted[name], exact)
        )
    ]


def _lose_no_gradient(got, wanted):
    """Whether every output that needs a gradient is known to."""
    return len(got) == len(wanted) and not any(g and not w for g, w in zip(got, wanted))


def _same(one, other, exact):
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b, exact) for a, b in zip(one, other))
    if not exact and (one is None) != (other is None):
        return not np.any(one if other is None else other)
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return one is other if one is None or other is None else one == other
    if exact:
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(np.allclose(one, other, rtol=1e-9, atol=1e-11, equal_nan=True))
