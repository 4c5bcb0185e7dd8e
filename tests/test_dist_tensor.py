"""Parameters that are dist tensors: they work, on the one process that a test has."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import pytest
from paddle.base.framework import EagerParamBase
from support import FusedLinear, param, plain, tensor, values

from paramproxy import ParamLeaf, ParamView, detach, grads, recompute, unwrap


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def w():
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    made = dist.shard_tensor(param([[1.0], [3.0]]), mesh, [dist.Replicate()], stop_gradient=False)
    assert isinstance(made, EagerParamBase)
    assert made.is_dist()
    return made


def shard_like(w, x):
    made = dist.shard_tensor(x, w.process_mesh, w.placements)
    made.stop_gradient = x.stop_gradient
    return made


def test_has_a_view_and_a_leaf_of_its_kind(w):
    w.main_grad = paddle.zeros([2, 1])
    view = ParamView(w)
    assert type(view.leaf) is ParamLeaf
    assert view.leaf.is_dist()
    assert view.leaf.main_grad is w.main_grad
    assert unwrap(view.leaf) is w


def test_detach_and_grads(w):
    x, leaf = detach((shard_like(w, tensor([[1.0, 2.0]])), w))
    paddle.matmul(x, leaf).sum().backward()
    assert [values(g) for g in grads((x, leaf))] == [[[1.0, 3.0]], [[1.0], [2.0]]]
    assert w.grad is None


def test_recompute_gives_what_the_call_gives(w):
    def step(run):
        w.clear_gradient(False)
        x = shard_like(w, tensor([[1.0, 2.0]]))
        run(lambda a, b: paddle.tanh(paddle.matmul(a, b)), x, w).sum().backward()
        return values(x.grad), values(w.grad)

    assert step(recompute) == step(plain)


def test_a_fused_gradient_reaches_main_grad(w):
    w.main_grad = shard_like(w, paddle.zeros([2, 1]))
    x = shard_like(w, tensor([[1.0, 2.0]]))
    recompute(FusedLinear.apply, x, w).sum().backward()
    assert values(w.main_grad) == [[1.0], [2.0]]
