"""What the programs share: the ranks, engines to compare, and the comparison."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import paddle

from paramproxy import recompute


warnings.filterwarnings("ignore")


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


ENGINES = {
    "reentrant": functools.partial(recompute, use_reentrant=True),
    "hooks": functools.partial(recompute, use_reentrant=False),
}


def data(*shape, seed=0):
    """The same on every rank."""
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def gradients(layer):
    """By name, as the layer has them without whatever wraps it."""
    return {
        name.replace("_layers.", ""): parameter.grad.numpy()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def assert_same(got, expected, what, rtol=1e-5, atol=1e-6):
    """The same arrays under the same names."""
    assert got.keys() == expected.keys(), (what, sorted(got), sorted(expected))
    for name, array in expected.items():
        np.testing.assert_allclose(
            got[name], array, rtol=rtol, atol=atol, err_msg=f"{what}: {name}"
        )


class Calls:
    """How often a function ran, to see that it ran again."""

    def __init__(self, function):
        self.function = function
        self.count = 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


def seeded(make, *args):
    """A layer whose weights are the same each time and everywhere."""
    paddle.seed(11)
    return make(*args)
