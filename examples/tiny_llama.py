"""A tiny LLaMA of PaddleFormers with its fused head and loss, recomputed layer by layer.

Nothing here knows of paramproxy:

    python examples/tiny_llama.py --plain             # without recompute
    python examples/tiny_llama.py                     # with Paddle's own: AttributeError
    python -m paramproxy run examples/tiny_llama.py   # with paramproxy in its place

It needs `paddleformers==1.2.0` and `paddlepaddle==3.3.1`; `make example` installs them
and runs all three.
"""

from __future__ import annotations

import logging
import sys
import warnings


warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402


def made(recomputed: bool) -> LlamaForCausalLM:
    """The model, with the same weights each time."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        fuse_rms_norm=False,
        use_fused_head_and_loss_fn=True,
        _attn_implementation="eager",
    )
    if recomputed:
        config.recompute_granularity = "full"
        config.recompute_method = "uniform"
        config.recompute_num_layers = 1
    model = LlamaForCausalLM(config)
    stream = np.random.RandomState(0)
    for parameter in model.parameters():
        parameter.set_value(stream.randn(*parameter.shape).astype("float32") * 0.05)
    return model


def main(recomputed: bool) -> None:
    """Train four steps on noise, and print what came of each."""
    model = made(recomputed)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    stream = np.random.RandomState(1)
    console = Console(stderr=True)
    for step in track(range(4), console=console, transient=True, disable=not console.is_terminal):
        ids = paddle.to_tensor(stream.randint(0, 128, (2, 16)))
        loss = model(input_ids=ids, labels=ids)[0]
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(sum((gradient**2).sum() for gradient in gradients)) ** 0.5
        print(f"step {step}  loss {float(loss):.6f}  {len(gradients)} gradients, norm {norm:.6f}")
        optimizer.step()
        optimizer.clear_grad()


if __name__ == "__main__":
    main(recomputed="--plain" not in sys.argv)
