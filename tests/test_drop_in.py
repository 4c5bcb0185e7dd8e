"""The other names of Paddle's recompute module."""

from __future__ import annotations

import random
import sys

import numpy as np
import paddle
import pytest
from support import param, tensor, values

import paramproxy
from paramproxy import (
    ParamView,
    check_recompute_necessary,
    custom_state_manager,
    detach_variable,
    recompute,
    switch_rng_state_tracker,
    unwrap,
)
from paramproxy._compat import get_rng_state_tracker


PADDLES = sys.modules["paddle.distributed.fleet.recompute.recompute"]
NAMES = [
    "check_recompute_necessary",
    "custom_state_manager",
    "detach_variable",
    "recompute",
    "recompute_sequential",
    "switch_rng_state_tracker",
]


@pytest.mark.parametrize("name", [*NAMES, "recompute_hybrid"])
def test_it_is_a_name_of_paramproxy(name):
    assert name in paramproxy.__all__
    assert hasattr(paramproxy, name)


def test_detached_variables_are_leaves_of_parameters_and_aliases_of_tensors():
    w, x = param([3.0]), tensor([2.0])
    w.main_grad = paddle.zeros([1])
    h = x * 1.0
    mask = tensor([1.0], grad=False)
    leaf, inner, flag, (again, other), nothing = detach_variable([w, h, mask, (w, h), None])
    assert unwrap(leaf) is w
    assert again is leaf
    assert other is inner
    assert leaf.main_grad is w.main_grad
    assert (inner.stop_gradient, inner.is_leaf, flag.stop_gradient) == (False, True, True)
    assert nothing is None
    (leaf * inner).sum().backward()
    assert (values(leaf.grad), values(inner.grad)) == ([2.0], [3.0])
    assert w.grad is None
    assert x.grad is None


def test_a_view_is_detached_as_its_parameter():
    w = param([3.0])
    assert unwrap(detach_variable((ParamView(w),))[0]) is w


@pytest.mark.parametrize("inputs", [[1, None], [tensor([1.0], grad=False)], []])
def test_it_warns_where_no_input_needs_a_gradient(inputs):
    with pytest.warns(UserWarning, match="None of the inputs of this recomputed block") as caught:
        check_recompute_necessary(inputs)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("inputs", [[tensor([1.0])], [({"a": tensor([1.0])}, 3)], [param([1.0])]])
def test_it_says_nothing_where_one_does(inputs):
    check_recompute_necessary(inputs)


def draw():
    return values(paddle.rand([1])), float(np.random.rand()), random.random()


def now():
    streams = paddle.get_rng_state(), get_rng_state_tracker().get_states_tracker()
    return (*streams, np.random.get_state(), random.getstate())


def test_every_stream_is_switched_and_switched_back():
    state = now()
    first = draw()
    following = now()
    with switch_rng_state_tracker(*state):
        assert draw() == first
    expected = draw()
    with switch_rng_state_tracker(*following):
        assert draw() == expected


def test_streams_that_are_not_given_are_left_alone():
    state = now()
    _, numpys, pythons = draw()
    with switch_rng_state_tracker(*state[:2]):
        _, *others = draw()
    assert numpys not in others
    assert pythons not in others


def test_streams_are_switched_back_when_the_block_raises():
    state, expected = now(), draw()
    with switch_rng_state_tracker(*state):
        pass

    def block():
        with switch_rng_state_tracker(*state):
            draw()
            raise KeyError

    after = now()
    with pytest.raises(KeyError):
        block()
    with switch_rng_state_tracker(*after):
        following = draw()
    assert draw() == following
    assert following != expected


def test_a_state_of_ones_own():
    held = {"seed": 1}
    with switch_rng_state_tracker(
        *now(), 5, lambda: held["seed"], lambda value: held.update(seed=value)
    ):
        assert held == {"seed": 5}
        held["seed"] = 6
    assert held == {"seed": 1}


def test_a_state_of_ones_own_needs_its_functions():
    with (
        pytest.raises(TypeError, match="Cannot set custom_state: expected custom_get_state_func"),
        switch_rng_state_tracker(*now(), 5),
    ):
        pass


def test_the_custom_state_manager_is_paddles_own():
    """Where Paddle has one (3.1); elsewhere ours does the same."""
    assert getattr(PADDLES, "custom_state_manager", custom_state_manager) is custom_state_manager
    held = {"seed": 1}
    custom_state_manager.set_custom_get_state_func(lambda: held["seed"])
    custom_state_manager.set_custom_set_state_func(lambda value: held.update(seed=value))
    try:
        seen = []
        y = recompute(lambda a: seen.append(held["seed"]) or paddle.exp(a), tensor([1.0]) * 1.0)
        held["seed"] = 2
        y.backward()
    finally:
        custom_state_manager.custom_get_state_func = None
        custom_state_manager.custom_set_state_func = None
    assert seen == [1, 1]
    assert held == {"seed": 2}


def test_own_checkpointing_code_on_these_parts():
    """The shape of Paddle's own RecomputeFunction, as clients have copied it."""

    class Checkpoint(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, function, *args):
            check_recompute_necessary(args)
            ctx.function, ctx.args, ctx.streams = function, args, now()
            with paddle.no_grad():
                return function(*args)

        @staticmethod
        def backward(ctx, dy):
            with switch_rng_state_tracker(*ctx.streams), paddle.set_grad_enabled(True):
                inputs = detach_variable(ctx.args)
                y = ctx.function(*inputs)
            paddle.autograd.backward([y], [dy])
            return tuple(given._grad_ivar() for given in inputs)

    def block(a, w):
        return paddle.nn.functional.dropout(a * w, 0.5)

    def run(function):
        paddle.seed(1)
        x, w = tensor(np.ones(32)), param(np.full(32, 2.0))
        function(block, x * 1.0, w).sum().backward()
        return values(x.grad), values(w.grad)

    assert run(Checkpoint.apply) == run(lambda function, *args: function(*args))
