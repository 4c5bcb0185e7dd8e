"""Optimizer state shared out over two ranks (stage 1), with recomputed blocks."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from ranks import ENGINES, assert_same, data, plain, seeded


STEPS = 3


class Net(paddle.nn.Layer):
    def __init__(self, run):
        super().__init__()
        self.embedding = paddle.nn.Linear(8, 8)
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(8, 8) for _ in range(2)])
        self.run = run

    def forward(self, x):
        x = self.embedding(x)
        for layer in (*self.layers, self.layers[0]):  # which is shared by two regions
            x = self.run(lambda x, layer=layer: paddle.tanh(layer(x)), x)
            x = self.run(paddle.nn.functional.linear, x, layer.weight, layer.bias)
        return x


def trained(net, model, optimizer, batches):
    for batch in batches:
        (model(paddle.to_tensor(batch)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return {name: parameter.numpy() for name, parameter in net.named_parameters()}


def main():
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": 1,
        "mp_degree": 1,
        "pp_degree": 1,
        "sharding_degree": 2,
    }
    fleet.init(is_collective=True, strategy=strategy)
    rank = dist.get_rank()
    batches = [data(4, 8, seed=step) for step in range(STEPS)]
    single = seeded(Net, plain)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=single.parameters())
    expected = trained(single, single, optimizer, batches)
    own = [batch[2 * rank : 2 * rank + 2] for batch in batches]
    for name, run in ENGINES.items():
        net = seeded(Net, run)
        optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(optimizer)
        assert_same(trained(net, model, optimizer, own), expected, name, atol=1e-5)
    print("done")


if __name__ == "__main__":
    main()
