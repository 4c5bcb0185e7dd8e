"""Every member of Tensor that could bind to a leaf in silence has its place."""

from __future__ import annotations

import re

import pytest
from paddle.base import core
from paddle.base.framework import EagerParamBase
from support import param

from paramproxy import _leaf, detach


# Words in the name of a member that holds a gradient, a hook, a flag, a
# storage or a place in the graph. `clip_grad`-like members would match too.
STATEFUL = re.compile(
    r"grad|hook|version|share|clear|clone|detach|leaf|backward|impl$|^data$|persist|^name$"
    r"|reconstruct|initialize|trainable|init_func"
)
PLACES = {
    "GRADIENT": _leaf.GRADIENT,
    "NOTIFICATION": _leaf.NOTIFICATION,
    "SHARED_STATE": _leaf.SHARED_STATE,
    "IDENTITY": _leaf.IDENTITY,
    "GRAPH": _leaf.GRAPH,
}
# Match, but ask something that is the same of both.
HARMLESS = {"_is_initialized", "__init_subclass__", "__subclasshook__"}


def test_every_stateful_member_has_exactly_one_place():
    stateful = {name for name in dir(EagerParamBase) if STATEFUL.search(name)} - HARMLESS
    placed = [name for place in PLACES.values() for name in place]
    assert len(placed) == len(set(placed))
    assert stateful - set(placed) == set()


def test_every_writable_field_that_lives_in_c_has_a_place():
    """A getset descriptor with a setter would otherwise write to the leaf alone."""
    tensor = param([1.0])
    fields = [
        name
        for name, member in vars(core.eager.Tensor).items()
        if type(member).__name__ == "getset_descriptor" and not name.startswith("__")
    ]
    placed = set().union(*PLACES.values())
    for name in set(fields) - placed:
        with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError)):
            setattr(tensor, name, getattr(tensor, name))


@pytest.mark.parametrize("name", sorted(_leaf.SHARED_STATE))
def test_state_that_is_shared_is_written_on_both(name):
    """Each is defined on the leaf, or is a field that `__setattr__` writes twice."""
    if not hasattr(core.eager.Tensor, name) and not hasattr(EagerParamBase, name):
        return
    fields = ("data", "requires_grad", "stop_gradient", "trainable")
    assert name in fields or name in vars(_leaf.ParamLeaf)


def test_the_gradient_members_change_sides_when_handed_over():
    w = param([1.0, 2.0])
    leaf = detach(w)
    (w * 2.0).sum().backward()
    (leaf * 3.0).sum().backward()
    assert leaf.grad.numpy().tolist() == [3.0, 3.0]
    _leaf.take_gradient(leaf)
    assert leaf.grad.numpy().tolist() == [2.0, 2.0]
    for name in _leaf.GRADIENT & set(dir(w)):
        if callable(getattr(w, name, None)):
            assert getattr(leaf, name).__self__ is w
