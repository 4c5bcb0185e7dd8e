"""PaddleFormers' models, recomputed under paramproxy.patch(), train as they do without."""

from __future__ import annotations

import pytest
from paddleformers.transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from training import STEPS, TINY, assert_same, loss_of, train


SIZES = {
    **TINY,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "_attn_implementation": "eager",
    "fuse_rms_norm": False,
    "use_cache": False,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16}),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM, {"head_dim": 16}),
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def trained(name, **options):
    config_class, model_class, sizes = MODELS[name]
    config = config_class(**SIZES, **sizes)
    for key, value in options.items():
        setattr(config, key, value)
    model = model_class(config)
    return train(model, model.model.layers, loss_of)


@pytest.mark.parametrize("name", MODELS)
def test_under_the_patch_it_trains_as_without_recompute(patched, engine, name):
    expected = trained(name)
    recomputed = trained(name, **RECOMPUTE)
    assert_same(recomputed, expected)
    assert (expected.reruns, recomputed.reruns) == (0, 2 * STEPS)


@pytest.mark.parametrize("name", MODELS)
def test_as_with_paddles_own(name):
    """Where nothing hangs on a parameter argument both are right: no patch changes that."""
    theirs = trained(name, **RECOMPUTE)
    assert_same(theirs, trained(name))
    assert theirs.reruns == 2 * STEPS


@pytest.mark.parametrize("name", MODELS)
def test_the_fused_head_and_loss_trains_under_the_patch_only(patched, engine, name):
    """It reads `weight.is_distributed` and adds to `weight.main_grad`, in a recomputed region."""
    expected = trained(name, use_fused_head_and_loss_fn=True)
    recomputed = trained(name, **RECOMPUTE, use_fused_head_and_loss_fn=True)
    assert_same(recomputed, expected)
    assert recomputed.reruns == 2 * STEPS


def test_the_fused_head_and_loss_does_not_train_with_paddles_own():
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'is_distributed'"):
        trained("llama", **RECOMPUTE, use_fused_head_and_loss_fn=True)


CACHED = ["phi3", "gemma3", "gpt_oss"]


@pytest.mark.parametrize("name", CACHED)
def test_with_a_cache_that_every_layer_adds_to(patched, engine, name):
    """`use_cache=True`, which is the default of these models: nobody switched it off."""
    recomputed = trained(name, **RECOMPUTE, use_cache=True)
    assert_same(recomputed, trained(name, use_cache=True))
    assert recomputed.reruns == 2 * STEPS


def test_with_paddles_own_the_cache_is_added_to_twice():
    with pytest.raises(OSError, match="Broadcast dimension mismatch"):
        trained("phi3", **RECOMPUTE, use_cache=True)
