"""`recompute_sequential`: a row of layers in segments, as if they were called one by one."""

from __future__ import annotations

import functools

import numpy as np
import paddle
import pytest
from support import allocated, tensor, values

from paramproxy import recompute_sequential


MODES = [
    pytest.param(functools.partial(recompute_sequential, use_reentrant=mode), id=name)
    for mode, name in ((True, "reentrant"), (False, "hooks"))
]
SEGMENTS = [1, 2, 3, 4, 5, 6, 50]


class Layer(paddle.nn.Layer):
    """A layer that counts its calls."""

    def __init__(self, factor=0.5):
        super().__init__()
        constant = paddle.nn.initializer.Constant(factor)
        self.linear = paddle.nn.Linear(2, 2, weight_attr=constant, bias_attr=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return paddle.tanh(self.linear(x))


class Pair(Layer):
    """A layer from a pair to a pair."""

    def forward(self, pair):
        a, b = pair
        return super().forward(a) + b, b


def one_by_one(ctx, layers, *args, **kwargs):
    first, *rest = layers
    value = first(*args, **kwargs)
    for layer in rest:
        value = layer(value)
    return value


def gradients(run, layers, segments, *inputs):
    y = run({"segments": segments}, layers, *inputs)
    loss = sum(part.sum() for part in (y if isinstance(y, tuple) else (y,)))
    loss.backward()
    flat = [p for given in inputs for p in (given if isinstance(given, tuple) else (given,))]
    distinct = dict.fromkeys(layers)
    return (
        float(loss),
        [values(x.grad) for x in flat],
        [values(layer.linear.weight.grad) for layer in distinct],
    )


def in_three_ways(layers):
    """As a Sequential, as a LayerList and as a list."""
    return paddle.nn.Sequential(*layers), paddle.nn.LayerList(layers), list(layers)


def assert_same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    for ours, theirs in zip(got[1] + got[2], expected[1] + expected[2]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_any_number_of_segments_gives_what_the_layers_give(run, segments, batch):
    def made():
        return [Layer(0.1 * i) for i in range(1, 6)], tensor(np.ones((batch, 2)))

    layers, x = made()
    expected = gradients(one_by_one, layers, segments, x)
    for way in range(3):
        layers, x = made()
        assert_same(gradients(run, in_three_ways(layers)[way], segments, x), expected)


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_a_tuple_between_segments_is_one_argument(run, segments):
    def made():
        return [Pair(0.1 * i) for i in range(1, 5)], (tensor([[1.0, 2.0]]), tensor([[3.0, 4.0]]))

    layers, pair = made()
    expected = gradients(one_by_one, layers, segments, pair)
    layers, pair = made()
    assert_same(gradients(run, paddle.nn.Sequential(*layers), segments, pair), expected)


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("way", [0, 1, 2])
def test_a_layer_that_stands_in_two_places_runs_in_both(run, segments, way):
    def made():
        a, b = Layer(0.3), Layer(0.4)
        return [a, b, a, a, b], tensor([[1.0, 2.0]])

    layers, x = made()
    expected = gradients(one_by_one, layers, segments, x)
    layers, x = made()
    assert_same(gradients(run, in_three_ways(layers)[way], segments, x), expected)


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5])
def test_every_layer_but_those_of_the_last_segment_runs_twice(segments):
    layers = [Layer() for _ in range(5)]
    y = recompute_sequential({"segments": segments}, layers, tensor([[1.0, 2.0]]))
    assert [layer.calls for layer in layers] == [1] * 5
    y.sum().backward()
    last = 5 // segments
    assert [layer.calls for layer in layers] == [2] * (5 - last) + [1] * last


def test_segments_differ_by_one_layer_at_most():
    """Paddle's, and torch's, leave the whole remainder to the last one: 1, 1, 1, 4 of seven."""
    sizes = []

    def run(segments):
        names = iter(range(100))
        depth = []

        class Block(paddle.nn.Layer):
            def forward(self, x):
                depth.append(next(names))
                return paddle.exp(x * 0.1)

        y = recompute_sequential({"segments": segments}, [Block() for _ in range(7)], tensor([1.0]))
        first = len(depth)
        y.sum().backward()
        return first, len(depth) - first

    for segments in (2, 3, 4):
        sizes.append(run(segments))
    assert sizes == [(7, 4), (7, 5), (7, 6)]


def test_it_keeps_fewer_bytes():
    layers = [Layer() for _ in range(8)]
    x = tensor(np.ones((4096, 2)))

    def held(call):
        before = allocated()
        y = call()
        kept = allocated() - before
        y.sum().backward()
        return kept

    plain = held(lambda: one_by_one({}, layers, x))
    ours = held(lambda: recompute_sequential({"segments": 4}, layers, x))
    assert ours <= 0.65 * plain


def test_the_first_layer_takes_all_arguments():
    def add(a, b, *, scale):
        return (a + b) * scale

    a, b = tensor([1.0]), tensor([2.0])
    y = recompute_sequential({"segments": 2}, [add, paddle.exp], a, b, scale=0.5)
    y.backward()
    assert values(a.grad) == values(b.grad) == pytest.approx([0.5 * np.exp(1.5)])


def test_preserve_rng_state_in_ctx(monkeypatch):
    def scenario(ctx):
        paddle.seed(3)
        x = tensor(np.ones(64))
        layers = [lambda a: paddle.nn.functional.dropout(a, 0.5) * a, paddle.nn.Identity()]
        y = recompute_sequential({"segments": 2, **ctx}, layers, x)
        y.sum().backward()
        return values(y), values(x.grad)

    y, gradient = scenario({})
    assert gradient == [2 * v for v in y]
    y, gradient = scenario({"preserve_rng_state": False})
    assert gradient != [2 * v for v in y]


def test_any_option_of_recompute_in_ctx():
    x = tensor([2.0])
    ctx = {"segments": 2, "use_reentrant": False}
    y = recompute_sequential(ctx, [lambda a: a * a, lambda a: a * 3], x * 1.0)
    y.backward(retain_graph=True)  # which the reentrant engine warns of
    y.backward()
    assert values(x.grad) == [24.0]


def test_offload_indices_name_the_first_layers_arguments_and_what_goes_from_segment_to_segment(
    monkeypatch,
):
    moved = []
    monkeypatch.setattr("paramproxy._placement.can_be_offloaded", lambda t: True)
    monkeypatch.setattr(
        "paramproxy._placement.to_host", lambda t: moved.append(values(t)) or t.clone().detach()
    )

    def add(a, b):
        return a + b

    def double(a):
        return 2 * a

    def run(indices):
        moved.clear()
        ctx = {"segments": 3}
        recompute_sequential(
            ctx, [add, double, double], tensor([1.0]), tensor([2.0]), offload_indices=indices
        ).backward()
        return moved

    assert run([0]) == [[1.0], [3.0]]
    assert run([1]) == [[2.0]]


@pytest.mark.parametrize("segments", [1, 3])
def test_hooks_of_the_container_run_once_around_all_segments(segments):
    seen = []
    layers = paddle.nn.Sequential(*(Layer() for _ in range(3)))
    layers.register_forward_pre_hook(lambda layer, args: seen.append("pre") or (args[0] * 2,))
    layers.register_forward_post_hook(lambda layer, args, out: seen.append("post") or out * 3)
    x = tensor([[1.0, 2.0]])
    y = recompute_sequential({"segments": segments}, layers, x)
    assert seen == ["pre", "post"]
    assert values(y) == values(layers(x))


def test_a_row_of_none_gives_the_argument_back():
    x = tensor([1.0])
    assert recompute_sequential({"segments": 2}, [], x) is x


@pytest.mark.parametrize("segments", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_segments_is_refused(segments):
    with pytest.raises(ValueError, match="expected a number of 1 or more in ctx"):
        recompute_sequential({"segments": segments}, [paddle.exp], tensor([1.0]))


class OwnForward(paddle.nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "functions", [3, [1, 2], Layer(), OwnForward(Layer())], ids=["int", "ints", "layer", "forward"]
)
def test_what_is_no_row_of_layers_is_refused(functions):
    with pytest.raises(TypeError, match="Call recompute on it as a whole"):
        recompute_sequential({"segments": 2}, functions, tensor([1.0]))


def test_what_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="Cannot call recompute_sequential: expected a dict as ctx"):
        recompute_sequential(2, [paddle.exp], tensor([1.0]))


def test_a_key_that_nobody_reads_is_warned_of():
    with pytest.warns(UserWarning, match="does nothing with 'segment' in ctx") as caught:
        recompute_sequential({"segment": 2}, [paddle.exp], tensor([1.0]))
    assert caught[0].filename == __file__
