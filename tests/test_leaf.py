"""`ParamLeaf`: a parameter as kernels see it."""

from __future__ import annotations

import gc
import weakref

import paddle
import pytest
from paddle.base import core
from paddle.base.framework import EagerParamBase
from support import param, tensor, values

from paramproxy import NoStorageError, ParamLeaf, ParamView, detach, grads, unwrap


@pytest.fixture
def w():
    made = param([1.0, 2.0])
    made.main_grad = paddle.zeros([2])
    return made


@pytest.fixture
def leaf(w):
    return detach(w)


def test_is_a_real_parameter_for_kernels(w, leaf):
    assert isinstance(leaf, EagerParamBase)
    assert values(paddle.concat([leaf, leaf])) == [1.0, 2.0, 1.0, 2.0]
    assert values(paddle.add(leaf, w)) == [2.0, 4.0]


def test_shares_the_buffer_and_the_version_counter(w, leaf):
    assert leaf.data_ptr() == w.data_ptr()
    with paddle.no_grad():
        w.add_(paddle.ones([2]))
        leaf.add_(paddle.ones([2]))
    assert values(leaf) == values(w) == [3.0, 4.0]
    assert leaf.inplace_version == w.inplace_version == 2


def test_copies_nothing(w):
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    leaves = [detach(w) for _ in range(10)]
    assert core.host_memory_stat_current_value("Allocated", 0) <= before
    assert len(leaves) == 10


def test_is_an_autograd_leaf_of_its_own(w, leaf):
    (leaf * 3.0).sum().backward()
    assert values(leaf.grad) == [3.0, 3.0]
    assert w.grad is None
    assert leaf.is_leaf


def test_can_not_be_made_by_hand():
    with pytest.raises(TypeError, match=r"Use ParamView\(param\)\.leaf"):
        ParamLeaf([2], "float32")


@pytest.mark.parametrize("trainable", [True, False])
def test_has_the_flag_of_the_parameter(trainable):
    w = param([1.0], trainable=trainable)
    assert detach(w).stop_gradient is not trainable
    assert detach(w).trainable is trainable


def test_has_every_attribute_of_the_parameter(w, leaf):
    w.is_distributed = True
    w.color = {"color": 1}
    w.tag = []
    assert leaf.main_grad is w.main_grad
    assert leaf.is_distributed is True
    assert leaf.color is w.color
    assert leaf.tag is w.tag
    assert leaf.name == w.name
    assert leaf.optimize_attr is w.optimize_attr
    assert not hasattr(leaf, "missing")
    assert vars(leaf) == vars(w)


def test_writes_and_deletes_reach_the_parameter(w, leaf):
    leaf.tag = 1
    leaf.main_grad = None
    leaf.name = "renamed"
    assert w.tag == 1
    assert w.main_grad is None
    assert w.name == "renamed"
    del leaf.tag
    assert not hasattr(w, "tag")
    with pytest.raises(AttributeError):
        del leaf.tag


def test_an_attribute_may_have_the_name_of_a_method_or_of_a_slot(w, leaf):
    w.clone = "mine"
    leaf._origin = "theirs"
    assert leaf.clone == "mine"
    assert w._origin == "theirs"
    assert leaf._origin == "theirs"
    assert leaf.main_grad is w.main_grad


def test_setting_the_flag_reaches_both(w, leaf):
    leaf.stop_gradient = True
    assert w.stop_gradient
    assert (leaf * 2.0).stop_gradient
    leaf.trainable = True
    assert not w.stop_gradient
    assert not (leaf * 2.0).stop_gradient


def test_new_data_reaches_both(w, leaf):
    leaf.data = tensor([7.0, 8.0])
    assert values(w) == values(leaf) == [7.0, 8.0]
    leaf.set_value(paddle.zeros([2]))
    assert values(w) == values(leaf) == [0.0, 0.0]


def test_freeing_it_frees_the_parameter(w, leaf):
    leaf._clear_dataptr()
    assert not w._is_initialized()
    assert not leaf._is_initialized()


def test_a_property_of_the_parameters_own_class_is_found(w):
    class Special(EagerParamBase):
        @property
        def shard_axis(self):
            return self.main_grad.shape[0] - 1

    special = Special([2], "float32")
    special._set_impl(paddle.ones([2]))
    special.main_grad = paddle.zeros([2])
    assert detach(special).shard_axis == 1


def test_what_a_subclass_overrides_is_in_force_on_its_leaves():
    class Scaled(EagerParamBase):
        def numpy(self):
            return super().numpy() * 10.0

    scaled = Scaled([1], "float32")
    scaled._set_impl(paddle.ones([1]))
    leaf = detach(scaled)
    assert isinstance(leaf, Scaled)
    assert isinstance(leaf, ParamLeaf)
    assert values(leaf) == [10.0]
    assert unwrap(leaf) is scaled


def test_a_parameter_without_elements_has_a_leaf():
    w = EagerParamBase([0, 3], "float32")
    assert list(detach(w).shape) == [0, 3]


def test_a_frozen_one_refuses_a_hook_as_a_parameter_does(w, leaf):
    leaf.stop_gradient = True
    with pytest.raises(RuntimeError, match="Cannot register hook on a tensor that stop gradient"):
        leaf.register_hook(print)


def test_gradient_values_are_its_own_until_they_are_handed_over(w, leaf):
    (leaf * 3.0).sum().backward()
    assert values(leaf.grad) == values(leaf._grad_ivar()) == [3.0, 3.0]
    leaf.clear_gradient(False)
    assert leaf.grad is None
    leaf.grad = tensor([5.0, 5.0], grad=False)
    assert [values(g) for g in grads(leaf)] == [[5.0, 5.0]]
    assert w.grad is None


def test_gradient_values_are_the_parameters_once_handed_over(w, leaf):
    (leaf * 3.0).sum().backward()
    grads(leaf)
    assert leaf.grad is None
    leaf.grad = tensor([9.0, 9.0], grad=False)
    assert values(w.grad) == [9.0, 9.0]
    assert values(leaf._grad_ivar()) == [9.0, 9.0]
    leaf.clear_gradient(False)
    assert w.grad is None


def test_its_hook_sees_its_gradient_and_can_be_removed(w, leaf):
    seen = []
    handle = leaf.register_hook(lambda grad: seen.append(values(grad)))
    (leaf * 2.0).sum().backward()
    assert handle.remove() is True
    assert handle.remove() is False
    (leaf * 2.0).sum().backward()
    (w * 2.0).sum().backward()
    assert seen == [[2.0, 2.0]]


def test_its_hook_is_the_parameters_once_handed_over(w, leaf):
    seen = []
    grads(leaf)
    leaf.register_hook(lambda grad: seen.append(values(grad)))
    (w * 4.0).sum().backward()
    assert seen == [[4.0, 4.0]]


def test_notification_is_always_the_parameters(w, leaf):
    seen = []
    leaf._register_backward_hook(lambda: seen.append("backward"))
    number = leaf._register_grad_hook(lambda grad: seen.append("grad"))
    (leaf * 2.0).sum().backward()
    assert seen == []
    (w * 2.0).sum().backward()
    assert sorted(seen) == ["backward", "grad"]
    assert leaf._remove_grad_hook(number)
    (w * 2.0).sum().backward()
    assert sorted(seen) == ["backward", "backward", "grad"]


@pytest.mark.skipif(
    not hasattr(core.eager.Tensor, "_apply_backward_hook"),
    reason="this Paddle has no _apply_backward_hook",
)
def test_applying_the_backward_hook_tells_the_parameters_listeners(w, leaf):
    seen = []
    w._register_backward_hook(lambda: seen.append("told"))
    leaf._apply_backward_hook()
    assert seen == ["told"]


def test_hashes_and_shows_as_the_parameter(w, leaf):
    assert hash(leaf) == hash(w)
    assert repr(leaf).startswith(f"ParamLeaf of {w.name!r}: Parameter containing")


def test_dies_without_the_garbage_collector(w):
    gc.collect()
    gc.disable()
    try:
        dead = weakref.ref(detach(w))
        assert dead() is None
        kept = weakref.ref(w)
        leaf = ParamView(w).leaf
        del leaf
        assert kept() is w
    finally:
        gc.enable()


def test_refuses_a_parameter_without_storage(w):
    w._clear_dataptr()
    with pytest.raises(NoStorageError) as caught:
        detach(w)
    assert str(caught.value) == (
        f"Cannot make a leaf of parameter {w.name!r}: it has no storage now. Initialize it "
        "(LazyGuard), or gather it again (sharding) first."
    )
