"""Copies of views and leaves: a parameter's worth of data, never a dangling proxy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import paddle
import pytest
from paddle.base import core
from support import param

from paramproxy import ParamLeaf, ParamView, detach


FACETS = {"view": ParamView, "leaf": detach}


@pytest.fixture(params=FACETS.values(), ids=FACETS.keys())
def facet(request):
    return request.param


def is_plain_data_of(copied, original):
    assert not isinstance(copied, ParamLeaf)
    assert type(copied) is not ParamView
    assert isinstance(copied, core.eager.Tensor)
    np.testing.assert_array_equal(copied.numpy(), original.numpy())
    assert copied.stop_gradient == original.stop_gradient
    before = original.numpy()
    with paddle.no_grad():
        copied.add_(paddle.ones_like(copied))
    np.testing.assert_array_equal(original.numpy(), before)


@pytest.mark.parametrize("trainable", [True, False])
def test_deepcopy_gives_a_parameter(facet, trainable):
    w = param([1.0, 2.0], trainable)
    w.optimize_attr["learning_rate"] = 0.5
    copied = copy.deepcopy(facet(w))
    assert type(copied) is type(w)
    assert vars(copied) == vars(copy.deepcopy(w))
    assert copied.optimize_attr == {"learning_rate": 0.5}
    assert copied.optimize_attr is not w.optimize_attr
    is_plain_data_of(copied, w)


def test_deepcopy_keeps_one_object_one(facet):
    w = param([1.0])
    first, second, third = copy.deepcopy([facet(w), facet(w), w])
    assert first is second is third


def test_copy_gives_data_of_its_own(facet):
    w = param([1.0, 2.0])
    is_plain_data_of(copy.copy(facet(w)), w)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_data_of_its_own(facet, protocol):
    w = param([[1.0, 2.0]])
    is_plain_data_of(pickle.loads(pickle.dumps(facet(w), protocol)), w)


def test_pickle_needs_no_paramproxy_to_load(facet):
    assert b"paramproxy" not in pickle.dumps(facet(param([1.0])))


def test_paddle_save_gives_data_of_its_own(facet, tmp_path):
    w = param([1.0, 2.0])
    path = str(tmp_path / "w.pdparams")
    paddle.save({"w": facet(w), "nested": [facet(w)]}, path)
    loaded = paddle.load(path)
    for copied in (loaded["w"], loaded["nested"][0]):
        np.testing.assert_array_equal(np.asarray(copied), w.numpy())


def test_paddle_save_of_one_alone(facet, tmp_path):
    w = param([1.0, 2.0])
    path = str(tmp_path / "w.pdtensor")
    paddle.save(facet(w), path)
    np.testing.assert_array_equal(np.asarray(paddle.load(path)), w.numpy())
