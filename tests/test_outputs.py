"""Outputs: flags, pass-through, unused ones, and what autograd is told."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from support import Counted, FusedLinear, Reverse, param, plain, same, tensor, values

from paramproxy import recompute


def flags(outputs):
    return [out.stop_gradient for out in outputs]


def test_what_is_computed_needs_a_gradient():
    assert recompute(lambda a: a * 2.0, tensor([1.0])).stop_gradient is False


def test_integers_and_masks_need_none():
    def scenario(run):
        x, mask = tensor([1.0, 2.0]), tensor([1.0, 0.0], grad=False)
        out = run(lambda a, m: (a * m, m, a > 1.0, paddle.argmax(a)), x * 1.0, mask)
        out[0].sum().backward()
        return flags(out), out[1] is mask, mask.stop_gradient, values(x.grad)

    same(scenario, ([False, True, True, True], True, True, [1.0, 0.0]))


def test_a_captured_mask_comes_back_as_itself():
    mask = tensor([1.0, 0.0], grad=False)
    _, out = recompute(lambda a: (a * mask, mask), tensor([1.0, 2.0]) * 1.0)
    assert out is mask
    assert mask.stop_gradient


def test_a_parameter_that_is_returned_comes_back_as_itself():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y, out = run(lambda a, b: (a * b, b), x * 1.0, w)
        (y * out).sum().backward()
        return out is w, values(x.grad), values(w.grad)

    same(scenario, (True, [9.0, 16.0], [6.0, 16.0]))


def test_an_input_that_is_returned_has_its_gradient_once():
    def scenario(run):
        x = tensor([1.0, 2.0])
        y, out = run(lambda a: (a * a, a), x * 1.0)
        (y * out).sum().backward()
        return values(out), out.stop_gradient, values(x.grad)

    same(scenario, ([1.0, 2.0], False, [3.0, 12.0]))


@pytest.mark.parametrize(
    "same_storage",
    [lambda a: a, lambda a: a.reshape(a.shape), lambda a: a[0:2], lambda a: a.flatten()],
    ids=["itself", "same shape", "full slice", "view"],
)
def test_an_output_on_the_storage_of_an_input_changes_nothing_about_the_input(same_storage):
    def scenario(run):
        x = tensor([1.0, 2.0])
        h = x * 3.0
        y = run(same_storage, h)
        (y * y + h).sum().backward()
        return values(y), values(x.grad)

    same(scenario, ([3.0, 6.0], [21.0, 39.0]))


def test_an_identity_layer_on_an_argument_is_replayed():
    def scenario(run):
        x = tensor([1.0, 2.0])
        run(lambda a: Reverse.apply(a), x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [-1.0, -1.0])


def test_a_region_whose_only_output_is_detached_leaves_the_rest_alone():
    def scenario(run):
        x = tensor([1.0, 2.0])
        stat = run(lambda a: (a * 3.0).detach(), x * 1.0)
        (x * x + stat).sum().backward()
        return stat.stop_gradient, values(x.grad)

    same(scenario, (True, [2.0, 4.0]))


def test_a_detached_tensor_that_is_written_into_still_has_a_gradient():
    def scenario(run):
        x = tensor([1.0, 2.0])

        def region(a):
            out = paddle.zeros([2]).detach()
            out[0] = a[1] * 3.0
            return out

        y = run(region, x * 1.0)
        y.sum().backward()
        return y.stop_gradient, values(x.grad)

    same(scenario, (False, [0.0, 3.0]))


def test_a_layer_that_returns_a_detached_tensor_still_has_a_gradient():
    class Clip(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return (x * 2.0).detach()

        @staticmethod
        def backward(ctx, dy):
            return dy * 5.0

    def scenario(run):
        x = tensor([1.0, 2.0])
        y = run(Clip.apply, x * 1.0)
        y.sum().backward()
        return y.stop_gradient, values(x.grad)

    same(scenario, (False, [5.0, 5.0]))


def test_a_frozen_block_on_data_needs_no_gradient():
    def scenario(run):
        layer = paddle.nn.Linear(2, 2)
        for p in layer.parameters():
            p.stop_gradient = True
        return run(layer, tensor([[1.0, 2.0]], grad=False)).stop_gradient

    same(scenario, True)


def test_captured_parameters_get_gradients_where_no_input_needs_one():
    def scenario(run):
        w = param([2.0, 3.0])
        region = Counted(lambda a: a * w * w)
        y = run(region, tensor([1.0, 4.0], grad=False))
        y.sum().backward()
        return y.stop_gradient, values(w.grad)

    same(scenario, (False, [4.0, 24.0]))


def test_parameters_hidden_behind_a_global_function_get_gradients_too():
    y = recompute(_hides_a_weight, tensor([1.0, 4.0], grad=False))
    HIDDEN["w"].clear_gradient(False)
    y.sum().backward()
    assert not y.stop_gradient
    assert values(HIDDEN["w"].grad) == [4.0, 24.0]


HIDDEN = {"w": param([2.0, 3.0])}


def _hides_a_weight(a):
    return _more(a)


def _more(a):
    return a * HIDDEN["w"] * HIDDEN["w"]


def test_an_unused_output_is_not_run_backward():
    def scenario(run):
        x, w, u = tensor([[1.0, 2.0]]), param([[1.0], [3.0]]), param([[1.0], [1.0]])
        for p in (w, u):
            p.main_grad, p.hits = paddle.zeros([2, 1]), 0
        a, _ = run(
            lambda t, w, u: (FusedLinear.apply(t, w), FusedLinear.apply(t, u)), x * 1.0, w, u
        )
        a.sum().backward()
        return values(w.main_grad), values(u.main_grad), w.hits, u.hits, values(x.grad)

    same(scenario, ([[1.0], [2.0]], [[0.0], [0.0]], 1, 0, [[1.0, 3.0]]))


def test_where_no_output_is_used_nothing_is_run_again():
    region = Counted(lambda a: (a * 2.0, a * 3.0))
    x = tensor([1.0])
    recompute(region, x * 1.0)
    (x * 1.0).sum().backward()
    assert region.calls == 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_outputs_that_are_computed_from_each_other(order):
    """Paddle itself can't start a backward from both a tensor and its descendant."""

    def scenario(run):
        x = tensor([1.0, 2.0])

        def region(a):
            b = a * 3.0
            outputs = [a, b, b * b]
            return [outputs[index] for index in order]

        sum(run(region, x * 1.0)).sum().backward()
        return values(x.grad)

    same(scenario, [22.0, 40.0])


def test_a_hook_on_an_output_may_change_the_gradient():
    """Paddle calls a hook on a PyLayer's own output and drops what it returns."""

    def scenario(run):
        x = tensor([1.0, 2.0])
        y = run(lambda a: a * 2.0, x * 1.0)
        y.register_hook(lambda g: g * 5.0)
        y.sum().backward()
        return values(x.grad)

    same(scenario, [10.0, 10.0])


def test_what_the_function_records_for_itself_is_replayed_whole():
    def scenario(run):
        x, w, v = tensor([1.0, 2.0]), param([3.0, 4.0]), param([5.0, 6.0])

        def region(a):
            h = paddle.tanh(a * w)
            with paddle.set_grad_enabled(True):
                return h * v

        y = run(region, x * 0.1)
        y.sum().backward()
        return y.stop_gradient, values(x.grad), values(w.grad), values(v.grad)

    same(scenario)


def test_an_empty_tensor_passes():
    def scenario(run):
        x = tensor(np.zeros((0, 3)))
        y = run(lambda a: a, x * 1.0)
        return list(y.shape), y.stop_gradient

    same(scenario, ([0, 3], False))


def test_a_sparse_tensor_passes():
    def scenario(run):
        x = tensor([[1.0, 0.0], [0.0, 2.0]])
        y = run(lambda s: s.to_dense() * 2.0, x.to_sparse_coo(2))
        y.sum().backward()
        return values(y), values(x.grad)

    same(scenario)


def test_a_sparse_argument_that_is_not_used_passes():
    def scenario(run):
        x, w = tensor([[1.0, 0.0], [0.0, 2.0]]), param([3.0])
        s = x.to_sparse_coo(2)
        y = run(lambda s: w * 2.0, s)
        (y.sum() + s.to_dense().sum()).backward()
        return values(w.grad), values(x.grad)

    same(scenario)


def test_looking_whether_a_block_is_frozen_draws_no_random_numbers():
    def scenario(run):
        frozen = paddle.nn.Linear(2, 2)
        for p in frozen.parameters():
            p.stop_gradient = True
        y = run(
            lambda a: paddle.nn.functional.dropout(frozen(a), 0.5),
            tensor([[1.0, 2.0]], grad=False),
            preserve_rng_state=False,
        )
        return values(y), values(paddle.rand([2]))

    same(scenario)


def test_several_regions_and_their_sum():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        h = x * 1.0
        for _ in range(3):
            h = run(lambda a, b: paddle.tanh(a * b) + a, h, w)
        h.sum().backward()
        return values(h), values(x.grad), values(w.grad)

    same(scenario)


# Caveats: what a first run that records nothing can't know.


def test_caveat_an_output_cut_off_beside_others_has_the_flag_false_and_no_gradient():
    def scenario(run):
        x = tensor([1.0, 2.0])
        y, stat = run(lambda a: (a * a, (a * 2.0).detach()), x * 1.0)
        (y + stat).sum().backward()
        return values(y), values(stat), values(x.grad), stat.stop_gradient

    *expected, plain_flag = scenario(plain)
    *got, flag = scenario(recompute)
    assert got == expected == [[1.0, 4.0], [2.0, 4.0], [2.0, 4.0]]
    assert plain_flag
    assert not flag


def test_caveat_an_intermediate_without_a_gradient_gets_zeros():
    def scenario(run):
        x = tensor([1.0])
        run(lambda a, b: a * 2.0, tensor([3.0]) * 1.0, x * 1.0).sum().backward()
        return values(x.grad)

    assert scenario(plain) is None
    assert scenario(recompute) == [0.0]


def test_caveat_an_intermediate_that_is_returned_is_another_object():
    h = tensor([1.0]) * 1.0
    assert plain(lambda a: a, h) is h
    assert recompute(lambda a: a, h) is not h
