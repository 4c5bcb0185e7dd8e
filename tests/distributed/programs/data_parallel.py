"""DataParallel: the gradients of one process on the whole batch, in both engines.

Weights passed and captured, of one region and shared by two, in one backward and in
several under `no_sync`.
"""

from __future__ import annotations

import itertools

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from ranks import ENGINES, Calls, assert_same, data, gradients, plain, seeded


class Net(paddle.nn.Layer):
    def __init__(self, run, shared, passed):
        super().__init__()
        self.first, self.last = paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8)
        self.embedding = paddle.nn.Linear(8, 8)
        self.run, self.passed = run, passed
        self.layers = [self.first, self.first if shared else self.last]
        self.calls = Calls(paddle.nn.functional.linear)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            if self.passed:
                x = self.run(lambda *args: paddle.tanh(self.calls(*args)), x, *layer.parameters())
            else:
                x = self.run(lambda x, layer=layer: paddle.tanh(self.through(layer, x)), x)
        return x

    def through(self, layer, x):
        return self.calls(x, layer.weight, layer.bias)


def loss_of(net, x):
    return (net(x) ** 2).mean()


def main():
    dist.init_parallel_env()
    rank = dist.get_rank()
    batches = [data(4, 8, seed=seed) for seed in range(3)]
    own = [paddle.to_tensor(batch[2 * rank : 2 * rank + 2]) for batch in batches]
    for shared, passed, (name, run) in itertools.product(
        (False, True), (False, True), ENGINES.items()
    ):
        what = f"shared={shared} passed={passed} {name}"
        single = seeded(Net, plain, shared, passed)
        loss_of(single, paddle.to_tensor(batches[0])).backward()
        expected = gradients(single)
        net = paddle.DataParallel(seeded(Net, run, shared, passed), find_unused_parameters=shared)
        for _ in range(2):  # a second step finds the reducer as the first did
            net.clear_gradients()
            net._layers.calls.count = 0
            loss_of(net, own[0]).backward()
            assert net._layers.calls.count == 4, what
            assert_same(gradients(net), expected, what)

        # Gradient accumulation, the reducer silent but for the last backward.
        single.clear_gradients()
        for batch in batches:
            loss_of(single, paddle.to_tensor(batch)).backward()
        expected = gradients(single)
        net.clear_gradients()
        with net.no_sync():
            for batch in own[:-1]:
                loss_of(net, batch).backward()
        loss_of(net, own[-1]).backward()
        assert_same(gradients(net), expected, f"{what} accumulated")

        # Paddle's recipe for recompute: no reducer at all, one sum in the end.
        net.clear_gradients()
        with net.no_sync():
            for batch in own:
                loss_of(net, batch).backward()
        fused_allreduce_gradients(list(net.parameters()), None)
        assert_same(gradients(net), expected, f"{what} summed in the end")
    print("done")


if __name__ == "__main__":
    main()
