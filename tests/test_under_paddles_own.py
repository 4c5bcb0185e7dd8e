"""Paddle's own users of main_grad, unmodified, around and inside a region."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from support import Counted, FusedLinear, param, plain, same, tensor, values

from paramproxy import ParamLeaf, recompute, unwrap
from paramproxy._compat import paddle_version


try:
    from paddle.distributed.fleet.meta_parallel import zero_bubble_utils as zero_bubble
except ImportError:  # it came with Paddle 3.0
    zero_bubble = None

needs_zero_bubble = pytest.mark.skipif(
    zero_bubble is None, reason="this Paddle has no zero_bubble_utils"
)


@needs_zero_bubble
@pytest.mark.parametrize("start", ["no main_grad", "main_grad None", "main_grad zeros"])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_zero_bubble_weight_gradients(start, deferred, bias):
    """`WeightGradStore` computes the weight gradient after backward has returned."""
    store = zero_bubble.WeightGradStore

    def scenario(run):
        x, w = tensor([[1.0, 2.0]]), param([[1.0, 0.5], [3.0, -1.0]])
        b = param([0.5, 0.25]) if bias else None
        if start != "no main_grad":
            w.main_grad = None if start.endswith("None") else paddle.zeros([2, 2])
        store.enabled = deferred
        try:
            region = Counted(lambda a, w, b: zero_bubble.SplitBWMatmul.apply(a, w, b) * a)
            for _ in range(2):
                run(region, x * 1.0, w, b).sum().backward()
                if deferred:
                    store.flush()
                    store.pop()
        finally:
            store.enabled = False
            store.clear()
        main = values(getattr(w, "main_grad", None))
        return main, values(w.grad), values(x.grad), b if b is None else values(b.grad)

    got = same(scenario)
    assert (got[0] is None) == (start == "no main_grad")


@pytest.mark.parametrize("how", ["argument", "tuple", "layer"])
def test_four_steps_of_mix_precision_training_are_bit_equal(how):
    from paddle.distributed.fleet.utils import mix_precision_utils as mix

    class Model(paddle.nn.Layer):
        def __init__(self, run):
            super().__init__()
            self.run = run
            self.w1 = self.create_parameter([4, 8])
            self.w2 = self.create_parameter([8, 4])

        def block(self, x, w1, w2):
            hidden = paddle.nn.functional.dropout(paddle.tanh(paddle.matmul(x, w1)), 0.2)
            return paddle.matmul(hidden, w2)

        def forward(self, x):
            if how == "argument":
                return self.run(self.block, x, self.w1, self.w2)
            if how == "tuple":
                return self.run(lambda x, ws: self.block(x, *ws), x, (self.w1, self.w2))
            return self.run(lambda x: self.block(x, self.w1, self.w2), x)

    def train(run):
        paddle.seed(11)
        model = Model(run)
        wrapped = mix.MixPrecisionLayer(model, dtype="bfloat16")
        optimizer = mix.MixPrecisionOptimizer(
            paddle.optimizer.AdamW(0.01, parameters=wrapped.parameters())
        )
        for _ in range(4):
            x = paddle.rand([3, 4])
            x.stop_gradient = False
            (wrapped(x) - x).square().mean().backward()
            assert model.w1.main_grad.dtype == paddle.float32
            optimizer.step()
            optimizer.clear_grad()
        return [p.numpy().tobytes() for p in model.parameters()]

    assert train(recompute) == train(plain)


def test_the_two_together():
    """A fused layer on a weight whose main_grad Paddle's hook makes otherwise."""
    from paddle.distributed.fleet.utils import mix_precision_utils as mix

    def scenario(run):
        paddle.seed(1)
        layer = paddle.nn.Linear(3, 3)
        wrapped = mix.MixPrecisionLayer(layer, dtype="bfloat16")
        assert wrapped is not layer
        x = tensor(np.ones((2, 3)))
        for _ in range(2):
            run(
                lambda a, w, b: paddle.nn.functional.linear(a, w, b),
                x * 1.0,
                layer.weight,
                layer.bias,
            ).sum().backward()
        return values(layer.weight.main_grad), layer.weight.grad, values(x.grad)

    same(scenario)


@pytest.mark.skipif(paddle_version() < (3, 1), reason="_apply_backward_hook came with Paddle 3.1")
def test_a_reducer_hears_of_a_fused_gradient():
    """A fused backward that returns no gradient tells the reducer by hand."""

    class Fused(FusedLinear):
        @staticmethod
        def backward(ctx, dy):
            gradients = FusedLinear.backward(ctx, dy)
            ctx.saved_tensor()[1]._apply_backward_hook()
            return gradients

    def scenario(run):
        told = []
        w = param([[1.0], [3.0]])
        w.main_grad = paddle.zeros([2, 1])
        w._register_backward_hook(lambda: told.append(values(w.main_grad)))
        run(Fused.apply, tensor([[1.0, 2.0]]) * 1.0, w).sum().backward()
        return told

    told = same(scenario)
    assert told
    assert told[0] == [[1.0], [2.0]]


def test_a_leaf_kept_beyond_the_replay_is_retired():
    w, kept = param([2.0]), []

    def region(a, p):
        kept.append(p)
        return a * p

    recompute(region, tensor([3.0]) * 1.0, w).sum().backward()
    first, leaf = kept
    assert first is w
    assert type(leaf) is ParamLeaf
    assert values(leaf.grad) == values(w.grad) == [3.0]
    leaf.clear_gradient(False)
    assert w.grad is None
    recompute(lambda a, p: a * p, tensor([5.0]) * 1.0, leaf).sum().backward()
    assert values(w.grad) == [5.0]
    assert unwrap(leaf) is w


def test_the_layers_people_use():
    """Blocks of Paddle's own, trained a step, against the same without recompute."""
    blocks = {
        "encoder": lambda: paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2),
        "attention": lambda: paddle.nn.MultiHeadAttention(8, 2, dropout=0.2),
        "lstm": lambda: paddle.nn.LSTM(8, 8),
        "norm": lambda: paddle.nn.LayerNorm(8),
    }

    def scenario(run):
        found = {}
        for name, make in blocks.items():
            paddle.seed(5)
            block = make()
            x = paddle.rand([2, 4, 8])
            x.stop_gradient = False
            y = run(block, x * 1.0)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            found[name] = [x.grad.numpy()] + [p.grad.numpy() for p in block.parameters()]
        return found

    expected, got = scenario(plain), scenario(recompute)
    for name in blocks:
        for want, have in zip(expected[name], got[name], strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6, err_msg=name)
