"""Plain objects among the arguments that a function writes into: as without recompute."""

from __future__ import annotations

import types

import attrs
import paddle
import pytest
from support import MODES, hooked, param, plain, same, tensor, values

import paramproxy
from paramproxy import ReplayError, recompute


class Cache:
    """Keys of each layer; a layer adds to its own."""

    def __init__(self):
        self.layers = []
        self.seen = set()
        self.sizes = {}
        self.steps = 0

    def update(self, index, key):
        self.steps += 1
        self.seen.add(index)
        if len(self.layers) == index:
            self.layers.append(types.SimpleNamespace(keys=None))
        layer = self.layers[index]
        layer.keys = key if layer.keys is None else paddle.concat([layer.keys, key])
        self.sizes[index] = len(layer.keys)
        return layer.keys


def attend(x, w, cache, index):
    keys = cache.update(index, paddle.tanh(x))
    return paddle.tanh(x * w).sum() * keys.sum() + x


def content(cache):
    keys = [values(layer.keys) for layer in cache.layers]
    return keys, cache.seen, cache.sizes, cache.steps


@pytest.mark.parametrize("how", ["positional", "keyword", "in a list"])
def test_a_cache_that_every_layer_adds_to(how):
    def scenario(run):
        x, w, cache = tensor([1.0, 2.0]), param([0.5, 0.25]), Cache()
        h = x * 1.0
        for index in range(3):
            if how == "positional":
                h = run(attend, h, w, cache, index)
            elif how == "keyword":
                h = run(attend, h, w, cache=cache, index=index)
            else:
                h = run(lambda h, w, box, index: attend(h, w, *box, index), h, w, [cache], index)
        h.sum().backward()
        return values(h), values(x.grad), values(w.grad), content(cache)

    same(scenario)


def test_a_cache_that_holds_the_tokens_before():
    def scenario(run):
        w, cache = param([0.5, 0.25]), Cache()
        with paddle.no_grad():
            attend(tensor([3.0, 4.0]), w, cache, 0)
        x = tensor([1.0, 2.0])
        run(attend, x * 1.0, w, cache, 0).sum().backward()
        return values(x.grad), values(w.grad), content(cache)

    same(scenario)


def test_counters_and_lists_on_an_argument_are_written_once():
    @attrs.define(slots=False)
    class State:
        calls: int = 0
        log: list = attrs.field(factory=list)

    def region(a, state):
        state.calls += 1
        state.log.append(state.calls)
        state.made_here = {"calls": state.calls}
        return a * state.calls

    def scenario(run):
        x, state = tensor([2.0]), State()
        y = run(region, x * 1.0, state)
        y = run(region, y, state)
        y.backward()
        return values(x.grad), state.calls, state.log, state.made_here

    same(scenario, ([2.0], 2, [1, 2], {"calls": 2}))


def test_what_the_caller_writes_between_forward_and_backward_stays():
    def scenario(run):
        x, state = tensor([2.0]), types.SimpleNamespace(factor=3.0, note="")

        def region(a, state):
            state.note = "region"
            return a * state.factor

        y = run(region, x * 1.0, state)
        state.note = "caller"
        y.backward()
        return values(x.grad), state.note

    same(scenario, ([3.0], "caller"))


@pytest.mark.parametrize("run", MODES)
def test_a_replay_that_raises_puts_everything_back(run):
    state = types.SimpleNamespace(calls=0)
    calls = []

    def region(a, state):
        state.calls += 1
        calls.append(1)
        if len(calls) == 2:
            raise ValueError
        return paddle.exp(a)

    y = run(region, tensor([1.0]) * 1.0, state)
    with pytest.raises(OSError, match=ReplayError.__name__):
        y.backward()
    assert state.calls == 1


def test_a_callable_argument_counts_both_runs():
    """What is called is the function's own, as the function is."""

    class Count:
        calls = 0

        def __call__(self, a):
            self.calls += 1
            return paddle.exp(a)

    count = Count()
    recompute(lambda a, f: f(a), tensor([1.0]) * 1.0, count).backward()
    assert count.calls == 2


def test_objects_that_hold_each_other():
    def scenario(run):
        x, one, other = tensor([2.0]), types.SimpleNamespace(n=1), types.SimpleNamespace(n=1)
        one.other, other.one = other, one

        def region(a, one):
            one.other.n += 1
            return a * one.other.one.n * one.other.n

        run(region, x * 1.0, one).backward()
        return values(x.grad), other.n

    same(scenario, ([2.0], 2))


def test_a_large_object_is_not_searched_to_its_end():
    big = types.SimpleNamespace(items=[types.SimpleNamespace(n=i) for i in range(5000)])
    x = tensor([2.0])
    recompute(lambda a, big: a * big.items[7].n, x * 1.0, big).backward()
    assert values(x.grad) == [7.0]


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_kept_call_has_written_counts_as_written(nested):
    """A replay does not make the call, and goes on from what it left behind."""

    def scenario(run):
        x, state = tensor([1.0, 2.0]), types.SimpleNamespace(steps=0, log=[])

        def step(a):
            state.steps += 1
            state.log.append(state.steps)
            return paddle.exp(a)

        def region(a, state):
            state.steps += 1
            b = paramproxy.keep(step, a)
            state.steps += 1
            state.log.append(state.steps)
            return paddle.tanh(b * state.steps) * len(state.log)

        def outer(a, state):
            return run(region, a, state) if nested else region(a, state)

        h = run(outer, x * 1.0, state)
        h = run(outer, h, state)
        h.sum().backward()
        return values(h), values(x.grad), state.steps, state.log

    same(scenario)


def test_caveat_what_a_kept_call_hands_on_by_an_object_has_no_gradient_in_reentrant_mode():
    def scenario(run):
        x, cache = tensor([1.0]), Cache()

        def region(a, cache):
            paramproxy.keep(lambda b: cache.update(0, b * 2.0), a)
            return cache.layers[0].keys + a

        run(region, x * 1.0, cache).sum().backward()
        return values(x.grad)

    assert scenario(plain) == scenario(hooked) == [3.0]
    assert scenario(recompute) == [1.0]
