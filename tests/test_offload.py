"""`offload_indices`: arguments that wait for backward in host memory."""

from __future__ import annotations

import paddle
import pytest
from support import param, same, tensor, values

from paramproxy import recompute
from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES
from paramproxy._placement import Placement


def test_positions_are_those_of_the_call_and_the_callers_tensor_stays_usable():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        h = x * 1.0
        y = run(lambda flag, a, b: a * b * flag, 2, h, w, offload_indices=[1])
        y.sum().backward()
        return values(x.grad), values(w.grad), values(h), h.stop_gradient

    same(scenario, ([6.0, 8.0], [2.0, 4.0], [1.0, 2.0], False))


def test_keywords_and_containers_can_be_named():
    def scenario(run):
        x = tensor([1.0, 2.0])
        y = run(lambda box, *, m: box["a"] * m, {"a": x * 1.0}, m=x * 3.0, offload_indices=[0, "m"])
        y.sum().backward()
        return values(x.grad)

    same(scenario, [6.0, 12.0])


def test_what_is_named_is_brought_to_the_host_and_back(monkeypatch):
    """On a CPU there is nothing to move, so the moves are watched."""
    moves = []
    monkeypatch.setattr("paramproxy._placement.can_be_offloaded", lambda t: True)
    monkeypatch.setattr(
        "paramproxy._placement.to_host", lambda t: moves.append("host") or t.clone().detach()
    )
    x, h = tensor([1.0, 2.0]), tensor([5.0, 5.0])
    y = recompute(lambda a, b: a * b, x * 1.0, h * 1.0, offload_indices=(0,))
    assert moves == ["host"]
    _, placed = Placement(offloaded=[0]).put(0, x)
    assert str(placed.place) == str(x.place)
    y.sum().backward()
    assert values(x.grad) == [5.0, 5.0]


def test_a_parameter_stays_where_it_is_with_a_warning():
    w = param([3.0])
    with pytest.warns(
        UserWarning, match="which stays where it is: a parameter is not an activation"
    ) as caught:
        y = recompute(lambda a, b: a * b, tensor([1.0]) * 1.0, w, offload_indices=[1])
    assert caught[0].filename == __file__
    y.sum().backward()
    assert values(w.grad) == [1.0]


@pytest.mark.parametrize("index", [2, -1, "missing"])
def test_what_is_no_argument_is_refused(index):
    with pytest.raises(ValueError, match="Cannot offload argument") as caught:
        recompute(lambda a, *, b: a * b, tensor([1.0]), b=tensor([1.0]), offload_indices=[index])
    assert "1 positional arguments and the keywords ['b']" in str(caught.value)


def test_a_host_tensor_is_not_copied():
    h = tensor([1.0, 2.0]) * 1.0
    assert Placement(offloaded=[0]).put(0, h) == (h, None)
    assert isinstance(paddle.CPUPlace(), type(h.place)) or h.place.is_cpu_place()


def test_a_position_in_the_signature_finds_an_argument_that_was_passed_by_its_keyword(monkeypatch):
    """Paddle's own counts there, because it makes positions of all keywords."""
    moved = []
    monkeypatch.setattr("paramproxy._placement.can_be_offloaded", lambda t: True)
    monkeypatch.setattr(
        "paramproxy._placement.to_host", lambda t: moved.append(values(t)) or t.clone().detach()
    )

    def region(a, b, c=None, d=None):
        return a * b

    for offload_indices, expected in (([1], [[5.0]]), ([2], []), ((0, 1, 3), [[2.0], [5.0]])):
        x = tensor([2.0])
        y = recompute(region, x * 1.0, b=tensor([5.0]) * 1.0, offload_indices=offload_indices)
        y.sum().backward()
        assert (moved, values(x.grad)) == (expected, [5.0])
        moved.clear()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_tags_of_an_offloaded_tensor_come_back_with_it(monkeypatch, use_reentrant):
    monkeypatch.setattr("paramproxy._placement.can_be_offloaded", lambda t: True)
    monkeypatch.setattr("paramproxy._placement.to_host", lambda t: t.clone().detach())
    seen = []

    def region(a):
        seen.append(getattr(a, "tag", None))
        return paddle.exp(a)

    h = tensor([1.0]) * 1.0
    if not TENSORS_HAVE_ATTRIBUTES:
        pytest.skip("a tensor of Paddle 2.6 takes no attributes")
    h.tag = "mine"
    recompute(region, h, offload_indices=[0], use_reentrant=use_reentrant).sum().backward()
    assert seen == ["mine", "mine"]
