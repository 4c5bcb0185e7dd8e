"""`ParamView`: a parameter as Python code sees it."""

from __future__ import annotations

import copy
import gc
import operator
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import paddle
import pytest
import wrapt
from paddle.base.framework import EagerParamBase
from support import param, tensor, values

from paramproxy import (
    InPlaceOperatorError,
    NoStorageError,
    NotAParameterError,
    ParamLeaf,
    ParamView,
    UnsupportedError,
    detach,
    grads,
    unwrap,
)


@pytest.fixture
def w():
    made = param([[1.0, 2.0], [3.0, 4.0]])
    made.main_grad = paddle.zeros([2, 2])
    return made


def test_is_a_wrapt_proxy_of_the_parameter(w):
    view = ParamView(w)
    assert isinstance(view, wrapt.BaseObjectProxy)
    assert view.__wrapped__ is w
    assert isinstance(view, ParamView)


def test_passes_for_a_parameter(w):
    assert isinstance(ParamView(w), EagerParamBase)
    assert paddle.is_tensor(ParamView(w))


def test_reads_every_attribute_from_the_parameter(w):
    w.tag = object()
    view = ParamView(w)
    assert view.main_grad is w.main_grad
    assert view.tag is w.tag
    assert view.name == w.name
    assert list(view.shape) == [2, 2]
    assert view.dtype == w.dtype
    assert not hasattr(view, "missing")


def test_sees_what_is_set_on_the_parameter_later(w):
    view = ParamView(w)
    w.later = 1
    w.main_grad = None
    assert view.later == 1
    assert view.main_grad is None


def test_writes_and_deletes_on_the_parameter(w):
    view = ParamView(w)
    view.tag = "x"
    view.main_grad = buffer = paddle.ones([2, 2])
    view.stop_gradient = True
    assert w.tag == "x"
    assert w.main_grad is buffer
    assert w.stop_gradient
    del view.tag
    assert not hasattr(w, "tag")


def test_shows_and_takes_the_gradient_of_the_parameter(w):
    view = ParamView(w)
    (w * w).sum().backward()
    assert values(view.grad) == [[2.0, 4.0], [6.0, 8.0]]
    view.clear_gradient(False)
    assert w.grad is None


def test_calls_methods_on_the_parameter(w):
    ParamView(w).set_value(paddle.zeros([2, 2]))
    assert values(w) == [[0.0, 0.0], [0.0, 0.0]]


def test_of_a_view_or_a_leaf_is_of_the_one_original(w):
    view = ParamView(w)
    assert ParamView(view).__wrapped__ is w
    assert ParamView(view.leaf).__wrapped__ is w
    assert ParamView(ParamView(view.leaf)).__wrapped__ is w


def test_can_not_be_pointed_at_another_object(w):
    view = ParamView(w)
    with pytest.raises(AttributeError, match="a view is of one parameter for life"):
        view.__wrapped__ = param([1.0])
    assert view.__wrapped__ is w


@pytest.mark.parametrize("thing", [1.0, None, "w", [1], object()])
def test_refuses_what_is_no_parameter(thing):
    with pytest.raises(NotAParameterError, match=f"Cannot view {type(thing).__name__} object"):
        ParamView(thing)


def test_refuses_an_ordinary_tensor_as_a_type_error():
    with pytest.raises(TypeError, match=r"Use tensor\.detach\(\) for an ordinary tensor"):
        ParamView(tensor([1.0]))


def test_names_what_it_is_a_view_of(w):
    assert repr(ParamView(w)).startswith(f"ParamView of {w.name!r}: Parameter containing")
    assert str(ParamView(w)) == repr(ParamView(w))


def test_hashes_and_compares_as_the_parameter(w):
    view = ParamView(w)
    assert hash(view) == hash(w)
    assert bool((view == w).all())
    assert values(view == paddle.zeros([2, 2])) == [[False, False], [False, False]]


def test_has_a_length_items_and_iteration_like_the_parameter(w):
    view = ParamView(w)
    assert len(view) == 2
    assert values(view[1]) == [3.0, 4.0]
    assert [values(row) for row in view] == [[1.0, 2.0], [3.0, 4.0]]
    assert float(ParamView(param(5.0))) == 5.0


def test_takes_part_in_operators_on_either_side_that_paddle_allows(w):
    view = ParamView(w)
    assert values(view @ w) == values(w @ w)
    assert values(view + 1.0) == values(w + 1.0)
    assert values(1.0 - view) == values(1.0 - w)
    assert values(-view) == values(-w)


def test_operators_build_the_graph_of_the_parameter(w):
    (ParamView(w) * 3.0).sum().backward()
    assert values(w.grad) == [[3.0, 3.0], [3.0, 3.0]]


IN_PLACE = ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"]


@pytest.mark.parametrize("name", [*IN_PLACE, "iand", "ior", "ixor", "ilshift", "irshift"])
def test_in_place_operators_act_on_the_parameter_or_refuse(w, name):
    view = held = ParamView(w)
    before, apply = values(w), getattr(operator, name)
    if hasattr(EagerParamBase, f"__{name}__"):
        with paddle.no_grad():
            assert apply(view, paddle.ones([2, 2])) is held
    else:
        with pytest.raises(InPlaceOperatorError, match=r"use view\."):
            apply(view, paddle.ones([2, 2]))
        assert values(w) == before
    assert held.__wrapped__ is w


def test_refusing_an_in_place_operator_names_the_remedy(w):
    if hasattr(EagerParamBase, "__iadd__"):
        return
    view = ParamView(w)
    with pytest.raises(InPlaceOperatorError) as caught:
        view += 1.0
    assert str(caught.value) == (
        f"Cannot apply += to the view of {w.name!r}: on a Paddle tensor it makes a new one and "
        "rebinds the name. To change the parameter, use view.add_(other) under paddle.no_grad(); "
        "for a new tensor, write `view + other`."
    )


def test_in_place_methods_change_the_parameter(w):
    with paddle.no_grad():
        ParamView(w).add_(paddle.ones([2, 2]))
    assert values(w) == [[2.0, 3.0], [4.0, 5.0]]


def test_owns_one_leaf_and_its_gradient(w):
    view = ParamView(w)
    assert view.leaf_grad is None
    assert type(view.leaf) is ParamLeaf
    assert view.leaf is view.leaf
    assert view.leaf_grad is None
    (view.leaf * w.main_grad).sum().backward()
    (view.leaf * 2.0).sum().backward()
    assert values(view.leaf_grad) == [[2.0, 2.0], [2.0, 2.0]]
    assert w.grad is None


def test_a_new_leaf_follows_when_the_gradient_was_handed_over(w):
    view = ParamView(w)
    for _ in range(3):
        (view.leaf * 2.0).sum().backward()
        assert [values(g) for g in grads(view)] == [[[2.0, 2.0], [2.0, 2.0]]]
    assert w.grad is None


def test_its_leaf_has_the_flag_and_the_storage_of_the_moment(w):
    view = ParamView(w)
    leaf = view.leaf
    view.stop_gradient = True
    assert view.leaf is leaf
    assert leaf.stop_gradient
    view.data = paddle.ones([2, 2])
    view.stop_gradient = False
    assert values(view.leaf) == [[1.0, 1.0], [1.0, 1.0]]
    assert view.leaf is leaf
    (view.leaf * 2.0).sum().backward()
    assert values(view.leaf_grad) == [[2.0, 2.0], [2.0, 2.0]]
    view._clear_dataptr()
    with pytest.raises(NoStorageError):
        _ = view.leaf


def test_numpy_leaves_the_operator_to_the_view(w):
    array = np.ones((2, 2), "float32")
    product = array * ParamView(w)
    assert isinstance(product, paddle.Tensor)
    product.sum().backward()
    assert values(w.grad) == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_compares_with_another_view(w, name):
    compare = getattr(operator, name)
    assert values(compare(ParamView(w), ParamView(w))) == values(compare(w, w))


def test_its_leaf_is_the_same_in_every_thread(w):
    for _ in range(50):
        view, leaves = ParamView(w), []
        threads = [threading.Thread(target=lambda: leaves.append(view.leaf)) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(leaf) for leaf in leaves}) == 1


def test_in_a_static_graph_there_is_no_leaf(w):
    paddle.enable_static()
    try:
        with pytest.raises(UnsupportedError, match="while a static graph is being built"):
            _ = ParamView(w).leaf
        with pytest.raises(UnsupportedError, match="Cannot detach while a static graph"):
            detach(w)
    finally:
        paddle.disable_static()


def test_unwrap_gives_the_original_and_leaves_the_rest(w):
    thing = object()
    assert unwrap(ParamView(w)) is w
    assert unwrap(ParamView(w).leaf) is w
    assert unwrap(w) is w
    assert unwrap(thing) is thing
    assert unwrap(None) is None


def test_a_subclass_of_the_view_is_a_view(w):
    class Mine(ParamView):
        pass

    view = Mine(w)
    assert unwrap(view) is w
    assert view.main_grad is w.main_grad


def test_dies_without_the_garbage_collector(w):
    gc.collect()
    gc.disable()
    try:
        view = ParamView(w)
        dead = weakref.ref(view.leaf)
        del view
        assert dead() is None
    finally:
        gc.enable()


def test_a_layer_that_holds_a_view_can_be_copied(w):
    layer = paddle.nn.Linear(2, 2)
    layer.held = ParamView(layer.weight)
    twin = copy.deepcopy(layer)
    assert twin.held is twin.weight


@pytest.mark.skipif("WRAPT_DISABLE_EXTENSIONS" in os.environ, reason="this is that run")
def test_works_the_same_on_wrapts_pure_python_build():
    """Everything in these files once more, without wrapt's C extension."""
    here = Path(__file__).parent
    files = [here / name for name in ("test_view.py", "test_leaf.py", "test_copying.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "WRAPT_DISABLE_EXTENSIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
