"""Whatever fails, wherever: afterwards all is as if it had never happened.

A fault is raised at the entry of one function of the package after another, of all
that a step calls. Only what is called to put things back is left out: no Python code
can clean up if its cleaning up is stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from pathlib import Path

import numpy as np
import paddle
import pytest
from support import (
    MODES,
    FusedLinear,
    amp,
    hooked,
    param,
    plain,
    tensor,
    values,
)

import paramproxy
from paramproxy import _aside, _dispatch, keep, recompute, save_ops
from paramproxy._compat import amp_module, core, tracer


PACKAGE = str(Path(paramproxy.__file__).parent)
functional = paddle.nn.functional


class Fault(BaseException):
    """What nobody catches by mistake."""


class _Faults:
    """Raises at the n-th call of a function of the package, in this thread."""

    def __init__(self, at, error):
        self.at, self.error = at, error
        self.count = 0
        self.raised_in = None

    def __call__(self, frame, event, arg):
        if event != "call" or not _is_ours(frame):
            return
        if _is_putting_back(frame) or frame.f_code.co_name == "<genexpr>":
            return
        if frame.f_code.co_name == "unpack" and not _is_ours(frame.f_back):
            return  # Paddle leaves grad mode off; in the hook itself it is restored
        self.count += 1
        if self.count == self.at:
            self.raised_in = frame.f_code.co_qualname if sys.version_info >= (3, 11) else "it"
            raise self.error("a fault")


def _is_ours(frame):
    return frame.f_code.co_filename.startswith(PACKAGE)


# Of `__del__` Python prints what is raised in it, and goes on.
PUT_BACK = ("__del__", "__exit__", "close", "_restore_modes", "restore", "_restore_others", "leave")


def _is_putting_back(frame):
    while frame is not None:
        if frame.f_code.co_name in PUT_BACK:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def faults(at=0, error=Fault):
    """A block in which the call of that number fails; 0 to count them only."""
    found = _Faults(at, error)
    sys.setprofile(found)
    try:
        yield found
    finally:
        sys.setprofile(None)


class Block(paddle.nn.Layer):
    """A layer with all that a region looks after."""

    def __init__(self):
        super().__init__()
        self.linear = paddle.nn.Linear(2, 2)
        self.register_buffer("average", paddle.zeros([2]))

    def forward(self, q, w, cache):
        with paddle.no_grad():
            self.average.add_(q.mean(axis=0))
        cache["calls"] = cache.get("calls", 0) + 1
        h = functional.dropout(paddle.tanh(self.linear(q)), 0.4)
        h = FusedLinear.apply(h, w) * float(np.random.rand()) + random.random()
        return paddle.exp(h * 0.1) * (1.0 + int(tracer()._amp_level)), h.detach().mean()


class World:
    """A model, its inputs, and a step of training.

    Attributes:
        run: Runs a region.
    """

    def __init__(self, run):
        self.run = run
        paddle.seed(3)
        self.block = Block()
        self.w = param(np.ones([2, 2]))
        self.w.main_grad = paddle.zeros([2, 2])
        self.x = tensor([[0.5, 1.0], [2.0, 3.0]])
        self.scale = tensor([1.5])
        self.cache = {}
        self.told = []
        for leaf in (self.w, self.block.linear.weight, self.x):
            leaf.register_hook(lambda g: self.told.append(values(g)))

    def forward(self):
        block, scale, run = self.block, self.scale * 1.0, self.run

        def region(q, *, w, cache):
            y, _ = block(q * scale, w, cache)
            kept = y if run is plain else keep(paddle.tanh, y)
            return (paddle.tanh(kept) if run is plain else kept) + q, y.shape

        with amp(core.AmpLevel.O1, "float16"):
            y, _ = self.run(region, self.x * 1.0, w=self.w, cache=self.cache)
        return y.sum()

    def step(self):
        """Loss and gradients of one step, from where streams and state are now."""
        paddle.seed(5), np.random.seed(5), random.seed(5)
        self.told.clear()
        loss = self.forward()
        loss.backward()
        leaves = [self.w, self.x, *self.block.parameters()]
        found = [values(loss), *map(values, map(_gradient, leaves)), values(self.w.main_grad)]
        found += [sorted(map(str, self.told)), values(self.block.average), dict(self.cache)]
        return [*found, values(paddle.rand([1])), np.random.rand(), random.random()]

    def reset(self):
        """What a step that has failed half way may have done, as a plain one may."""
        for leaf in (self.w, self.x, *self.block.parameters()):
            leaf.clear_gradient(False)
        self.w.main_grad.zero_()
        self.block.average.zero_()
        self.cache.clear()

    def state(self):
        """What no failure may change."""
        layers = self.block.sublayers(include_self=True)
        return {
            "grad mode": tracer()._has_grad,
            "amp": (str(tracer()._amp_level), tracer()._amp_dtype, amp_module._g_amp_state_),
            "is recomputing": paramproxy.is_recomputing(),
            "frames": (list(_dispatch._local.frames), list(_dispatch._local.entered)),
            "hooks": (_dispatch._dispatcher.users, _dispatch._dispatcher.registered),
            "claims": dict(_aside._claims.owners),
            "modes of layers": [layer.training for layer in layers],
            "parameters of layers": [type(layer._parameters) for layer in layers],
            "buffers": [id(buffer) for layer in layers for buffer in layer._buffers.values()],
            "written in layers": [sorted(vars(layer)) for layer in layers],
            "flags": [weight.stop_gradient for weight in (self.w, *self.block.parameters())],
            "written on weights": [sorted(vars(w)) for w in self.block.parameters()],
            "written on buffers": [sorted(getattr(self.block.average, "__dict__", ()))],
        }


def started(run):
    """A world, what a step of it gives, and its state."""
    world = World(run)
    wanted = world.step()
    world.reset()
    return world, wanted, world.state()


def _gradient(leaf):
    return leaf.grad


def streams():
    """Where the random streams are."""
    paddles = paddle.get_rng_state()
    drawn = values(paddle.rand([2]))
    paddle.set_rng_state(paddles)
    return drawn, np.random.get_state()[1].tolist(), random.getstate()


def _under_hooks(function, *args, **kwargs):
    with paddle.autograd.saved_tensors_hooks(lambda t: (t,)[0], lambda t: t):
        return hooked(function, *args, **kwargs)


RUNS = {
    "hooks under a caller's": _under_hooks,
    "reentrant": recompute,
    "hooks": hooked,
    "policy": lambda f, *a, **k: recompute(f, *a, policy=save_ops("tanh"), **k),
    "hooks in reentrant": lambda f, *a, **k: recompute(lambda *b, **c: hooked(f, *b, **c), *a, **k),
    "reentrant in hooks": lambda f, *a, **k: hooked(lambda *b, **c: recompute(f, *b, **c), *a, **k),
    "reentrant in reentrant": lambda f, *a, **k: recompute(
        lambda *b, **c: recompute(f, *b, **c), *a, **k
    ),
}


KINDS = [(name, Fault) for name in RUNS]
KINDS += [(name, e) for name in ("reentrant", "hooks") for e in (KeyboardInterrupt, MemoryError)]


@pytest.mark.parametrize(("name", "error"), KINDS)
def test_a_fault_at_every_step(name, error):
    world, wanted, before = started(RUNS[name])
    raised = 0
    for at in itertools.count(1):
        paddle.seed(5), np.random.seed(5), random.seed(5)
        loss, error_raised = None, None
        with faults(at, error) as fault:
            try:
                loss = world.forward()
                sys.setprofile(None)
                start, after_forward = streams(), (values(world.block.average), dict(world.cache))
                sys.setprofile(fault)
                loss.backward()
            except BaseException as exc:
                error_raised = str(exc)
        if fault.raised_in is None:
            break
        where = f"fault {at} in {fault.raised_in}"
        raised += error_raised is not None
        assert error_raised is None or "a fault" in error_raised, where
        if loss is not None:
            assert streams() == start, where
            assert (values(world.block.average), dict(world.cache)) == after_forward, where
        del loss
        assert world.state() == before, where
        world.reset()
        assert world.step() == wanted, where
        world.reset()
    assert raised > 100
    assert raised > 0.9 * at


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("when", ["first run", "replay"])
def test_out_of_memory(run, when):
    """Paddle's own error, in the one run or the other."""
    world, wanted, _ = started(run)
    bad = [False]
    forward = world.block.forward

    def too_much(*args):
        if bad[0]:
            paddle.empty([2**44], "float32")
        return forward(*args)

    world.block.forward = too_much
    before = world.state()
    if when == "first run":
        bad[0] = True
        with pytest.raises(MemoryError, match="memory"):
            world.forward()
    else:
        loss = world.forward()
        start, bad[0] = streams(), True
        with pytest.raises(OSError, match=r"(?s)ReplayError.*World\.forward.*[Mm]emory"):
            loss.backward()
        del loss
        assert streams() == start
    assert world.state() == before
    bad[0] = False
    world.reset()
    assert world.step() == wanted


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("function", ["get", "set"])
@pytest.mark.parametrize("at", range(1, 4))
def test_a_users_own_random_state_that_fails(run, function, at):
    """`custom_state_manager` calls functions of the user's, which may raise."""
    manager = paramproxy.custom_state_manager
    calls = {"get": 0, "set": 0}

    def call(name):
        calls[name] += 1
        if name == function and calls[name] == at:
            raise KeyError("a fault")
        return "state"

    world, wanted, before = started(run)
    manager.set_custom_get_state_func(lambda: call("get"))
    manager.set_custom_set_state_func(lambda state: call("set"))
    loss, start, raised = None, None, ""
    try:
        loss = world.forward()
        start = streams()
        loss.backward()
    except (KeyError, OSError) as exc:
        raised = str(exc)
    finally:
        manager.custom_get_state_func = manager.custom_set_state_func = None
    assert ("a fault" in raised) == (calls[function] >= at)
    assert start is None or streams() == start
    del loss
    assert world.state() == before
    world.reset()
    assert world.step() == wanted


@pytest.mark.parametrize("name", RUNS)
def test_a_region_whose_backward_never_comes(name):
    world, wanted, before = started(RUNS[name])
    loss = world.forward()
    del loss
    assert world.state() == before
    world.reset()
    assert world.step() == wanted


@pytest.mark.parametrize("run", MODES)
def test_a_backward_in_another_thread_that_fails(run):
    world, wanted, before = started(run)
    loss = world.forward()
    weight = world.block.linear.weight
    with paddle.no_grad():
        weight.scale_(2.0)  # which the replay refuses
    raised = []

    def backward(loss):
        try:
            loss.backward()
        except OSError as exc:
            raised.append(str(exc))
        raised.append(paddle.is_grad_enabled())

    thread = threading.Thread(target=backward, args=[loss])
    thread.start()
    thread.join()
    assert "MutationError" in raised[0]
    assert raised[1]
    del loss, thread
    assert world.state() == before
    with paddle.no_grad():
        weight.scale_(0.5)
    world.reset()
    assert world.step() == wanted
