"""What the tests share: parameters, tensors, fused layers, counts and bytes."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import paddle
import pytest
from paddle.base import core
from paddle.base.framework import EagerParamBase

import paramproxy
from paramproxy import recompute
from paramproxy._compat import amp_module, tracer
from paramproxy._options import Options


OPTIONS = [field.name for field in attrs.fields(Options)]
ROOT = Path(__file__).parent.parent
PACKAGE = Path(paramproxy.__file__).parent
"""The package that is tested: `make test-wheel` runs these tests where ROOT has none."""


def param(values, trainable=True, dtype="float32"):
    """A parameter with these values."""
    values = np.asarray(values, dtype)
    initializer = paddle.nn.initializer.Assign(values)
    made = paddle.create_parameter(list(values.shape), dtype, default_initializer=initializer)
    made.stop_gradient = not trainable
    assert type(made) is EagerParamBase
    return made


def tensor(values, grad=True, dtype="float32"):
    """A leaf tensor with these values."""
    return paddle.to_tensor(np.asarray(values, dtype), stop_gradient=not grad)


def values(x):
    """A tensor's values as nested lists; None for None."""
    return None if x is None else x.numpy().tolist()


def plain(function, /, *args, **kwargs):
    """What recompute is compared with: the call itself, without its options."""
    for option in OPTIONS:
        kwargs.pop(option, None)
    return function(*args, **kwargs)


hooked = functools.partial(recompute, use_reentrant=False)
"""The hook engine."""

MODES = [pytest.param(recompute, id="reentrant"), pytest.param(hooked, id="hooks")]


def same(scenario, literal=None, runs=(recompute, hooked)):
    """Assert that `scenario(run)` gives in both modes what it gives without recompute."""
    seed()
    expected = scenario(plain)
    if literal is not None:
        assert expected == literal
    for run in runs:
        seed()
        assert scenario(run) == expected
    return expected


def seed():
    paddle.seed(7)
    np.random.seed(7)


class Counted:
    """A function that counts its calls, so that a test can tell a replay from none."""

    def __init__(self, function):
        self.function = function
        self.calls = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


class FusedLinear(paddle.autograd.PyLayer):
    """Adds the weight's gradient to its own fp32 buffer, and returns none for it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return paddle.matmul(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        if getattr(w, "main_grad", None) is None:
            w.main_grad = paddle.zeros(w.shape, "float32")
        w.main_grad.add_(paddle.matmul(x, dy, transpose_x=True))
        w.hits = getattr(w, "hits", 0) + 1
        return paddle.matmul(dy, w, transpose_y=True), None


class Reverse(paddle.autograd.PyLayer):
    """Gives its input on as it is and turns the gradient round."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return -dy


@contextlib.contextmanager
def amp(level, dtype, lists=None):
    """What auto_cast sets on an accelerator. On CPU it sets the level back to O0."""
    now = tracer()
    old = now._amp_level, now._amp_dtype, now._get_amp_op_list(), amp_module._g_amp_state_
    now._amp_level, now._amp_dtype = level, dtype
    if lists is not None:
        now._set_amp_op_list(*lists)
    amp_module._g_amp_state_ = {"level": str(level)}
    try:
        yield
    finally:
        now._amp_level, now._amp_dtype = old[:2]
        now._set_amp_op_list(*old[2])
        amp_module._g_amp_state_ = old[3]


def allocated():
    """The bytes that the CPU allocator has handed out."""
    return core.host_memory_stat_current_value("Allocated", 0)


def growth(step):
    """The bytes that ten steps leave behind, once three have warmed up."""
    for _ in range(3):
        step()
    gc.collect()
    before = allocated()
    for _ in range(10):
        step()
    gc.collect()
    return allocated() - before


def held(make):
    """The bytes that the result of `make` keeps alive, with everything that hangs on it."""
    make()
    gc.collect()
    before = allocated()
    kept = make()
    gc.collect()
    assert kept is not None
    return allocated() - before


HAS_PEAK = hasattr(core, "host_memory_stat_reset_peak_value")


def peak(step):
    """The allocator's peak above what was there, while `step` runs."""
    gc.collect()
    before = allocated()
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    step()
    return core.host_memory_stat_peak_value("Allocated", 0) - before


def run_python(code, **environment):
    """Run a program of its own. Returns the finished process."""
    prelude = "import warnings; warnings.simplefilter('ignore')\n"
    return run_command("-c", prelude + code, **environment)


def run_command(*arguments, cwd=None, **environment):
    """Run Python with these arguments. A variable of None is unset. Returns the process."""
    path = f"{ROOT}:{Path(__file__).parent}"
    merged = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={name: value for name, value in merged.items() if value is not None},
    )
