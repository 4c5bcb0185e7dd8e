"""The decorator, and what a function can ask about where it is."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import paddle
import pytest
from support import MODES, OPTIONS, Counted, hooked, param, tensor, values

import paramproxy
from paramproxy import checkpoint, is_recomputing


def test_bare_and_with_options():
    calls = []

    @checkpoint
    def reentrant(a, w):
        """Its docstring."""
        calls.append(is_recomputing())
        return paddle.tanh(a * w)

    @checkpoint(use_reentrant=False)
    def exact(a, w):
        calls.append(is_recomputing())
        return paddle.tanh(a * w)

    for function in (reentrant, exact):
        x, w = tensor([1.0]), param([2.0])
        function(x * 1.0, w=w).sum().backward()
        assert w.grad is not None
        assert calls == [False, True]
        calls.clear()
    assert reentrant.__doc__ == "Its docstring."
    assert list(inspect.signature(exact).parameters) == ["a", "w"]


def test_a_method():
    class Block(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.fc = paddle.nn.Linear(2, 2)
            self.runs = []

        @checkpoint(use_reentrant=False, preserve_rng_state=False)
        def forward(self, a):
            self.runs.append(1)
            return paddle.tanh(self.fc(a))

    block = Block()
    block(tensor([[1.0, 2.0]])).sum().backward()
    assert len(block.runs) == 2
    assert block.fc.weight.grad is not None


def test_options_do_not_take_the_functions_own_keywords():
    @checkpoint(use_reentrant=False, debug=True)
    def region(a, *, debug, policy):
        return paddle.exp(a) * debug * policy

    x = tensor([0.0])
    region(x * 1.0, debug=2.0, policy=3.0).sum().backward()
    assert values(x.grad) == [6.0]


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError) as caught:
        checkpoint(use_reentrent=False)
    assert "Cannot take the option 'use_reentrent': expected one of use_reentrant," in str(
        caught.value
    )


@pytest.mark.parametrize("how", [lambda f: checkpoint(f), lambda f: checkpoint(debug=True)(f)])
def test_what_is_no_function_is_named(how):
    with pytest.raises(TypeError, match="expected a callable, got int"):
        how(3)


@pytest.mark.parametrize("run", MODES)
def test_is_recomputing_only_in_the_replay_and_only_in_its_thread(run):
    here, there = [], []

    def region(a):
        here.append(is_recomputing())
        thread = threading.Thread(target=lambda: there.append(is_recomputing()))
        thread.start()
        thread.join()
        return paddle.exp(a)

    y = run(region, tensor([1.0]) * 1.0)
    assert not is_recomputing()
    y.sum().backward()
    assert (here, there) == ([False, True], [False, False])
    assert not is_recomputing()


@pytest.mark.parametrize("run", MODES)
def test_after_an_exception_in_a_replay_it_is_off(run):
    calls = []

    def region(a):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError
        return paddle.exp(a)

    y = run(region, tensor([1.0]) * 1.0)
    with pytest.raises(OSError, match="ReplayError"):
        y.sum().backward()
    assert not is_recomputing()


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("draws", [True, False])
def test_preserve_external_rng_state(run, draws):
    """False leaves numpy and Python alone; Paddle's own are still restored."""
    drawn = []

    def region(a):
        drawn.append((np.random.rand() if draws else 0.0, values(paddle.rand([1]))))
        return paddle.exp(a)

    run(region, tensor([1.0]) * 1.0, preserve_external_rng_state=False).sum().backward()
    (n1, p1), (n2, p2) = drawn
    assert p1 == p2
    assert (n1 == n2) is not draws


def test_external_streams_are_not_even_looked_at(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr("paramproxy._ambient.numpy_snapshot", refuse)
    monkeypatch.setattr("paramproxy._ambient.python_snapshot", refuse)
    region = Counted(paddle.exp)
    hooked(region, tensor([1.0]) * 1.0, preserve_external_rng_state=False).sum().backward()
    assert region.calls == 2


def test_recompute_takes_every_option_that_the_decorator_takes():
    options = set(inspect.signature(paramproxy.recompute).parameters)
    assert options - {"function", "args", "kwargs"} == set(OPTIONS)
