"""Buffers are written once, though the function runs twice."""

from __future__ import annotations

import functools
import gc
import itertools

import numpy as np
import paddle
import pytest
from support import MODES, Counted, allocated, held, hooked, param, plain, same, tensor, values

from paramproxy import recompute


pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


class Moves(paddle.nn.Layer):
    """Keeps a moving average, and scales by it."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("average", paddle.ones([1]))
        self.state = None

    def forward(self, a):
        with paddle.no_grad():
            self.write(self, self.average * 0.5 + a.detach().mean() * 0.5)
        return paddle.tanh(a) * self.average.clone()


def add(layer, new):
    layer.average.add_(new - layer.average)


def assign(layer, new):
    paddle.assign(new, layer.average)


def set_value(layer, new):
    layer.average.set_value(new)


def copy(layer, new):
    layer.average.copy_(new, True)


def rebind(layer, new):
    layer.average = new


def first_none(layer, new):
    layer.state = new if layer.state is None else layer.state * 0.5 + new
    layer.average.add_(layer.state - layer.average)


NESTED = [m for depth in (2, 3) for m in itertools.product([True, False], repeat=depth)]
WRITES = [add, assign, set_value, copy, rebind, first_none]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("run", MODES)
def test_a_buffer_is_written_once_and_read_as_the_first_run_found_it(write, run):
    def scenario(run):
        layer, x = Moves(write), tensor([1.0, 2.0])
        for _ in range(3):
            h = run(layer, run(layer, x * 1.0))
            h.sum().backward()
        return values(layer.average), values(x.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("modes", NESTED)
def test_in_nested_regions_too(write, modes):
    """The early stop of the outer replay ends the inner first run before its end."""

    def nested(function, *args):
        for mode in modes:
            function = functools.partial(recompute, function, use_reentrant=mode)
        return function(*args)

    def scenario(run):
        layer, x = Moves(write), tensor([1.0, 2.0])
        for _ in range(2):
            run(lambda a: layer(paddle.exp(a * 0.1)), x * 1.0).sum().backward()
        return values(layer.average), values(x.grad)

    same(scenario, runs=(nested,))


@pytest.mark.parametrize("modes", NESTED)
def test_a_captured_tensor_that_is_state_in_nested_regions(modes):
    def nested(function, *args):
        for mode in modes:
            function = functools.partial(recompute, function, use_reentrant=mode)
        return function(*args)

    def scenario(run):
        count, x = tensor([0.0], grad=False), tensor([1.0])

        def region(a):
            count.add_(paddle.ones([1]))
            return paddle.tanh(a * 2.0) * count.clone()

        run(region, x * 1.0).sum().backward()
        return values(count), values(x.grad)

    same(scenario, runs=(nested,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: paddle.nn.BatchNorm1D(2, momentum=0.5),
        lambda: paddle.nn.BatchNorm(2, momentum=0.5),
        lambda: paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.BatchNorm1D(2)),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("run", MODES)
def test_running_statistics(make, training, run):
    def scenario(run):
        paddle.seed(1)
        norm, x = make(), tensor([[1.0, 2.0], [3.0, 8.0]])
        if not training:
            norm.eval()
        for _ in range(2):
            run(lambda a: paddle.exp(norm(a)), x * 1.0).sum().backward()
        return values(x.grad), [values(t) for t in norm.state_dict().values()]

    same(scenario, runs=(run,))


def test_a_kept_graph_and_many_replays():
    def scenario(run):
        norm, x = paddle.nn.BatchNorm1D(2), tensor([[1.0, 2.0], [3.0, 8.0]])
        y, z = run(lambda a: (paddle.exp(norm(a)), paddle.tanh(norm(a))), x * 1.0)
        y.sum().backward(retain_graph=True)
        z.sum().backward()
        return values(x.grad), values(norm._mean), values(norm._variance)

    same(scenario, runs=(hooked,))


@pytest.mark.parametrize("run", MODES)
def test_spectral_norm_in_training(run):
    def scenario(run):
        paddle.seed(1)
        layer, x = paddle.nn.utils.spectral_norm(paddle.nn.Linear(3, 3)), tensor(np.eye(3))
        for _ in range(3):
            run(lambda a: paddle.tanh(layer(a)), x * 1.0).sum().backward()
        return values(x.grad), values(layer.weight_u), values(layer.weight_orig.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_a_captured_tensor_that_is_state(run):
    def scenario(run):
        count, x = tensor([0.0], grad=False), tensor([1.0])

        def region(a):
            count.add_(paddle.ones([1]))
            return paddle.exp(a) * count.clone()

        for _ in range(2):
            run(region, x * 1.0).sum().backward()
        return values(count), values(x.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_a_buffer_that_is_rebound_between_is_read_as_it_was(run):
    def scenario(run):
        layer, x = (
            paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5)),
            tensor([[1.0, 2.0]]),
        )
        layer.register_buffer("mask", paddle.ones([2]))
        y = run(lambda a: paddle.tanh(layer(a)) * layer.mask, x * 1.0)
        layer.mask = paddle.zeros([2])
        y.sum().backward()
        return values(x.grad), values(layer.mask)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_turned_off_it_is_written_by_both_runs(run):
    def mean(run):
        norm, x = paddle.nn.BatchNorm1D(1, momentum=0.5), tensor([[1.0], [3.0]])
        run(lambda a: paddle.exp(norm(a)), x * 1.0, preserve_buffers=False).sum().backward()
        return values(norm._mean)

    assert mean(plain) == [1.0]
    assert mean(run) == [1.5]


@pytest.mark.parametrize("run", MODES)
def test_constant_buffers_cost_nothing(run):
    """Not a byte in the first run, and none in the replay."""
    size = 2**18
    layer, x = paddle.nn.Linear(2, 2), tensor([[1.0, 2.0]])
    layer.register_buffer("large", paddle.ones([size]))
    seen = []

    def region(a):
        seen.append(allocated())
        return paddle.tanh(layer(a)) * layer.large[0]

    def step():
        gc.collect()
        before = allocated()
        run(region, x * 1.0).sum().backward()
        return [now - before for now in seen[-2:]]

    step()
    assert max(step()) < 4 * size


@pytest.mark.parametrize("run", MODES)
def test_a_frozen_weight_is_not_copied(run):
    w, region = param(np.ones(8), trainable=False), Counted(lambda a, w: paddle.exp(a * w))
    pointers = []

    def looks(a):
        pointers.append(w.data_ptr())
        return region(a, w)

    run(looks, tensor(np.ones(8)) * 1.0).sum().backward()
    assert len(set(pointers)) == 1


class Rotary(paddle.nn.Layer):
    """Makes its tables when it is first called with a length, as rotary embeddings do."""

    def __init__(self, guard):
        super().__init__()
        self.guard = guard
        self.made = 0
        if guard == "length":
            self.longest = 0

    def is_short(self, length):
        if self.guard == "length":
            return length > self.longest
        if self.guard == "flag":
            return not getattr(self, "is_ready", False)
        return "table" not in self._buffers

    def forward(self, x):
        if self.is_short(len(x)):
            self.made += 1
            self.longest = len(x)
            self.is_ready = True
            self.table = paddle.arange(len(x), dtype="float32") + 1.0
        return x * self.table[: len(x)]


@pytest.mark.parametrize("guard", ["length", "flag", "the buffer itself"])
def test_tables_that_a_layer_makes_when_it_first_runs(guard):
    """PaddleNLP's Qwen: the length that it has made them for is a plain attribute."""

    def scenario(run):
        layer = Rotary(guard)
        seen = []
        for length in (2, 3, 3, 2):
            x = tensor([2.0] * length)
            run(lambda a: layer(paddle.exp(a)), x * 1.0).sum().backward()
            seen.append((values(x.grad), values(layer.table), layer.made, layer.longest))
            if guard != "length":
                break  # only by its length does it know that it needs others
        return seen

    same(scenario)


class Reads(paddle.nn.Layer):
    """Reads a buffer in its forward. Somebody else writes it."""

    def __init__(self, size=2):
        super().__init__()
        self.register_buffer("table", paddle.ones([size]))
        self.register_buffer("other", paddle.ones([2**20]))
        self.inner = paddle.nn.Linear(2, 2)

    def forward(self, x):
        return paddle.tanh(x * (self.table[:2].clone() + 1.0))


WRITES_AFTERWARDS = {
    "in place": lambda layer: layer.table.add_(paddle.ones(layer.table.shape)),
    "assigned": lambda layer: paddle.assign(layer.table * 3.0, layer.table),
    "exchanged": lambda layer: setattr(layer, "table", layer.table * 3.0),
}


@pytest.mark.parametrize("write", WRITES_AFTERWARDS)
@pytest.mark.parametrize("modes", [(True,), (False,), *NESTED])
@pytest.mark.parametrize("times", [0, 1])
def test_a_buffer_that_is_written_between_forward_and_backward(write, modes, times):
    """The next microbatch updates it, before the backward of this one."""

    def nested(function, x):
        for mode in modes:
            function = functools.partial(recompute, function, use_reentrant=mode)
        return function(x)

    def scenario(run):
        layer, x = Reads(), tensor([1.0, 2.0])
        for _ in range(times):
            layer.table.scale_(2.0)
        y = run(layer, paddle.exp(x))
        WRITES_AFTERWARDS[write](layer)
        after = values(layer.table)
        y.sum().backward()
        return values(x.grad), after, values(layer.table)

    same(scenario, runs=(lambda f, x: nested(f, x),))


@pytest.mark.parametrize("run", MODES)
def test_one_that_an_outer_region_writes_and_an_inner_one_only_reads(run):
    def scenario(run):
        layer, x = Reads(), tensor([1.0, 2.0])

        def outer(q):
            layer.table.scale_(0.5)
            h = run(layer, q)
            layer.table.add_(paddle.ones([2]))
            return h + run(layer, paddle.exp(h))

        for _ in range(2):
            run(outer, x * 1.0).sum().backward()
        return values(x.grad), values(layer.table)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_a_large_one_that_is_written_afterwards_is_refused_by_its_name(run):
    """Two MiB: nobody keeps a copy of that for each region."""
    layer, x = Reads(2**19), tensor([1.0, 2.0])
    y = run(layer, x * 1.0)
    layer.table.scale_(2.0)
    with pytest.raises(OSError, match=r"(?s)MutationError.*buffer 'table', which it reads"):
        y.sum().backward()


@pytest.mark.parametrize("run", MODES)
def test_a_large_one_that_the_region_does_not_read_may_be_written(run):
    def scenario(run):
        layer, x = Reads(), tensor([1.0, 2.0])
        y = run(layer, x * 1.0)
        layer.other.scale_(2.0)
        y.sum().backward()
        return values(x.grad)

    same(scenario, runs=(run,))


@pytest.mark.parametrize("run", MODES)
def test_a_frozen_parameter_that_is_written_afterwards_is_refused_by_its_name(run):
    layer = paddle.nn.Linear(2, 2)
    layer.weight.stop_gradient = True
    x = tensor([[1.0, 2.0]])
    y = run(lambda q: layer(q), x * 1.0)
    with paddle.no_grad():
        layer.weight.scale_(2.0)
    with pytest.raises(OSError, match=r"(?s)MutationError.*frozen parameter 'linear_\d+.w_0'"):
        y.sum().backward()


def test_only_the_buffers_that_a_region_reads_are_kept():
    """Of a whole model that its function captures."""
    model = paddle.nn.LayerList([Reads(64) for _ in range(8)])
    x = tensor(np.ones(2))
    kept = held(lambda: recompute(lambda q: model[3](q), x * 1.0))
    assert kept < held(lambda: recompute(lambda q: paddle.tanh(q * 2.0), x * 1.0)) + 2 * 64 * 4
