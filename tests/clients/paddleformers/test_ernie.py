"""ERNIE: its criterion, whose lm_head weight is an argument, and its refined recompute."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute
from paddleformers.transformers import refined_recompute
from paddleformers.transformers.ernie4_5_moe_vl.model.configuration import Ernie4_5_Config
from paddleformers.transformers.ernie4_5_moe_vl.model.modeling import ErniePretrainingCriterion
from paddleformers.transformers.ernie4_5_moe_vl.model.refined_recompute.utils import (
    CustomSavedTensorsHooks,
    RefinedRecomputeFunction,
    global_rr_queue_log,
    is_second_fwd,
)
from support import param, tensor, values
from training import TINY


def loss_and_gradients(recomputed, **options):
    config = Ernie4_5_Config(**{**TINY, "tie_word_embeddings": False})
    config.recompute_modules = ["loss_fn"] if recomputed else None
    config.tensor_model_parallel_size = 1
    for key, value in options.items():
        setattr(config, key, value)
    stream = np.random.RandomState(0)
    weight = param(stream.randn(config.hidden_size, config.vocab_size) * 0.05)
    weight.is_distributed = False
    hidden = tensor(stream.randn(2, 16, config.hidden_size))
    labels = stream.randint(0, config.vocab_size, (2, 16))
    labels[0, :5] = -100
    criterion = ErniePretrainingCriterion(config)
    scores = (hidden * 1.0, weight, None)
    if not (recomputed or options.get("use_filtered_label_loss")):
        scores = paddle.matmul(scores[0], weight)
    loss, _ = criterion(scores, paddle.to_tensor(labels))
    loss.backward()
    return float(loss), values(hidden.grad), values(weight.grad)


OPTIONS = {
    "offloaded": {"use_filtered_label_loss": True, "offload_lm_head": True},
    "filtered": {"use_filtered_label_loss": True},
    "whole": {"use_filtered_label_loss": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_criterion_gives_what_it_gives_without_recompute(patched, engine, name):
    expected = loss_and_gradients(False, **OPTIONS[name])
    assert loss_and_gradients(True, **OPTIONS[name]) == expected


@pytest.mark.parametrize("name", OPTIONS)
def test_the_criterion_as_with_paddles_own(name):
    expected = loss_and_gradients(False, **OPTIONS[name])
    assert loss_and_gradients(True, **OPTIONS[name]) == expected


# Refined recompute: some calls of a region are not made again. ERNIE's knows the
# replay by the names of Paddle's hooks, PaddleFormers' has an engine of its own.


def test_ernie_has_put_its_hooks_in_the_place_of_paddles():
    assert paddle.autograd.saved_tensors_hooks is CustomSavedTensorsHooks


class Counted(paddle.autograd.PyLayer):
    """A linear layer that tells how often it was computed."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        Counted.calls += 1
        ctx.save_for_backward(x, weight)
        return paddle.matmul(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensor()
        return (
            paddle.matmul(dy, weight, transpose_y=True),
            paddle.matmul(x, dy, transpose_x=True),
        )


def linear(x, weight):
    return Counted.apply(x, weight)


linear.__module__, linear.__name__ = "paddle.nn.functional.common", "linear"


def step(kept, times=1, tail=False):
    """Two steps of a block. Returns its gradients and how often the linear layer ran."""
    refined = RefinedRecomputeFunction()
    x, w = tensor(np.full((2, 2), 0.5)), param([[0.1, 0.2], [0.3, 0.4]])
    Counted.calls = 0
    seen = []

    def block(x):
        h = paddle.tanh(x)
        for _ in range(times):
            h = paddle.tanh(kept(refined, h, w))
        seen.append(is_second_fwd())
        if tail:
            kept(refined, h, w)  # of which nothing is saved that backward needs
        return h

    for _ in range(2):
        h = recompute(block, x * 1.0, use_reentrant=False)
        (h * h).sum().backward()
    global_rr_queue_log.check()
    return values(x.grad), values(w.grad), Counted.calls, seen


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_what_ernie_keeps_is_not_computed_again(patched, times, tail):
    expected = step(lambda refined, h, w: linear(h, w), times, tail)
    *gradients, calls, seen = step(lambda refined, h, w: refined(linear, h, w), times, tail)
    assert gradients == list(expected[:2])
    assert calls == 2 * (times + tail)
    assert expected[2] == 4 * (times + tail)
    assert seen == [False, True] * 2
    assert not is_second_fwd()


def test_as_with_paddles_own_hook_engine():
    *_, calls, seen = step(lambda refined, h, w: refined(linear, h, w))
    assert calls == 2
    assert seen == [False, True] * 2


def test_ernie_hears_nothing_of_a_reentrant_replay(patched):
    """Nor of Paddle's own."""
    seen = []
    x = tensor([1.0])
    y = recompute(lambda a: seen.append(is_second_fwd()) or paddle.exp(a), x * 1.0)
    y.backward()
    assert seen == [False, False]


def refined_step(run, no_recompute):
    x, w = tensor(np.full((2, 2), 0.5)), param([[0.1, 0.2], [0.3, 0.4]])
    Counted.calls = 0

    def block(x):
        h = paddle.tanh(x)
        return paddle.tanh(no_recompute(linear, h, w) * 2.0)

    h = run(block, x * 1.0)
    (h * h).sum().backward()
    return values(x.grad), values(w.grad), Counted.calls


@pytest.mark.parametrize("inside", [False, True])
def test_what_paddleformers_keeps_is_not_computed_again(patched, inside):
    def run(block, x):
        def refined(x):
            return refined_recompute.recompute(block, x, use_reentrant=False)

        return recompute(refined, x, use_reentrant=False) if inside else refined(x)

    def keep(function, *args):
        return refined_recompute.no_recompute(function, *args)

    expected = refined_step(lambda block, x: block(x), lambda function, *args: function(*args))
    *gradients, calls = refined_step(run, keep)
    assert gradients == list(expected[:2])
    assert calls == 1 + inside
