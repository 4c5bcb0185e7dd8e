"""Paddle's tensor-parallel layers with dropout from its RNG tracker, recomputed.

Their collectives have no CPU kernel. In their place stand the same on gloo, and all
else is Paddle's own.
"""

from __future__ import annotations

import functools

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_rng_state_tracker,
)
from ranks import ENGINES, Calls, assert_same, data, gradients, plain

from paramproxy import recompute_hybrid


class Identity(paddle.autograd.PyLayer):
    """Gives its input on; sums the gradients of the ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient


class Sum(paddle.autograd.PyLayer):
    """Sums over the ranks; gives the gradient on."""

    @staticmethod
    def forward(ctx, tensor, group):
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


def put_on_gloo():
    mp_ops._c_identity = lambda tensor, group=None, *_, **__: Identity.apply(tensor, group)
    mp_ops._mp_allreduce = lambda tensor, op=None, group=None, *_, **__: Sum.apply(tensor, group)


class Block(paddle.nn.Layer):
    """An MLP over two ranks: one dropout differs by rank, the other does not."""

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, gather_output=False, has_bias=True)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True, has_bias=True)

    def forward(self, x):
        h = paddle.tanh(self.up(x))
        with get_rng_state_tracker().rng_state("local_seed"):
            h = paddle.nn.functional.dropout(h, 0.5)
        with get_rng_state_tracker().rng_state("global_seed"):
            return x + paddle.nn.functional.dropout(self.down(h), 0.5)


class Net(paddle.nn.Layer):
    def __init__(self, run):
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block() for _ in range(3)])
        self.calls = [Calls(block) for block in self.blocks]
        self.run = run

    def forward(self, x):
        for call in self.calls:
            x = self.run(call, x)
        return x


def seed(rank):
    paddle.seed(100 + rank)
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add("global_seed", 1)
    tracker.add("local_seed", 2 + rank)
    tracker.add("model_parallel_rng", 4 + rank)  # of Paddle's, for weights


def trained(run, rank, steps=2):
    """Outputs and gradients of a few steps, and where all streams stand in the end."""
    seed(rank)
    net = Net(run)
    for index, parameter in enumerate(net.parameters()):
        is_split = len(parameter.shape) == 2 or parameter.is_distributed
        parameter.set_value(data(*parameter.shape, seed=10 * index + rank * is_split) * 0.3)
    seed(rank)
    seen = {}
    for step in range(steps):
        x = paddle.to_tensor(data(4, 8, seed=step), stop_gradient=False)
        y = net(x * 1.0)
        (y**2).mean().backward()
        seen[f"output of step {step}"] = y.numpy()
        seen[f"gradient of x in step {step}"] = x.grad.numpy()
    with get_rng_state_tracker().rng_state("local_seed"):
        seen["what is drawn next"] = paddle.rand([4]).numpy()
    return {**seen, **gradients(net)}, sum(call.count for call in net.calls)


def main():
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    put_on_gloo()
    rank = dist.get_rank()
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    expected, once = trained(plain, rank)
    assert once == 6
    runs = dict(ENGINES)
    for use_reentrant in (True, False):
        for partition in (False, True):
            for offload in (False, True):
                ctx = {
                    "mp_group": group,
                    "offload": offload,
                    "partition": partition,
                    "use_reentrant": use_reentrant,
                }
                runs[f"hybrid {ctx}"] = functools.partial(recompute_hybrid, ctx)
    for name, run in runs.items():
        got, calls = trained(run, rank)
        assert_same(got, expected, name)
        assert calls == 12, (name, calls)
    print("done")


if __name__ == "__main__":
    main()
