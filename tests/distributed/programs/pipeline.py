"""Paddle's own pipeline schedule (1F1B) over two stages, with paramproxy in Paddle's place.

Its messages go by streams that gloo does not have. In their place stand gloo's own
send and receive, and all else is Paddle's.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication
from ranks import assert_same, data

from paramproxy import patching


STEPS, MICRO_BATCHES, ROWS = 2, 4, 2
SIZES = 8


class Block(paddle.nn.Layer):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = paddle.nn.Linear(SIZES, SIZES)

    def forward(self, x):
        Block.calls += 1
        return x + paddle.tanh(self.linear(x))


def put_on_gloo():
    def send(tensor, group, dst, *_):
        dist.send(tensor, dst=dst, group=group)

    def receive(tensor, group, src, *_):
        dist.recv(tensor, src=src, group=group)

    p2p_communication._send_on_calc_stream = send
    p2p_communication._recv_on_calc_stream = receive
    dist.ParallelEnv._device_id = 0  # which a CPU has none of


def loss_of(output, label):
    return ((output - label) ** 2).mean()


def set_weights(named):
    for index, (_, parameter) in enumerate(named):
        parameter.set_value(data(*parameter.shape, seed=index) * 0.3)


def batch(step):
    return data(MICRO_BATCHES * ROWS, SIZES, seed=100 + step)


def single_process(count):
    """Losses and weights of a training in one process."""
    blocks = paddle.nn.LayerList([Block() for _ in range(count)])
    set_weights(blocks.named_parameters())
    optimizer = paddle.optimizer.SGD(0.1, parameters=blocks.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rows in batch(step).reshape([MICRO_BATCHES, ROWS, SIZES]):
            x = paddle.to_tensor(rows)
            output = x
            for block in blocks:
                output = block(output)
            loss = loss_of(output, x) / MICRO_BATCHES
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total)
    return losses, [parameter.numpy() for parameter in blocks.parameters()]


def main():
    put_on_gloo()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    topology = fleet.get_hybrid_communicate_group()
    assert patching.is_patched()
    count = 4
    losses, weights = single_process(count)
    rank = dist.get_rank()
    # recompute_hybrid under the schedule, for which Paddle's refuses a CPU.
    for offload in (False, True):
        model = PipelineLayer(
            layers=[LayerDesc(Block) for _ in range(count)],
            loss_fn=loss_of,
            topology=topology.topology(),
            recompute_interval=1,
            recompute_ctx={
                "mp_group": topology.get_model_parallel_group(),
                "offload": offload,
                "partition": False,
            },
        )
        own = list(model.parameters())
        for index, parameter in enumerate(own):
            place = len(own) * rank + index
            parameter.set_value(data(*parameter.shape, seed=place) * 0.3)
        pipeline = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(0.1, parameters=model.parameters())
        )
        Block.calls = 0
        for step in range(STEPS):
            x = paddle.to_tensor(batch(step))
            loss = pipeline.train_batch([x, x], optimizer).sum().item()
            assert abs(loss - losses[step]) < 1e-5, (step, loss, losses)
        # The first block of the first stage has no differentiable input: the hook
        # engine takes it, and Paddle's pipeline does not recompute what needs no gradient.
        once = STEPS * MICRO_BATCHES * count // 2
        assert once < Block.calls <= 2 * once, (once, Block.calls)
        expected = dict(enumerate(weights[len(own) * rank : len(own) * (rank + 1)]))
        assert_same(dict(enumerate(w.numpy() for w in own)), expected, f"offload={offload}")
    print("done")


if __name__ == "__main__":
    main()
