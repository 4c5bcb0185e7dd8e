"""Paddle's own fp32 main_grad machinery on a PaddleFormers llama, recomputed under the patch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import (
    SplitBWMatmul,
    WeightGradStore,
)
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.mix_precision_utils import (
    MixPrecisionLayer,
    MixPrecisionOptimizer,
)
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
from test_paddleformers import RECOMPUTE, SIZES
from training import STEPS, VOCABULARY, loss_of, set_weights


class SplitMLP(paddle.nn.Layer):
    """A llama MLP whose matmuls leave the weight gradient to `SplitBWMatmul`.

    Recomputed with its weights as arguments, as blocks are that are to be
    scheduled without bubbles.
    """

    def __init__(self, config, recomputed):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.up = paddle.nn.Linear(*sizes, bias_attr=False)
        self.down = paddle.nn.Linear(*sizes[::-1], bias_attr=False)
        self.recomputed = recomputed

    @staticmethod
    def block(x, up, down):
        h = paddle.nn.functional.silu(SplitBWMatmul.apply(x, up, None))
        return SplitBWMatmul.apply(h, down, None)

    def forward(self, x):
        if self.recomputed:
            return recompute(self.block, x, self.up.weight, self.down.weight)
        return self.block(x, self.up.weight, self.down.weight)


def trained(recomputed, delayed=False):
    """Losses, main_grads of every step and weights in the end."""
    config = LlamaConfig(**SIZES)
    if recomputed:
        for key, value in RECOMPUTE.items():
            setattr(config, key, value)
    llama = LlamaForCausalLM(config)
    for layer in llama.model.layers:
        layer.mlp = SplitMLP(config, recomputed)
    stream = set_weights(llama)
    model = MixPrecisionLayer(llama, dtype="bfloat16")
    parameters = llama.parameters()
    optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(1e-3, parameters=parameters))
    model.train()
    losses, gradients = [], []
    WeightGradStore.enabled = delayed
    try:
        for _ in range(STEPS):
            loss = loss_of(model, paddle.to_tensor(stream.randint(0, VOCABULARY, (2, 16))))
            loss.backward()
            if delayed:
                WeightGradStore.flush()
                WeightGradStore.pop()
            losses.append(float(loss))
            gradients.append([parameter.main_grad.numpy().copy() for parameter in parameters])
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
    finally:
        WeightGradStore.enabled = False
        WeightGradStore.clear()
    return losses, gradients, [parameter.numpy() for parameter in parameters]


@pytest.mark.parametrize("delayed", [False, True])
def test_main_grads_are_those_of_the_training_without_recompute(patched, engine, delayed):
    assert_same(trained(recomputed=True, delayed=delayed))


def test_as_with_paddles_own():
    assert_same(trained(recomputed=True))


def assert_same(training):
    losses, gradients, weights = training
    expected_losses, expected_gradients, expected_weights = trained(recomputed=False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_with_paddles_own_a_delayed_gradient_is_lost():
    """It goes to a copy, when the gradients of the copies have been collected."""
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'numpy'"):
        trained(recomputed=True, delayed=True)
