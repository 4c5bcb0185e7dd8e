"""`recompute_hybrid`: parts of activations on each rank, gathered again for the replay."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.base import core
from ranks import assert_same, data

from paramproxy import recompute_hybrid


DTYPES = ("float32", "float64", "float16", "int64")


def block(x, w, mask, scale=1.0, **extras):
    y = paddle.matmul(x, w) * scale + mask.cast(x.dtype)
    for extra in extras.values():
        y = y + extra.cast(x.dtype).sum()
    return paddle.tanh(y), mask


def results(group, x, w, mask, **ctx):
    x, w = (paddle.to_tensor(array, stop_gradient=False) for array in (x, w))
    extras = {f"extra_{dtype}": paddle.ones([4], dtype) for dtype in DTYPES}
    h = x * 1.0
    if ctx:
        y, again = recompute_hybrid({"mp_group": group, **ctx}, block, h, w, mask, **extras)
    else:
        y, again = block(h, w, mask, **extras)
    assert again is mask
    (y**2).sum().backward()
    return {"y": y.numpy(), "x": x.grad.numpy(), "w": w.grad.numpy()}


def kept_bytes(group, partition):
    x = paddle.to_tensor(data(512, 512), stop_gradient=False)
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    y = recompute_hybrid({"mp_group": group, "partition": partition}, paddle.tanh, x * 1.0).sum()
    gc.collect()
    held = core.host_memory_stat_current_value("Allocated", 0) - before
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 1 - np.tanh(data(512, 512)) ** 2, atol=1e-5)
    return held


def main():
    dist.init_parallel_env()
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    x, w = data(6, 8), data(8, 8, seed=1)
    mask = paddle.to_tensor(data(8, seed=2) > 0)
    expected = results(group, x, w, mask)
    for partition, offload, use_reentrant in itertools.product((False, True), repeat=3):
        ctx = {"partition": partition, "offload": offload, "use_reentrant": use_reentrant}
        assert_same(results(group, x, w, mask, **ctx), expected, ctx)
        # An odd number of elements can't be shared, and stays whole.
        assert_same(
            results(group, x[:5, :], w, mask, **ctx), results(group, x[:5, :], w, mask), ctx
        )

    whole, parted = kept_bytes(group, False), kept_bytes(group, True)
    assert parted < 0.51 * whole, (whole, parted)

    # Each rank has another activation: no rank may take another's part for its own.
    for use_reentrant in (True, False):
        own = paddle.to_tensor(data(4, 8, seed=rank), stop_gradient=False)
        ctx = {"mp_group": group, "partition": True, "use_reentrant": use_reentrant}
        y = recompute_hybrid(ctx, paddle.tanh, own * 1.0)
        words = "argument 0 was not the same on every rank of mp_group"
        with pytest.raises(OSError, match=words):
            y.sum().backward()
    print("done")


if __name__ == "__main__":
    main()
