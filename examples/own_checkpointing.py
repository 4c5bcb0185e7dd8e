"""Three pieces of checkpointing that training stacks write by hand, on what paramproxy gives.

1. A fused head and loss: its gradients are computed in forward, a chunk of tokens at a time, so
   that the logits of all tokens are never there together. On `ParamView`.
2. A recompute without output: what a cheap function returned is freed after its last use in
   forward, and filled again when the gradient of that use arrives. On `detach` and `grads`.
3. A manual backward: a forward that hands over its backward, to be called when it suits a
   schedule. On `detach` and `grads`.

Each is given parameters, which have to stay parameters, and is compared with the plain program.

    python examples/own_checkpointing.py [--steps 5]
"""

from __future__ import annotations

import argparse

import attrs
import numpy as np
import paddle
from fused_main_grad import FusedLinear
from paddle.base import core
from paddle.nn import functional as F  # noqa: N812
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paramproxy import ParamView, detach, grads


TOKENS, WIDTH, VOCABULARY, CHUNK = 512, 128, 4096, 64


class ChunkedLoss(paddle.autograd.PyLayer):
    """The mean cross entropy of `hidden @ weight`."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        view, losses, hidden_grads = ParamView(weight), [], []
        for start in range(0, len(hidden), CHUNK):
            chunk = hidden[start : start + CHUNK].detach()
            chunk.stop_gradient = False
            with paddle.set_grad_enabled(True):
                logits = paddle.matmul(chunk, view.leaf)
                loss = F.cross_entropy(logits, labels[start : start + CHUNK], reduction="sum")
                loss = loss / len(hidden)
            loss.backward()  # adds to view.leaf_grad, and leaves weight.grad alone
            losses.append(loss.detach())
            hidden_grads.append(chunk.grad)
        ctx.gradients = paddle.concat(hidden_grads), view.leaf_grad
        return paddle.add_n(losses)

    @staticmethod
    def backward(ctx, dy):
        hidden_grad, weight_grad = ctx.gradients
        return hidden_grad * dy, weight_grad * dy, None


class WithoutOutput:
    """A call whose result does not wait for backward. It draws no random numbers.

    Call `free(user)` after the last use of the result in forward, with what was computed from
    it: the gradient of `user` arrives just before its own backward needs the result.
    """

    def __call__(self, function, *args):
        self.function, self.args = function, args
        self.output = _WithoutOutput.apply(self, *args)
        return self.output

    def free(self, user):
        self.output._clear_data()
        user.register_hook(self._fill)

    def _fill(self, _gradient):
        self.inputs = detach(self.args)
        with paddle.set_grad_enabled(True):
            self.again = self.function(*self.inputs)
        self.again._share_buffer_to(self.output)
        self.output = None  # its graph holds this object


class _WithoutOutput(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, call, *args):
        ctx.call = call
        return call.function(*args)

    @staticmethod
    def backward(ctx, dy):
        paddle.autograd.backward([ctx.call.again], [dy])
        return grads(ctx.call.inputs)


def manual_backward(function, *args):
    """What `function(*args)` gives, and a function from its gradient to those of `args`."""
    inputs = detach(args)
    with paddle.set_grad_enabled(True):
        output = function(*inputs)

    def backward(dy):
        paddle.autograd.backward([output], [dy])
        return grads(inputs)

    return detach(output), backward


class TwoStages(paddle.autograd.PyLayer):
    """`last(first(x, a), b)`. A pipeline would send or receive between the stages."""

    @staticmethod
    def forward(ctx, first, last, x, a, b):
        h, ctx.first = manual_backward(first, x, a)
        y, ctx.last = manual_backward(last, h, b)
        return y

    @staticmethod
    def backward(ctx, dy):
        dh, db = ctx.last(dy)
        dx, da = ctx.first(dh)
        return dx, da, db


def head(own, hidden, labels, weight):
    """A loss over a vocabulary."""
    if own:
        return ChunkedLoss.apply(hidden, weight, labels)
    return F.cross_entropy(paddle.matmul(hidden, weight), labels)


def norm(x, scale):
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def normed(own, x, labels, scale, weight):
    """A normalized input of a linear layer."""
    call = WithoutOutput()
    y = call(norm, x, scale) if own else norm(x, scale)
    z = paddle.matmul(y, weight)
    if own:
        call.free(z)
    return z.square().mean()


def stages(own, x, labels, a, b):
    """Two fused linear layers, with gradients in `main_grad`."""

    def first(x, a):
        return F.gelu(FusedLinear.apply(x, a))

    if own:
        y = TwoStages.apply(first, FusedLinear.apply, x, a, b)
    else:
        y = FusedLinear.apply(first(x, a), b)
    return y.square().mean()


@attrs.frozen
class Result:
    """The largest relative error of a gradient, and the bytes kept for backward."""

    error: float
    kept: int
    kept_plain: int


def gradients(piece, own, shapes, seed):
    """The gradients of one step of a piece, and the bytes that it kept for backward."""
    stream = np.random.RandomState(seed)
    x = paddle.to_tensor(stream.randn(TOKENS, WIDTH).astype("float32"), stop_gradient=False)
    labels = paddle.to_tensor(stream.randint(0, VOCABULARY, TOKENS))
    weights = [paddle.create_parameter(shape, "float32") for shape in shapes]
    for weight in weights:
        weight.set_value(stream.randn(*weight.shape).astype("float32") * 0.1)
    before = core.host_memory_stat_current_value("Allocated", 0)
    loss = piece(own, x, labels, *weights)
    kept = core.host_memory_stat_current_value("Allocated", 0) - before
    loss.backward()
    return [x.grad, *(w.grad if w.grad is not None else w.main_grad for w in weights)], kept


PIECES = {
    "fused head and loss": (head, [[WIDTH, VOCABULARY]]),
    "recompute without output": (normed, [[WIDTH], [WIDTH, WIDTH]]),
    "manual backward": (stages, [[WIDTH, 4 * WIDTH], [4 * WIDTH, WIDTH]]),
}


def main(steps: int = 5) -> dict[str, Result]:
    """Compare each piece with the plain program, on other numbers in each step."""
    console, results = Console(stderr=True), {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, (piece, shapes) in PIECES.items():
            errors = []
            for seed in progress.track(range(steps), description=name):
                plain, kept_plain = gradients(piece, False, shapes, seed)
                own, kept = gradients(piece, True, shapes, seed)
                errors += [float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, plain)]
            results[name] = Result(max(errors), kept, kept_plain)
    table = Table(
        title=f"Paddle {paddle.__version__}", caption="A sum in chunks is rounded otherwise"
    )
    for title in ("", "largest error", "kept for backward", "plain"):
        table.add_column(title, justify="right" if title else "left")
    for name, result in results.items():
        sizes = [f"{size / 2**20:.2f} MiB" for size in (result.kept, result.kept_plain)]
        table.add_row(name, f"{result.error:.1e}", *sizes)
    Console().print(table)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Checkpointing code of one's own, compared.")
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args().steps)
