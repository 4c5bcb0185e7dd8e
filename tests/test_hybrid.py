"""`recompute_hybrid`: among ranks that hold the same activations. Two real ranks: distributed/."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import paddle
import pytest
from support import FusedLinear, allocated, param, tensor, values

from paramproxy import recompute_hybrid
from paramproxy._placement import Placement


@attrs.define
class Ranks:
    """A group in one process: what the other ranks hold is given."""

    nranks: int = 2
    rank: int = 0
    others: float | None = None
    whole: Any = None
    gathered: int = 0

    def all_gather(self, whole, part, group):
        assert group is self
        assert len(whole) == len(part) * self.nranks
        self.gathered += 1
        start = len(part) * self.rank
        if self.others is None:
            whole[:] = self.whole.flatten()
            np.testing.assert_array_equal(whole[start : start + len(part)].numpy(), part.numpy())
        else:
            whole[:] = self.others
            whole[start : start + len(part)] = part


@pytest.fixture
def ranks(monkeypatch):
    group = Ranks()
    monkeypatch.setattr(paddle.distributed.stream, "all_gather", group.all_gather)
    return group


MODES = [True, False]


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("partition", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_it_gives_what_the_call_gives(monkeypatch, use_reentrant, partition, offload):
    monkeypatch.setattr("paramproxy._placement.can_be_offloaded", lambda t: offload)
    monkeypatch.setattr("paramproxy._placement.to_host", lambda t: t.clone().detach())
    group = Ranks()
    monkeypatch.setattr(paddle.distributed.stream, "all_gather", group.all_gather)
    ctx = {
        "mp_group": group,
        "offload": offload,
        "partition": partition,
        "use_reentrant": use_reentrant,
    }
    x, w = tensor(np.arange(6.0).reshape(2, 3)), param(np.ones((3, 2)))
    w.main_grad = paddle.zeros([3, 2])
    h = x * 1.0
    group.whole = h.detach()
    calls = []

    def block(h, w, mask=None):
        calls.append(1)
        return FusedLinear.apply(h, w), 7, mask

    y, seven, mask = recompute_hybrid(ctx, block, h, w, mask=None)
    y.sum().backward()
    assert (seven, mask, len(calls)) == (7, None, 2)
    assert values(x.grad) == [[2.0] * 3] * 2
    assert values(w.main_grad) == [[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]
    assert group.gathered == int(partition)


def test_each_rank_keeps_its_part_only(ranks):
    def kept(partition):
        x = tensor(np.ones((256, 256)))
        before = allocated()
        y = recompute_hybrid(
            {"mp_group": ranks, "partition": partition}, paddle.exp, (x * 1.0).reshape([-1])
        ).sum()
        held = allocated() - before
        del y
        return held

    assert kept(True) <= kept(False) / 2 + 512


@pytest.mark.parametrize("use_reentrant", MODES)
def test_what_is_not_the_same_on_every_rank_is_found(ranks, use_reentrant):
    """As under sequence parallelism: Paddle's takes another rank's activation for its own."""
    ranks.others = 5.0
    x = tensor(np.ones((4, 4)))
    ctx = {"mp_group": ranks, "partition": True, "use_reentrant": use_reentrant}
    y = recompute_hybrid(ctx, paddle.exp, x * 1.0)
    with pytest.raises(OSError, match="argument 0 was not the same on every rank of mp_group"):
        y.sum().backward()


def test_a_nan_is_the_same_as_itself(ranks):
    x = tensor([float("nan"), 1.0])
    h = x * 1.0
    ranks.whole = h.detach()
    recompute_hybrid({"mp_group": ranks, "partition": True}, paddle.exp, h).sum().backward()
    assert ranks.gathered == 1


@pytest.mark.parametrize("make", [
    pytest.param(lambda: tensor(np.ones(3)), id="odd"),
    pytest.param(lambda: tensor(np.ones((0, 2))), id="empty"),
    pytest.param(lambda: tensor(np.ones((4, 4))).transpose([1, 0]), id="strided"),
    pytest.param(lambda: paddle.ones([2]).cast("bool"), id="bool"),
    pytest.param(lambda: paddle.ones([2, 2]).to_sparse_coo(2), id="sparse"),
])  # fmt: skip
def test_what_cannot_be_parted_stays_whole(ranks, make):
    t = make()
    assert Placement(partitioned=[0], group=ranks).put(0, t) == (t, None)


def test_a_group_of_one_parts_nothing():
    t = tensor([1.0, 2.0])
    assert Placement(partitioned=[0], group=Ranks(nranks=1)).put(0, t) == (t, None)


def test_without_a_gradient_nothing_is_gathered(ranks):
    """Of two outputs that nobody uses, the zeros have the shape of the whole."""
    x = tensor(np.ones((2, 2)))
    h = x * 1.0
    y = recompute_hybrid({"mp_group": ranks, "partition": True}, lambda a: (a * 2, a * 3), h)
    (y[0].detach().sum() + h.sum()).backward()
    assert values(x.grad) == [[1.0] * 2] * 2
    assert ranks.gathered == 0


@pytest.mark.parametrize("ctx", [{}, {"mp_group": None}])
def test_a_ctx_without_a_group_is_refused(ctx):
    with pytest.raises(ValueError, match="there is no mp_group in ctx"):
        recompute_hybrid(ctx, paddle.exp, tensor([1.0]))


def test_what_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="Cannot call recompute_hybrid: expected a dict as ctx"):
        recompute_hybrid(None, paddle.exp, tensor([1.0]))
