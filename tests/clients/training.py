"""Four AdamW steps of a tiny model, and what is compared of them."""

from __future__ import annotations

import attrs
import numpy as np
import paddle


STEPS = 4
VOCABULARY = 128
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}


@attrs.frozen
class Training:
    """What one training gave.

    Attributes:
        losses: Of each step.
        gradients: Of each step, by the name of the parameter in the model.
        reruns: How often a layer of the model's ran again in backward.
    """

    losses: list[float]
    gradients: list[dict[str, np.ndarray]]
    reruns: int


def set_weights(model):
    """Weights and random streams that are the same each time. Returns the stream of the data."""
    paddle.seed(7)
    stream = np.random.RandomState(0)
    for parameter in model.parameters():
        parameter.set_value(stream.randn(*parameter.shape).astype("float32") * 0.05)
    return stream


def loss_of(model, ids):
    """The loss of a causal language model on its own input."""
    output = model(input_ids=ids, labels=ids)
    return output[0] if isinstance(output, tuple) else getattr(output, "loss", output)


def train(model, layers, loss_of):
    """Train a model.

    Args:
        model: The model.
        layers: Those of its layers that may be recomputed.
        loss_of: Calls the model on token ids.
    """
    stream = set_weights(model)
    model.train()
    forwards = []
    removers = [layer.register_forward_pre_hook(lambda *_: forwards.append(1)) for layer in layers]
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    losses, gradients, reruns = [], [], 0
    for _ in range(STEPS):
        forwards.clear()
        loss = loss_of(model, paddle.to_tensor(stream.randint(0, VOCABULARY, (2, 16))))
        once = len(forwards)
        loss.backward()
        reruns += len(forwards) - once
        losses.append(float(loss))
        gradients.append({
            name: parameter.grad.numpy().copy()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        })  # fmt: skip
        optimizer.step()
        optimizer.clear_grad()
    for remover in removers:
        remover.remove()
    return Training(losses, gradients, reruns)


def assert_same(training, expected):
    """The same losses, and the same gradients of the same parameters, in every step."""
    np.testing.assert_allclose(training.losses, expected.losses, rtol=1e-6)
    for ours, theirs in zip(training.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            np.testing.assert_allclose(
                gradient, theirs[name], rtol=1e-4, atol=1e-7, err_msg=f"gradient of {name}"
            )


def difference(training, expected):
    """The largest difference between two gradients of the first step, beside the largest one."""
    first, other = training.gradients[0], expected.gradients[0]
    largest = max(np.abs(gradient).max() for gradient in other.values())
    return max(np.abs(first[name] - other[name]).max() for name in other) / largest
