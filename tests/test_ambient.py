"""Random streams, AMP and grad mode: in the replay as they were, afterwards as they are."""

from __future__ import annotations

import random

import numpy as np
import paddle
import pytest
from paddle.base import core
from support import MODES, Counted, amp, param, plain, same, tensor, values

import paramproxy
from paramproxy import _ambient, recompute
from paramproxy._compat import amp_module, get_rng_state_tracker, tracer


def draw():
    """The next number of every stream."""
    return values(paddle.rand([2])), float(np.random.rand()), random.random()


def noisy(a):
    """A region that draws from every stream."""
    kept = paddle.nn.functional.dropout(a, 0.5)
    return kept * a * float(np.random.rand()) + a * a * random.random()


def test_the_replay_draws_what_the_first_run_drew():
    def scenario(run):
        x = tensor([float(i) for i in range(1, 33)])
        random.seed(5)
        y = run(noisy, x * 1.0)
        between = draw()
        y.sum().backward()
        return values(y), values(x.grad), between, draw()

    same(scenario)


def test_regions_one_after_another_and_one_in_another():
    def scenario(run):
        x = tensor([float(i) for i in range(1, 33)])
        random.seed(5)
        h = run(noisy, x * 0.1)
        h = run(lambda a: run(noisy, a) + noisy(a), h)
        h = run(noisy, h)
        h.sum().backward()
        return values(h), draw(), x.grad.numpy()

    paddle.seed(7), np.random.seed(7)
    *expected, expected_grad = scenario(plain)
    paddle.seed(7), np.random.seed(7)
    *got, grad = scenario(recompute)
    assert got == expected
    # The replay adds up the gradients of one input in another order.
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-6)


def test_numpys_cached_gaussian_is_part_of_the_stream():
    def scenario(run):
        np.random.normal()  # leaves one cached
        x = tensor([2.0])
        y = run(lambda a: a * a * float(np.random.normal()), x * 1.0)
        y.sum().backward()
        return values(y), values(x.grad), float(np.random.normal())

    same(scenario)


@pytest.fixture
def named_state():
    tracker = get_rng_state_tracker()
    tracker.reset()
    paddle.seed(3)
    tracker.add("local_seed", 1234)
    yield tracker
    tracker.reset()


def test_the_named_states_of_the_hybrid_parallel_tracker(named_state):
    def scenario(run):
        named_state.reset()
        named_state.add("local_seed", 1234)

        def region(a):
            with named_state.rng_state("local_seed"):
                b = paddle.nn.functional.dropout(a * a, 0.5)
            return paddle.nn.functional.dropout(b, 0.25)

        x = tensor([1.0] * 16)
        outs = [run(region, x * 1.0) for _ in range(3)]
        with named_state.rng_state("local_seed"):
            paddle.rand([5])
        sum(out.sum() for out in outs).backward()
        with named_state.rng_state("local_seed"):
            after = values(paddle.rand([1]))
        return [values(out) for out in outs], values(x.grad), after

    same(scenario)


def test_without_preserve_rng_state_the_replay_moves_every_stream_on():
    def after(**options):
        paddle.seed(1), np.random.seed(1), random.seed(1)
        recompute(noisy, tensor([1.0] * 8) * 1.0, **options).sum().backward()
        return draw()

    paddle.seed(1), np.random.seed(1), random.seed(1)
    noisy(tensor([1.0] * 8))
    once = draw()
    paddle.seed(1), np.random.seed(1), random.seed(1)
    noisy(tensor([1.0] * 8)), noisy(tensor([1.0] * 8))
    twice = draw()
    assert after() == once
    assert after(preserve_rng_state=False) == twice


def test_without_preserve_rng_state_no_stream_is_read(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a random stream was touched")

    for owner, name in (
        (paddle, "get_rng_state"),
        (paddle, "set_rng_state"),
        (_ambient, "numpy_snapshot"),
        (np.random, "set_state"),
        (_ambient, "python_snapshot"),
        (random, "setstate"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    x = tensor([3.0])
    recompute(lambda a: a * a, x * 1.0, preserve_rng_state=False).sum().backward()
    assert values(x.grad) == [6.0]


@pytest.fixture
def custom_state():
    state = {"seed": 1, "sets": 0}

    def setter(value):
        state["seed"] = value
        state["sets"] += 1

    manager = paramproxy.custom_state_manager
    manager.set_custom_get_state_func(lambda: state["seed"])
    manager.set_custom_set_state_func(setter)
    yield state
    manager.custom_get_state_func = manager.custom_set_state_func = None


def test_what_is_registered_with_paddles_custom_state_manager(custom_state):
    def region(a):
        custom_state["seed"] += 1
        return a * a * float(custom_state["seed"])

    x = tensor([3.0])
    y = recompute(region, x * 1.0)
    custom_state["seed"] = 50
    y.sum().backward()
    assert values(y) == [18.0]
    assert values(x.grad) == [12.0]
    assert custom_state["seed"] == 50
    custom_state["sets"] = 0
    recompute(region, x * 1.0, preserve_rng_state=False).sum().backward()
    assert custom_state["sets"] == 0


def amp_fields():
    now = tracer()
    return str(now._amp_level), now._amp_dtype, now._use_promote, amp_module._g_amp_state_


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_replay_finds_the_amp_state_of_the_first_run(level, dtype):
    seen = []

    def region(a):
        white, black = tracer()._get_amp_op_list()
        seen.append((amp_fields(), sorted(white), sorted(black)))
        return a * 2.0

    before = amp_fields()
    with amp(getattr(core.AmpLevel, level), dtype, ({"matmul", "mul"}, {"exp"})):
        y = recompute(region, tensor([1.0]) * 1.0)
    y.sum().backward()
    assert seen[0] == seen[1]
    assert seen[0][1:] == (["matmul", "mul"], ["exp"])
    assert level in seen[0][0][0]
    assert amp_fields() == before


def test_outside_amp_the_replay_is_outside_amp_even_in_a_backward_inside():
    seen = []

    def region(a):
        seen.append(
            (amp_fields(), paddle.amp.amp_state() if hasattr(paddle.amp, "amp_state") else None)
        )
        return a * 2.0

    y = recompute(region, tensor([1.0]) * 1.0)
    with amp(core.AmpLevel.O1, "bfloat16"):
        inside = amp_fields()
        y.sum().backward()
        assert amp_fields() == inside
    assert seen[0] == seen[1]
    assert seen[1][0][3] is None


def test_auto_cast_gives_the_replay_the_same_python_state():
    seen = []

    def region(a):
        seen.append(amp_module._g_amp_state_)
        return a * 2.0

    with pytest.warns(UserWarning, match="makes no effect"), paddle.amp.auto_cast(level="O1"):
        y = recompute(region, tensor([1.0]) * 1.0)
    y.sum().backward()
    assert seen[0] is seen[1]
    assert seen[0] is not None


def test_the_backward_of_the_replay_sees_the_amp_state_of_the_caller():
    seen = []

    class Probe(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2.0

        @staticmethod
        def backward(ctx, dy):
            seen.append((str(tracer()._amp_level), paddle.is_grad_enabled()))
            return dy * 2.0

    with amp(core.AmpLevel.O1, "bfloat16"):
        y, z = recompute(Probe.apply, tensor([1.0]) * 1.0), Probe.apply(tensor([1.0]) * 1.0)
    y.sum().backward()
    z.sum().backward()
    assert seen[0] == seen[1]


def test_the_replay_records_and_leaves_grad_mode_as_it_was():
    modes = []

    def region(a):
        modes.append(paddle.is_grad_enabled())
        return a * 2.0

    loss = recompute(region, tensor([1.0]) * 1.0).sum()
    with paddle.no_grad():
        loss.backward()
        assert not paddle.is_grad_enabled()
    assert paddle.is_grad_enabled()
    assert modes == [False, True]


def test_amps_master_grad_hook_runs_after_the_whole_backward(monkeypatch):
    """Every backward runs and forgets the final hooks, also one inside another."""
    state = amp_module.amp_global_state()
    w, v = param([2.0]), param([3.0])
    runs = []
    monkeypatch.setattr(
        core.eager,
        "set_master_grads",
        lambda params: runs.append([p.grad is not None for p in params]),
    )
    monkeypatch.setattr(state, "use_master_grad", True)
    monkeypatch.setattr(state, "model_parameters", [w, v])
    monkeypatch.setattr(state, "already_register_final_backward_hook", False)
    monkeypatch.setattr(state, "already_classify_params_meshes", True, raising=False)

    def step(run):
        runs.clear()
        w.clear_gradient(False), v.clear_gradient(False)
        with pytest.warns(UserWarning, match="makes no effect"), paddle.amp.auto_cast(level="O1"):
            y = run(lambda a: a * w, tensor([1.0]) * v)
        y.sum().backward()
        return runs[-1], state.already_register_final_backward_hook

    assert step(plain) == ([True, True], False)
    assert step(recompute) == ([True, True], False)


def test_a_stream_that_refuses_to_be_put_back_does_not_keep_the_others(monkeypatch):
    x = tensor([1.0] * 8)
    y = recompute(noisy, x * 1.0)
    draw()
    mark = random.getstate()
    monkeypatch.setattr(np.random, "set_state", lambda *_: 1 / 0)
    with pytest.raises(OSError, match="ZeroDivisionError"):
        y.sum().backward()
    monkeypatch.undo()
    assert random.getstate() == mark
    assert paddle.is_grad_enabled()


def test_streams_and_modes_are_put_back_when_the_replay_fails():
    def region(a):
        draw()
        if region.calls:
            raise ValueError("second time")
        region.calls += 1
        return a * 2.0

    region.calls = 0
    y = recompute(region, tensor([1.0]) * 1.0)
    state = np.random.get_state()[1].tolist(), random.getstate()
    paddle.seed(9)
    with pytest.raises(OSError, match="second time"):
        y.sum().backward()
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state
    got = values(paddle.rand([2]))
    paddle.seed(9)
    assert values(paddle.rand([2])) == got


def test_counting_itself():
    counted = Counted(noisy)
    recompute(counted, tensor([1.0]) * 1.0).sum().backward()
    assert counted.calls == 2


@pytest.mark.parametrize(
    "drawing",
    [
        lambda: float(np.random.normal()),
        lambda: float(np.random.rand()),
        random.random,
        lambda: random.gauss(0.0, 1.0),
    ],
    ids=["numpy normal", "numpy rand", "random", "gauss"],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_stream_is_left_out_only_if_nothing_at_all_was_drawn(drawing, before):
    """A cached Gaussian is used up without a step of the generator."""

    def scenario(run):
        random.seed(3), np.random.seed(3)
        for _ in range(before):
            drawing()
        x = tensor([2.0])
        y = run(lambda a: a * a * drawing(), x * 1.0)
        y.sum().backward()
        return values(y), values(x.grad), np.random.rand(), random.random()

    same(scenario)


def test_a_stream_from_which_nothing_was_drawn_is_not_set(monkeypatch):
    def refuse(*_):
        raise AssertionError("a stream was set that nobody had touched")

    monkeypatch.setattr(np.random, "set_state", refuse)
    monkeypatch.setattr(random, "setstate", refuse)
    x = tensor([3.0])
    recompute(lambda a: paddle.nn.functional.dropout(a, 0.0) * a, x * 1.0).sum().backward()
    assert values(x.grad) == [6.0]


@pytest.mark.parametrize("run", MODES)
def test_an_amp_state_that_the_function_leaves_behind_ends_with_the_replay(run):
    """It started from that of the first run, so there was nothing to set before."""

    before = tracer()._amp_dtype

    def region(a):
        y = paddle.exp(a)
        tracer()._amp_dtype = "bfloat16"
        return y * a

    assert before != "bfloat16"
    y = run(region, tensor([1.0]) * 1.0)
    assert tracer()._amp_dtype == "bfloat16"  # as a call of it would leave it
    tracer()._amp_dtype = before
    y.backward()
    assert tracer()._amp_dtype == before
