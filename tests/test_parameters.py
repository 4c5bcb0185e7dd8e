"""Parameters as arguments: the parameter in the first run, a leaf of it in the replay."""

from __future__ import annotations

import threading

import paddle
import pytest
from paddle.base.framework import EagerParamBase
from support import MODES, Counted, FusedLinear, allocated, param, plain, same, tensor, values

from paramproxy import ParamLeaf, ParamView, UnsupportedError, recompute, unwrap
from paramproxy._compat import TENSORS_HAVE_ATTRIBUTES


class AddOnes(paddle.autograd.PyLayer):
    """The program of PaddlePaddle/Paddle#70508."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensor()
        for operand in (a, b):
            if hasattr(operand, "main_grad"):
                operand.main_grad.add_(paddle.ones_like(operand.main_grad))
        return paddle.matmul(dy, b, transpose_y=True), paddle.matmul(a, dy, transpose_x=True)


def test_the_program_of_the_report():
    def scenario(run):
        a, b = (
            paddle.create_parameter([3, 4], "float32"),
            paddle.create_parameter([4, 5], "float32"),
        )
        for p in (a, b):
            p.main_grad = paddle.zeros(p.shape)
        run(lambda a, b: AddOnes.apply(a, b), a, b).mean().backward()
        return values(a.main_grad), values(b.main_grad), values(a.grad), values(b.grad)

    got = same(scenario)
    assert got[0] == [[1.0] * 4] * 3
    assert got[1] == [[1.0] * 5] * 4


@pytest.mark.parametrize("start", ["zeros", "none", "missing"])
@pytest.mark.parametrize("how", ["argument", "keyword", "tuple", "view", "closure"])
def test_fused_gradients_reach_main_grad_over_micro_batches(start, how):
    def scenario(run):
        x, w = tensor([[1.0, 2.0]]), param([[1.0], [3.0]])
        if start != "missing":
            w.main_grad = paddle.zeros([2, 1]) if start == "zeros" else None
        buffer = getattr(w, "main_grad", None)
        for _ in range(2):
            h = x * 1.0
            if how == "argument":
                y = run(lambda a, b: FusedLinear.apply(a, b), h, w)
            elif how == "keyword":
                y = run(lambda a, b: FusedLinear.apply(a, b), h, b=w)
            elif how == "tuple":
                y = run(lambda a, b: FusedLinear.apply(a, *b), h, (w,))
            elif how == "view":
                y = run(FusedLinear.apply, h, w if run is plain else ParamView(w))
            else:
                y = run(lambda a: FusedLinear.apply(a, w), h)
            y.sum().backward()
        assert buffer is None or w.main_grad is buffer
        return values(w.main_grad), w.hits, w.grad, values(x.grad)

    same(scenario, ([[2.0], [4.0]], 2, None, [[2.0, 6.0]]))


@pytest.mark.parametrize(
    "attribute",
    [threading.Lock(), lambda: None, tensor([1.0]) * 2.0, (i for i in ())],
    ids=["lock", "function", "intermediate tensor", "generator"],
)
def test_an_attribute_that_can_not_be_copied_is_no_matter(attribute):
    w = param([2.0])
    w.handle = attribute
    seen, known = [], id(attribute)

    def region(a, w, box):
        seen.append(id(w.handle) == id(box[0].handle) == known)
        return a * w * box[0]

    recompute(region, tensor([3.0]) * 1.0, w, (w,)).sum().backward()
    assert seen == [True, True]
    assert values(w.grad) == [12.0]


def test_in_both_runs_it_is_a_parameter_with_its_name_and_tags():
    w = param([2.0])
    w.sequence_parallel = w.is_distributed = True
    seen = []

    def region(a, p):
        seen.append(
            (isinstance(p, EagerParamBase), p.name == w.name, p.sequence_parallel, p.is_distributed)
        )
        return a * p

    recompute(region, tensor([3.0]) * 1.0, w).sum().backward()
    assert seen == [(True, True, True, True)] * 2


def test_caveat_in_the_replay_it_is_a_leaf_that_unwraps_to_the_parameter():
    w = param([2.0])
    seen = []

    def region(a, p):
        seen.append((type(p), p is w, unwrap(p) is w))
        return a * p

    recompute(region, tensor([3.0]) * 1.0, w).sum().backward()
    assert seen == [(EagerParamBase, True, True), (ParamLeaf, False, True)]


def test_what_the_function_writes_on_it_stays():
    w = param([2.0])

    def region(a, p):
        p.calls = getattr(p, "calls", 0) + 1
        p.last = "set in the region"
        return a * p

    recompute(region, tensor([3.0]) * 1.0, w).sum().backward()
    assert w.last == "set in the region"
    assert w.calls == 2


def test_a_frozen_one_gets_no_gradient():
    def scenario(run):
        x, w = tensor([3.0]), param([2.0], trainable=False)
        run(lambda a, p: a * p, x * 1.0, w).sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario, ([2.0], None))


def test_no_byte_is_allocated_for_one():
    w = param([[0.5] * 256] * 256)
    w.main_grad = paddle.zeros([256, 256])
    nbytes = 256 * 256 * 4
    marks = []

    def region(a, p):
        marks.append(allocated())
        return a * p.sum() * 0.0 + a

    x = tensor([1.0])
    start = allocated()
    loss = recompute(region, x, w)
    loss.backward()
    assert len(marks) == 2
    assert max(marks) - start < nbytes
    del loss
    w.clear_gradient(False)
    assert allocated() - start < 4096


def test_hooks_fire_as_often_as_without_recompute():
    def scenario(run):
        w, x = param([2.0, 3.0]), tensor([1.0, 1.0])
        counts = {"hook": 0, "grad": 0, "backward": 0}

        def count(kind):
            counts[kind] += 1

        w.register_hook(lambda g: count("hook"))
        w._register_grad_hook(lambda g: count("grad"))
        w._register_backward_hook(lambda: count("backward"))
        h = x * 1.0
        for _ in range(2):
            h = run(lambda a, b: a * b, h, w)
        h.sum().backward()
        return counts, values(w.grad)

    same(scenario, ({"hook": 1, "grad": 1, "backward": 1}, [4.0, 6.0]))


def test_a_hook_that_changes_the_gradient_does_so_once():
    def scenario(run):
        w = param([2.0])
        w.register_hook(lambda g: g * 10.0)
        run(lambda a, b: a * b * b, tensor([3.0]) * 1.0, w).sum().backward()
        return values(w.grad)

    same(scenario, [120.0])


def test_a_hook_registered_in_the_region_is_registered_once():
    def scenario(run):
        w, seen = param([2.0]), []

        def region(a, b):
            b.register_hook(lambda g: g * 10.0)
            b._register_grad_hook(lambda g: seen.append("grad"))
            b._register_backward_hook(lambda: seen.append("backward"))
            return a * b

        run(region, tensor([3.0]) * 1.0, w).sum().backward()
        return values(w.grad), sorted(seen)

    same(scenario, ([30.0], ["backward", "grad"]))


@pytest.mark.parametrize("how", ["captured parameter", "leaf argument", "intermediate argument"])
def test_a_hook_registered_in_the_region_on_something_else_counts_once(how):
    if how != "captured parameter" and not TENSORS_HAVE_ATTRIBUTES:
        pytest.skip("on Paddle 2.6 a hook on an ordinary tensor argument is registered twice")

    def scenario(run):
        x, w, calls = tensor([2.0]), param([3.0]), []
        given = x * 1.0 if how == "intermediate argument" else x
        hooked = w if how == "captured parameter" else None

        def region(a):
            target = a if hooked is None else hooked
            target.register_hook(lambda g: calls.append(1) or g * 10.0)
            return a * a * w

        run(region, given).sum().backward()
        return values(x.grad), values(w.grad), len(calls)

    same(scenario)


def test_registering_once_leaves_nothing_on_the_tensors_and_takes_nothing_off():
    w, x = param([2.0]), tensor([3.0])
    w.register_hook = own = w.register_hook
    before = dict(vars(w))

    def region(a, fail):
        if fail and len(calls) == 1:
            raise ValueError("again")
        calls.append(1)
        return a * w

    for fail in (False, True):
        calls = []
        y = recompute(region, x * 1.0, fail)
        if fail:
            with pytest.raises(OSError, match="again"):
                y.sum().backward()
        else:
            y.sum().backward()
        assert vars(w) == before
        assert w.register_hook is own


def test_the_gradient_that_the_region_reads_on_a_parameter_is_the_parameters():
    def scenario(run):
        w, x = param([2.0]), tensor([3.0])
        for _ in range(2):
            run(lambda a, p: a * p * (2.0 if p.grad is None else 5.0), x * 1.0, w).sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario, ([14.0], [21.0]))


@pytest.mark.parametrize("now_frozen", [True, False])
def test_a_flag_that_changes_between_the_runs_is_that_of_the_first(now_frozen):
    def scenario(run):
        w, x = param([2.0], trainable=now_frozen), tensor([3.0])
        y = run(lambda a, p: a * p, x * 1.0, w)
        w.stop_gradient = now_frozen
        y.sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario)


def test_caveat_set_value_in_the_region_is_not_seen_by_the_version_counter():
    """Paddle's plain autograd does not see it either."""
    w = param([4.0])

    def region(a, p):
        with paddle.no_grad():
            p.set_value(p * 0.5)
        return a * p

    recompute(region, tensor([1.0]) * 1.0, w).sum().backward()
    assert values(w) == [1.0]


def test_caveat_what_leaves_the_region_by_another_way_has_no_gradient():
    """The first run records nothing: a loss that a layer keeps has to be returned."""

    class Layer(paddle.nn.Layer):
        def forward(self, a):
            self.aux = (a * a).sum()
            return a * 2.0

    layer = Layer()
    layer.aux = None
    recompute(layer, tensor([1.0, 2.0]) * 1.0)
    assert layer.aux.stop_gradient


def test_a_hook_removed_in_the_region_never_fires():
    def scenario(run):
        w = param([2.0])

        def region(a, b):
            handle = b.register_hook(lambda g: g * 10.0)
            y = a * b
            assert handle.remove()
            return y

        run(region, tensor([3.0]) * 1.0, w).sum().backward()
        return values(w.grad)

    same(scenario, [3.0])


def test_the_same_weight_as_argument_in_a_tuple_and_captured():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        run(lambda a, p, ps: a * p * ps[0] * w, x * 1.0, w, (w,)).sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario, ([27.0, 64.0], [27.0, 96.0]))


def test_the_replay_uses_the_storage_of_that_moment():
    """A sharding stage frees a parameter after forward and gathers it again for backward."""
    x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
    gathered = tensor([3.0, 4.0], grad=False)
    seen = []

    def region(a, p):
        seen.append(p.data_ptr())
        return a * p

    y = recompute(region, x * 1.0, w)
    w._clear_data()
    gathered._share_buffer_to(w)
    y.sum().backward()
    assert seen[1] == gathered.data_ptr() != seen[0]
    assert values(x.grad) == [3.0, 4.0]
    assert values(w.grad) == [1.0, 2.0]


def test_one_that_was_not_gathered_again_is_named():
    w = param([3.0, 4.0])
    y = recompute(lambda a, p: a * p, tensor([1.0, 2.0]) * 1.0, w)
    w._clear_dataptr()
    with pytest.raises(
        OSError, match=f"Cannot make a leaf of parameter '{w.name}': it has no storage"
    ):
        y.sum().backward()


def test_training_a_layer_gives_the_same_weights():
    def scenario(run):
        paddle.seed(3)
        layer = paddle.nn.Sequential(
            paddle.nn.Linear(4, 8), paddle.nn.GELU(), paddle.nn.Dropout(0.3), paddle.nn.Linear(8, 4)
        )
        optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
        region = Counted(layer)
        for _ in range(4):
            x = paddle.rand([3, 4])
            (run(region, x) - x).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return [values(p) for p in layer.parameters()], values(paddle.rand([2]))

    same(scenario)


@pytest.mark.parametrize("run", MODES)
def test_a_layer_that_is_given_another_parameter_by_the_function_is_refused(run):
    layer = paddle.nn.Linear(1, 1)
    old = layer.weight

    def region(x):
        y = layer(x)
        layer.weight = param([[7.0]])
        return y * layer.weight

    with pytest.raises(UnsupportedError, match="it gives a layer another parameter as 'weight'"):
        run(region, tensor([[3.0]]) * 1.0)
    assert layer.weight is not old
    assert paddle.is_grad_enabled()
