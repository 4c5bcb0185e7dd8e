"""Policies: which saved tensors are kept, moved to the host or computed again."""

from __future__ import annotations

import functools

import numpy as np
import paddle
import pytest
from support import MODES, Counted, FusedLinear, held, hooked, param, same, tensor, values

import paramproxy
from paramproxy import (
    Decision,
    SavedTensor,
    offload_over,
    recompute,
    save_everything,
    save_nothing,
    save_ops,
    save_under,
)


SIZE = 2**14
BYTES = 4 * SIZE


def region(a):
    """Saves a vector, its mean, a vector, a vector."""
    b = paddle.tanh(a)
    c = paddle.exp(b.mean())
    return paddle.exp(paddle.tanh(b)) * c


POLICIES = {
    "nothing": save_nothing,
    "everything": save_everything,
    "small ones": save_under(BYTES),
    "none so small": save_under(4),
    "tanh": save_ops("tanh"),
    "exp or small": save_ops("exp") | save_under(64),
    "no such op": save_ops("conv2d"),
    "large ones to the host": offload_over(64),
    "large ones to the host, the rest kept": offload_over(64) | save_everything,
    "my own": lambda saved: Decision.SAVE if saved.shape else Decision.RECOMPUTE,
    "mine or theirs": (lambda saved: Decision.RECOMPUTE) | save_ops("tanh"),
}


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("run", MODES)
def test_gradients_are_right_with_every_policy(name, run):
    def scenario(run):
        x, w = tensor(np.linspace(0, 1, 8)), param(np.full(8, 0.5))
        y = run(lambda a, p: region(a * p), x * 1.0, w, policy=POLICIES[name])
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("name", list(POLICIES))
def test_gradients_are_right_in_nested_regions(name):
    def scenario(run):
        x = tensor(np.linspace(0, 1, 8))
        inner = functools.partial(run, region, policy=POLICIES[name])
        run(lambda a: inner(inner(a * 0.1)), x * 1.0, policy=POLICIES[name]).sum().backward()
        return values(x.grad)

    same(scenario, runs=(hooked,))


@pytest.mark.parametrize(
    ("policy", "vectors", "replays"),
    [
        (save_nothing, 2, 1),
        (save_everything, 5, 0),
        (save_under(BYTES), 2, 1),
        (save_ops("tanh"), 4, 1),
        (save_ops("tanh") | save_ops("exp", "multiply", "mean"), 5, 0),
        (save_ops("exp") | save_nothing, 3, 1),
    ],
)
def test_bytes_and_replays(policy, vectors, replays):
    x, counted = tensor(np.zeros(SIZE)), Counted(region)
    kept = held(lambda: hooked(region, x * 1.0, policy=policy))
    assert kept / BYTES == pytest.approx(vectors, abs=0.1)
    hooked(counted, x * 1.0, policy=policy).sum().backward()
    assert counted.calls == 1 + replays


def told(function, *args):
    """What a policy is told while `function` runs."""
    seen = []
    recompute(function, *args, policy=lambda saved: seen.append(saved) or Decision.RECOMPUTE)
    return seen


def test_what_it_is_told():
    (saved,) = told(lambda a: paddle.exp(a), tensor([[1.0, 2.0]]))
    assert saved == SavedTensor(shape=(1, 2), dtype=paddle.float32, nbytes=8, ops=saved.ops)
    assert saved.ops == ("exp",)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda a: a * a, "multiply"),
        (lambda a: a @ a, "matmul"),
        (lambda a: a / a, "divide"),
        (lambda a: a.tanh(), "tanh"),
        (lambda a: paddle.matmul(a, a), "matmul"),
        (lambda a: paddle.nn.functional.softmax(a), "softmax"),
        (lambda a: paddle.nn.functional.gelu(a), "gelu"),
        (lambda a: paddle.nn.functional.linear(a, a), "linear"),
        (paddle.nn.LayerNorm(2), "layer_norm"),
        (lambda a: FusedLinear.apply(a, a), "FusedLinear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_op_that_saves(function, op):
    seen = told(function, tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert seen
    assert all(op in saved.ops for saved in seen)


def test_offload_moves_to_the_host_and_back(monkeypatch):
    """On a CPU there is nothing to move, so the moves are watched."""
    moves = []
    monkeypatch.setattr("paramproxy._saved.can_be_offloaded", lambda t: True)
    monkeypatch.setattr(
        "paramproxy._saved.to_host", lambda t: moves.append(list(t.shape)) or t.clone().detach()
    )
    x, counted = tensor(np.linspace(0, 1, 8)), Counted(region)
    y = hooked(counted, x * 1.0, policy=offload_over(8) | save_everything)
    assert moves == [[8]] * 4
    y.sum().backward()
    assert counted.calls == 1
    again = tensor(np.linspace(0, 1, 8))
    region(again * 1.0).sum().backward()
    assert values(x.grad) == values(again.grad)


def test_what_is_on_the_host_is_recomputed_instead():
    counted = Counted(region)
    hooked(counted, tensor(np.zeros(8)) * 1.0, policy=offload_over(0)).sum().backward()
    assert counted.calls == 2


def test_the_first_answer_that_keeps_holds():
    def never(saved):
        raise AssertionError

    saved = SavedTensor((2,), paddle.float32, 8, ("exp",))
    assert (save_everything | never)(saved) is Decision.SAVE
    assert (save_nothing | offload_over(4))(saved) is Decision.OFFLOAD
    assert (offload_over(4) | save_everything)(saved) is Decision.OFFLOAD
    assert (save_under(8) | save_nothing)(saved) is Decision.RECOMPUTE
    assert [bool(d) for d in (Decision.RECOMPUTE, Decision.SAVE, Decision.OFFLOAD)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("run", MODES)
def test_an_answer_that_is_no_decision_is_refused_at_once(run):
    with pytest.raises(TypeError) as caught:
        run(region, tensor([1.0]) * 1.0, policy=lambda saved: True)
    assert "Cannot take True from the policy" in str(caught.value)
    assert "expected Decision.SAVE, Decision.RECOMPUTE or Decision.OFFLOAD." in str(caught.value)


def test_an_error_of_a_policy_is_its_own():
    def fails(saved):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hooked(region, tensor([1.0]) * 1.0, policy=fails)
    assert paddle.is_grad_enabled()


def test_a_saved_tensor_that_is_changed_later_is_refused_as_without():
    def overwrites(a):
        b = paddle.exp(a)
        b.add_(paddle.ones([1]))
        return b

    y = hooked(overwrites, tensor([1.0]) * 1.0, policy=save_everything)
    with pytest.raises(OSError, match="changed in place since"):
        y.sum().backward()


def test_the_ready_made_ones_are_public():
    for name in ("save_nothing", "save_everything", "save_under", "save_ops", "offload_over"):
        assert name in paramproxy.__all__
