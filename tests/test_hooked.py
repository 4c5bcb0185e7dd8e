"""The hook engine keeps the exact graph: what the reentrant engine can't, and the rest."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import paddle
import pytest
from support import (
    Counted,
    FusedLinear,
    Reverse,
    growth,
    hooked,
    param,
    plain,
    same,
    seed,
    tensor,
    values,
)

from paramproxy import MutationError
from paramproxy._compat import paddle_version


def exact(scenario, literal=None):
    """As `same`, for the hook engine alone."""
    return same(scenario, literal, runs=(hooked,))


def block(a, w):
    return paddle.tanh(a * w) * a


def test_the_function_runs_twice_and_its_result_is_its_own():
    region = Counted(lambda a: paddle.tanh(a * 2.0))
    x = tensor([1.0])
    y = hooked(region, x)
    assert (region.calls, y.stop_gradient, y.is_leaf) == (1, False, False)
    y.sum().backward()
    assert region.calls == 2


def test_a_second_backward_gives_what_it_gives_without():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y = run(block, x * 1.0, w).sum()
        y.backward(retain_graph=True)
        first = values(x.grad), values(w.grad)
        y.backward(retain_graph=True)
        y.backward()
        return first, values(x.grad), values(w.grad)

    exact(scenario)


def test_a_kept_graph_is_not_replayed_again():
    region = Counted(block)
    y = hooked(region, tensor([1.0]) * 1.0, param([2.0])).sum()
    for _ in range(3):
        y.backward(retain_graph=True)
    assert region.calls == 2


def test_one_output_after_the_other():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y, z = run(lambda a: (paddle.exp(a) * w, paddle.tanh(a) * w * w), x * 1.0)
        y.sum().backward(retain_graph=True)
        first = values(x.grad), values(w.grad)
        z.sum().backward()
        return first, values(x.grad), values(w.grad)

    exact(scenario)


def test_one_of_several_outputs():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        _, z = run(lambda a: (paddle.exp(a) * w, paddle.tanh(a)), x * 1.0)
        z.sum().backward()
        return values(x.grad), values(w.grad)

    exact(scenario)


def test_paddle_grad_for_inputs_and_for_captured_parameters():
    def scenario(run):
        x, w, u = tensor([1.0, 2.0]), param([3.0, 4.0]), param([1.0, 1.0])
        y = run(lambda a: paddle.tanh(a * w) * w, x * 1.0).sum()
        grads = paddle.grad(y, [x, w, u], allow_unused=True)
        assert (x.grad, w.grad, u.grad) == (None, None, None)
        return [values(g) for g in grads]

    exact(scenario)


def test_after_paddle_grad_the_graph_is_there_as_without():
    def scenario(run):
        x = tensor([1.0, 2.0])
        y = run(lambda a: paddle.exp(a * a), x * 1.0).sum()
        grads = [values(paddle.grad(y, [x])[0]) for _ in range(2)]
        y.backward()
        return grads, values(x.grad)

    exact(scenario)


def test_a_second_backward_that_paddle_refuses_is_refused():
    y = hooked(lambda a: paddle.exp(a * a), tensor([1.0]) * 1.0).sum()
    y.backward()
    with pytest.raises(SystemError, match="backward twice"):
        y.backward()


def test_a_ticket_that_was_handed_in_is_refused_with_a_way_out():
    """What Paddle itself sees to, by an error of its own."""
    from paramproxy import _hooked

    kept = []
    fill = _hooked.Ticket.fill

    def noted(ticket, *args):
        kept.append(ticket)
        return fill(ticket, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hooked.Ticket, "fill", noted)
        y = hooked(lambda a: (paddle.exp(a), paddle.tanh(a)), tensor([1.0]) * 1.0)
        y[0].sum().backward()
        with pytest.raises(Exception, match="a second time through a region of the hook engine"):
            kept[0].unpack()
    assert paddle.is_grad_enabled()


def test_double_and_triple_gradients():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        y = run(lambda a: a * a * a * a * w, x * 1.0).sum()
        (one,) = paddle.grad(y, [x], create_graph=True)
        (two,) = paddle.grad(one.sum(), [x], create_graph=True)
        (two * two).sum().backward()
        return values(one), values(two), values(x.grad), values(w.grad)

    exact(scenario)


class Cube(paddle.autograd.PyLayer):
    """Its gradient is computed from the tensor that it saved, and has a graph through it."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a * a

    @staticmethod
    def backward(ctx, dy):
        (a,) = ctx.saved_tensor()
        return dy * 3.0 * a * a


def test_double_gradients_through_what_a_layer_saved():
    def scenario(run):
        x = tensor([1.0, 2.0])
        y = run(lambda a: Cube.apply(a * 2.0), x * 1.0).sum()
        (one,) = paddle.grad(y, [x], create_graph=True)
        one.sum().backward()
        return values(one), values(x.grad)

    exact(scenario, ([24.0, 96.0], [48.0, 96.0]))


def test_a_gradient_penalty_trains():
    def scenario(run):
        paddle.seed(1)
        net = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
        step = paddle.optimizer.SGD(0.1, parameters=net.parameters())
        for _ in range(3):
            x = tensor([[1.0, 2.0, 3.0], [0.5, 0.1, -1.0]])
            y = run(net, x * 1.0)
            (g,) = paddle.grad(y.sum(), [x], create_graph=True)
            ((g * g).sum() + y.sum()).backward()
            step.step()
            step.clear_grad()
        return [values(p) for p in net.parameters()]

    exact(scenario)


@pytest.mark.parametrize("create", [True, False])
def test_paddle_grad_inside_the_region(create):
    def scenario(run):
        def force(a, w):
            energy = (paddle.tanh(a * w) * a).sum()
            (g,) = paddle.grad(energy, [a], create_graph=create, retain_graph=True)
            return g * w + energy

        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        run(force, x * 1.0, w).sum().backward()
        return values(x.grad), values(w.grad)

    exact(scenario)


def test_backward_inside_the_region():
    def scenario(run):
        def region(a, w):
            (paddle.exp(w * 2.0) * 1.0).sum().backward()
            return paddle.tanh(a * w)

        x, w = tensor([1.0]), param([0.5])
        y = run(region, x * 1.0, w)
        inside = values(w.grad)
        w.clear_gradient(False)
        y.sum().backward()
        return inside, values(x.grad), w.grad is not None

    exact(scenario)


def test_hooks_registered_inside_outside_and_on_the_result():
    def scenario(run):
        seen = []
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])

        def note(name, factor=1.0):
            def hook(g):
                seen.append((name, values(g)))
                return g * factor

            return hook

        def region(a, w):
            b = paddle.tanh(a * w)
            b.register_hook(note("inner", 2.0))
            a.register_hook(note("argument"))
            w.register_hook(note("parameter in the region"))
            return b * a

        w.register_hook(note("parameter"))
        w._register_backward_hook(lambda: seen.append("backward hook"))
        h = x * 1.0
        y = run(region, h, w)
        y.register_hook(note("result", 3.0))
        y.sum().backward()
        return seen, values(x.grad), values(w.grad)

    exact(scenario)


def test_a_captured_weight_of_two_regions_has_its_hooks_called_once():
    def scenario(run):
        w, counts = param([2.0, 3.0]), [0, 0]
        w.register_hook(lambda g: counts.__setitem__(0, counts[0] + 1))
        w._register_backward_hook(lambda: counts.__setitem__(1, counts[1] + 1))
        h = tensor([1.0, 1.0]) * 1.0
        for _ in range(2):
            h = run(lambda a: paddle.tanh(a) * w, h)
        h.sum().backward()
        return counts, values(w.grad)

    assert exact(scenario)[0] == [1, 1]


def test_flags_of_outputs_and_what_they_are():
    def scenario(run):
        x, m, w = tensor([1.0, 2.0]), tensor([1.0, 0.0], grad=False), param([1.0])
        h = x * 1.0
        out = run(
            lambda a, m, w: (a * m, m, a, w, (a * 2).detach(), paddle.argmax(a), [a + 1]), h, m, w
        )
        out[0].sum().backward()
        flags = [o.stop_gradient for o in out[:6]]
        return flags, out[1] is m, out[2] is h, out[3] is w, values(x.grad)

    exact(scenario)


def test_an_argument_parameter_is_itself_in_both_runs():
    w, seen = param([3.0]), []

    def region(a, p, ps):
        seen.append((p is w, ps[0] is w))
        return paddle.tanh(a * p) * ps[0]

    hooked(region, tensor([1.0]) * 1.0, w, (w,)).sum().backward()
    assert seen == [(True, True)] * 2


class Looks(paddle.autograd.PyLayer):
    """Reports what it reads back of what it saved."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, a, w, m):
        ctx.save_for_backward(a, w, m, None)
        return a * w * m

    @staticmethod
    def backward(ctx, dy):
        a, w, m, nothing = ctx.saved_tensor()
        again = ctx.saved_tensor()
        Looks.seen.append(
            (a.stop_gradient, a.is_leaf, w.stop_gradient, m.stop_gradient, nothing, w.name)
        )
        Looks.seen.append([one is other for one, other in zip((a, w, m), again)])
        Looks.seen.append(getattr(w, "main_grad", "none"))
        return dy * w * m, dy * a * m, None


def test_what_a_layer_reads_back_has_its_identity_and_its_flag():
    def scenario(run):
        Looks.seen = []
        x, w, m = tensor([1.0]), param([2.0]), tensor([3.0], grad=False)
        w.name = "weight"
        run(lambda a: Looks.apply(a * 1.0, w, m), x * 1.0).sum().backward()
        return Looks.seen, values(x.grad), values(w.grad)

    exact(scenario)


def test_what_a_layer_reads_back_is_the_parameter():
    w, seen = param([[2.0]]), []

    class Checks(FusedLinear):
        @staticmethod
        def backward(ctx, dy):
            seen.append(ctx.saved_tensor()[1] is w)
            return FusedLinear.backward(ctx, dy)

    x = tensor([[1.0]])
    hooked(lambda a: Checks.apply(a * 1.0, w), x * 1.0).sum().backward()
    assert seen == [True]
    assert values(w.main_grad) == [[1.0]]
    assert w.hits == 1
    assert w.grad is None


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("first", [lambda a: a, lambda a: a * 2.0], ids=["argument", "inner"])
def test_a_layer_that_returns_its_input_is_no_write_into_it(times, first):
    """Tensor-parallel identities are such layers. Paddle counts them as writes."""

    def scenario(run):
        x = tensor([1.0, 2.0])
        h = Reverse.apply(x * 1.0)

        def region(a):
            a = first(a)
            for _ in range(times):
                a = Reverse.apply(a)
            return paddle.exp(a), a

        y, z = run(region, h)
        (y * paddle.tanh(h) + z).sum().backward()
        return values(y), values(x.grad)

    exact(scenario)


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.add_(a),
        lambda a: Reverse.apply(a).add_(a),
        lambda a: Reverse.apply(a.add_(a)),
        lambda a: paddle.no_grad()(lambda: a.add_(a))(),
    ],
)
def test_a_real_write_among_them_is_told(write):
    h = Reverse.apply(Reverse.apply(tensor([1.0]) * 1.0))
    with pytest.raises(MutationError, match="it changes argument 0 in place"):
        hooked(lambda a: write(a) is None or paddle.exp(a), h)


def test_looking_at_the_graph_leaves_nothing_behind():
    """Paddle never frees a node that `grad_fn` has given."""
    x = tensor(np.zeros((64, 64)))

    def step():
        h = paddle.exp(x * 1.0)
        hooked(lambda a: paddle.tanh(Reverse.apply(a)), h)

    assert growth(step) == 0


def test_strided_saved_tensors():
    def scenario(run):
        x, w = tensor(np.arange(12.0).reshape(3, 4)), param(np.ones((3, 3)))

        def region(a):
            b = paddle.tanh(a).transpose([1, 0])
            return paddle.matmul(b[1:3], w) * b[0:2, 0:3].exp()

        run(region, x * 1.0).sum().backward()
        return values(x.grad), values(w.grad)

    exact(scenario)


@pytest.mark.parametrize("shape", [[], [1]] if paddle_version() < (3,) else [[], [1], [0, 3]])
def test_odd_shapes(shape):
    """A gradient of no elements crashes Paddle 2.6."""

    def scenario(run):
        x = tensor(np.ones(shape))
        y = run(lambda a: paddle.exp(a * a) * 2.0, x * 1.0)
        y.backward(paddle.ones_like(y))
        return values(x.grad), list(x.grad.shape)

    exact(scenario)


def test_einsum():
    """Paddle 2.6 has it save a tensor of no elements that has no strides to ask for."""

    def scenario(run):
        x, y = tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[0.5, 1.0, 2.0], [1.0, 0.0, 1.0]])
        run(
            lambda a, b: paddle.exp(paddle.einsum("ij,jk->ik", a, b) * 0.1), x * 1.0, y * 1.0
        ).sum().backward()
        return values(x.grad), values(y.grad)

    exact(scenario)


LAYERS = {
    "LSTM": lambda: (paddle.nn.LSTM(4, 3, 2, dropout=0.2), [2, 3, 4]),
    "convolutions": lambda: (
        paddle.nn.Sequential(
            paddle.nn.Conv2D(2, 4, 3),
            paddle.nn.GroupNorm(2, 4),
            paddle.nn.ReLU(),
            paddle.nn.MaxPool2D(2),
            paddle.nn.Conv2DTranspose(4, 2, 2),
        ),
        [2, 2, 6, 6],
    ),
    "transformer": lambda: (paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), [2, 3, 8]),
    "weight norm": lambda: (paddle.nn.utils.weight_norm(paddle.nn.Linear(4, 4)), [2, 4]),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_of_paddles_own(name):
    def scenario(run):
        layer, shape = LAYERS[name]()
        x = paddle.randn(shape)
        x.stop_gradient = False
        for _ in range(2):
            out = run(layer, x * 1.0)
            out = out[0] if isinstance(out, tuple) else out
            (out * out).sum().backward()
        return [values(t) for t in (out, x.grad, *(p.grad for p in layer.parameters()))]

    expected, got = (scenario_of(run, scenario) for run in (plain, hooked))
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def scenario_of(run, scenario):
    seed()
    return scenario(run)


def test_a_loss_that_is_kept_on_a_layer_has_its_gradient():
    class Router(paddle.nn.Layer):
        def forward(self, a):
            self.loss = paddle.exp(a).sum()
            return paddle.tanh(a)

    def scenario(run):
        layer, x = Router(), tensor([1.0, 2.0])
        y = run(layer, x * 1.0)
        (y.sum() + layer.loss).backward()
        return values(x.grad), values(layer.loss)

    exact(scenario)


def test_a_region_with_nothing_to_differentiate_gets_this_engine():
    def scenario(run):
        layer = paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5))
        x = tensor([[1.0, 2.0]], grad=False)
        y = run(lambda a: (paddle.tanh(layer(a)), a.mean()), x)
        y[0].sum().backward(retain_graph=True)
        y[0].sum().backward()
        return [o.stop_gradient for o in y], values(layer.weight.grad)

    same(scenario)


def test_what_was_freed_between_is_there_in_the_replay():
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        a, b, c, d = x * 1.0, x * 2.0, x * 3.0, x * 4.0
        held = [c]
        y = run(lambda t, box: paddle.tanh(t * w) * b * held[0] * box["d"], a, {"d": d})
        for freed in (a, b, c, d):
            freed._clear_dataptr()
        y.sum().backward()
        return values(x.grad), values(w.grad)

    exact(scenario)


class Box:
    """Not a container for optree."""

    def __init__(self, held):
        self.held = held


def test_a_tensor_in_an_object_is_read_and_may_be_freed():
    def scenario(run):
        x, m = tensor([1.0, 2.0]), tensor([5.0, 6.0], grad=False)
        h, box = x * 1.0, Box([m * 1.0])
        y = run(lambda a, b: paddle.tanh(a) * b.held[0], h, box)
        box.held[0]._clear_dataptr()
        y.sum().backward()
        return values(x.grad)

    exact(scenario)


def test_a_loop_variable_is_read_as_it_was():
    def scenario(run):
        x, weights = tensor([1.0]), [param([float(i)]) for i in (2, 3, 4)]
        h = x * 1.0
        for w in weights:
            h = run(lambda a: paddle.tanh(a * w), h)  # noqa: B023
        h.sum().backward()
        return values(x.grad), [values(w.grad) for w in weights]

    exact(scenario)


def test_dropout_and_the_streams_after_it():
    def scenario(run):
        x = tensor(np.ones(64))
        y = run(
            lambda a: paddle.nn.functional.dropout(paddle.exp(a), 0.5) * np.random.rand(), x * 1.0
        )
        y.sum().backward()
        return values(y), values(x.grad), values(paddle.rand([2])), np.random.rand()

    exact(scenario)


def test_training_for_some_steps():
    def scenario(run):
        paddle.seed(3)
        norm = paddle.nn.LayerNorm(4)
        net = paddle.nn.LayerList([paddle.nn.Linear(4, 4) for _ in range(3)])
        step = paddle.optimizer.AdamW(0.01, parameters=[*net.parameters(), *norm.parameters()])
        losses = []
        for i in range(4):
            h = tensor(np.full((2, 4), 1.0 + i), grad=False)
            for layer in net:
                h = run(lambda a, layer=layer: paddle.nn.functional.gelu(norm(layer(a))) + a, h)
            loss = (h * h).mean()
            loss.backward()
            step.step()
            step.clear_grad()
            losses.append(float(loss))
        return losses

    exact(scenario)


def test_amp_od_is_carried_over():
    from paramproxy._compat import core, tracer

    now, levels = tracer(), []
    before = now._amp_level, now._amp_dtype

    def region(a):
        levels.append(str(tracer()._amp_level))
        return paddle.exp(a)

    try:
        now._amp_level, now._amp_dtype = core.AmpLevel.OD, "bfloat16"
        y = hooked(region, tensor([1.0]) * 1.0)
    finally:
        now._amp_level, now._amp_dtype = before
    y.sum().backward()
    assert levels == ["AmpLevel.OD"] * 2
    assert now._amp_level == before[0]


def test_under_no_grad_it_is_a_plain_call():
    region = Counted(block)
    with paddle.no_grad():
        y = hooked(region, tensor([1.0]), param([2.0]))
    assert (region.calls, y.stop_gradient) == (1, True)


def test_plain_calls_are_what_is_compared_with():
    """A test of `exact`: it tells a wrong gradient."""
    x = tensor([1.0])
    with pytest.raises(AssertionError):
        same(lambda run: run is plain, runs=(hooked,))
    assert x.grad is None
