"""Captured parameters: their gradients come by the caller's graph, once in a backward."""

from __future__ import annotations

import copy
import threading
import types

import numpy as np
import paddle
import pytest
from support import FusedLinear, growth, param, plain, same, tensor, values

import paramproxy
from paramproxy import ReplayError, recompute
from paramproxy._aside import Aside


def heard(w):
    """What is told of a parameter's gradient: its values, and that it is ready."""
    told = []
    w.register_hook(lambda g: told.append(values(g)))
    w._register_backward_hook(lambda *_: told.append("ready"))
    return told


def test_hooks_of_a_weight_that_two_regions_capture_are_called_once():
    def scenario(run):
        w = param([2.0])
        told = heard(w)
        h = tensor([1.0]) * 1.0
        for _ in range(2):
            h = run(lambda a: a * w, h)
        h.sum().backward()
        return told, values(w.grad)

    same(scenario, ([[4.0], "ready"], [4.0]))


def test_hooks_of_a_weight_that_is_captured_passed_and_used_outside():
    def scenario(run):
        w = param([2.0])
        told = heard(w)
        h = tensor([1.0]) * 1.0
        h = run(lambda a: a * w, h)
        h = run(lambda a, p: a * p, h, w)
        (h * w).sum().backward()
        return told, values(w.grad)

    same(scenario, ([[12.0], "ready"], [12.0]))


class Pair(paddle.nn.Layer):
    """Two layers on one weight."""

    def __init__(self):
        super().__init__()
        self.first = paddle.nn.Linear(2, 2)
        self.second = paddle.nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(paddle.tanh(self.first(x)))


def test_a_weight_that_two_layers_of_a_region_share():
    def scenario(run):
        paddle.seed(3)
        pair = Pair()
        told = [heard(w) for w in dict.fromkeys(pair.parameters())]
        run(pair, tensor([[1.0, 2.0]]) * 1.0).sum().backward()
        return told, [values(w.grad) for w in pair.parameters()]

    same(scenario)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_regions_in_regions(depth):
    def scenario(run):
        w = param([2.0])
        told = heard(w)

        def nested(a, level):
            if not level:
                return a * w
            return run(lambda b: nested(b, level - 1), a) * w

        nested(tensor([1.0]) * 1.0, depth).sum().backward()
        return told, values(w.grad)

    same(scenario)


def test_a_kept_call_that_captures():
    def scenario(run):
        x, w = tensor([1.0]), param([2.0])
        told = heard(w)
        h = x * 1.0
        for _ in range(2):
            h = run(lambda a: paramproxy.keep(lambda b: b * w, a) * w, h)
        h.sum().backward()
        return told, values(w.grad), values(x.grad)

    same(scenario, ([[32.0], "ready"], [32.0], [16.0]))


def test_gradients_add_up_over_backwards():
    def scenario(run):
        w = param([2.0])
        seen = []
        for _ in range(3):
            run(lambda a: a * w, tensor([3.0]) * 1.0).sum().backward()
            seen.append(values(w.grad))
        return seen

    same(scenario, [[3.0], [6.0], [9.0]])


def test_a_fused_backward_finds_the_parameter_with_its_own_gradient():
    """And tells its reducer itself, where there is one."""
    seen = []

    class Fused(FusedLinear):
        @staticmethod
        def backward(ctx, dy):
            w = ctx.saved_tensor()[1]
            seen.append((w is weight, values(w.grad)))
            if hasattr(w, "_apply_backward_hook"):
                w._apply_backward_hook()
            return FusedLinear.backward(ctx, dy)

    def scenario(run):
        global weight
        seen.clear()
        weight = param([[3.0]])
        weight.grad = paddle.to_tensor([[5.0]])
        told = []
        weight._register_backward_hook(lambda *_: told.append("ready"))
        run(lambda a, w=weight: Fused.apply(a, w), tensor([[2.0]]) * 1.0).sum().backward()
        return list(seen), values(weight.main_grad), values(weight.grad), told.count("ready")

    same(scenario)


def test_a_parameter_is_itself_in_the_replay():
    def scenario(run):
        w = param([2.0])
        w.tag = "mine"
        seen = []

        def region(a):
            seen.append((w.tag, w.name == name, w.is_leaf, w.stop_gradient, w.trainable))
            return a * w

        name = w.name
        run(region, tensor([3.0]) * 1.0).backward()
        return set(seen)

    same(scenario, {("mine", True, True, False, True)})


def test_a_storage_that_the_function_exchanges_stays():
    """As a sharding stage gathers a parameter when its layer is called."""

    def scenario(run):
        w = param([2.0])
        whole = paddle.to_tensor([5.0])

        def region(a):
            whole._share_buffer_to(w)
            return a * w

        x = tensor([3.0])
        h = x * 1.0
        w_before = w._inplace_version()
        run(region, h).backward()
        return values(x.grad), values(w), w._inplace_version() - w_before, values(w.grad)

    same(scenario, ([5.0], [5.0], 0, [3.0]))


def test_a_replay_that_raises_leaves_the_parameter_as_it_was():
    w = param([2.0])
    told = heard(w)
    calls = []

    def region(a):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError
        return a * w

    y = recompute(region, tensor([3.0]) * 1.0)
    with pytest.raises(OSError, match=ReplayError.__name__):
        y.backward()
    assert w.grad is None
    recompute(region, tensor([3.0]) * 1.0).backward()
    assert told == [[3.0], "ready"]
    assert values(w.grad) == [3.0]


def test_nothing_is_left_behind():
    layer = paddle.nn.Linear(64, 64)

    def step():
        recompute(layer, paddle.ones([64, 64]) * tensor([1.0])).sum().backward()
        layer.clear_gradients()

    assert growth(step) == 0


class Model(paddle.nn.Layer):
    """Of three layers a block uses one."""

    def __init__(self):
        super().__init__()
        constant = paddle.nn.initializer.Constant(0.5)
        self.first, self.second, self.third = (
            paddle.nn.Linear(1, 1, weight_attr=constant) for _ in range(3)
        )


USES = {
    "an attribute": lambda model, x: model.first(x),
    "getattr": lambda model, x: getattr(model, "first")(x),  # noqa: B009
    "parameters()": lambda model, x: x * sum(p.sum() for p in model.first.parameters()),
    "named_parameters()": lambda model, x: x * dict(model.first.named_parameters())["weight"],
    "state_dict()": lambda model, x: x * model.first.state_dict()["weight"],
    "_parameters": lambda model, x: x * model.first._parameters["weight"],
    "get": lambda model, x: x * model.first._parameters.get("weight"),
    "the model's parameters()": lambda model, x: x * next(iter(model.parameters())),
}


@pytest.mark.parametrize("use", USES)
def test_of_a_captured_model_only_what_is_used_is_told(use):
    """A closure over `self` captures all of it. Nobody else waits for a gradient, or gets None."""

    def scenario(run):
        model = Model()
        told = {name: heard(p) for name, p in model.named_parameters()}
        run(lambda x: USES[use](model, x), tensor([[3.0]]) * 1.0).sum().backward()
        used = {name: seen for name, seen in told.items() if name.startswith("first.w")}
        others = [seen for name, seen in told.items() if not name.startswith("first")]
        return used, others, values(model.first.weight.grad), model.second.weight.grad

    used, others, gradient, nothing = scenario(recompute)
    expected_used, _, expected, _ = scenario(plain)
    assert (used, gradient, nothing) == (expected_used, expected, None)
    if use != "the model's parameters()":  # where nobody can tell which of them are used
        assert not any(others)


def test_an_expert_that_gets_no_token():
    """Its hooks are called in the steps in which it gets one, as without recompute."""

    def scenario(run):
        model = Model()
        told = heard(model.second.weight)
        seen = []
        for expert in ("first", "second", "first"):
            x = tensor([[3.0]])
            run(lambda x, e=expert: getattr(model, e)(x), x * 1.0).sum().backward()
            seen.append(list(told))
        return seen

    same(scenario)


def test_a_layer_is_as_it_was_after_its_uses_were_noted():
    model = Model()
    own = [layer._parameters for layer in model.sublayers(include_self=True)]

    def check():
        now = [layer._parameters for layer in model.sublayers(include_self=True)]
        assert all(one is other for one, other in zip(own, now))

    def raising(x):
        model.first(x)
        raise KeyError

    x = tensor([[3.0]])
    recompute(lambda x: model.first(x), x * 1.0).backward()
    check()
    with pytest.raises(KeyError):
        recompute(raising, x * 1.0)
    check()


WAYS_TO_READ = {
    "by name": lambda layer: [layer.first, layer.second],
    "getattr of each name": lambda layer: [getattr(layer, name) for name in layer._parameters],
    "keys": lambda layer: [layer._parameters[name] for name in layer._parameters.keys()],  # noqa: SIM118
    "reversed": lambda layer: [layer._parameters[n] for n in reversed(layer._parameters)][::-1],
    "sorted": lambda layer: [layer._parameters.get(name) for name in sorted(layer._parameters)],
    "values": lambda layer: list(layer._parameters.values()),
    "items": lambda layer: [weight for _, weight in layer._parameters.items()],
    "copy": lambda layer: list(layer._parameters.copy().values()),
    "dict": lambda layer: list(dict(layer._parameters).values()),
    "two stars": lambda layer: list({**layer._parameters}.values()),
    "union": lambda layer: list((layer._parameters | {}).values()),
    "union of another": lambda layer: list(({} | layer._parameters).values()),
    "setdefault": lambda layer: [
        layer._parameters.setdefault(n, None) for n in ("first", "second")
    ],
    "popitem": lambda layer: [layer._parameters.popitem()[1] for _ in range(2)][::-1],
    "parameters": lambda layer: layer.parameters(),
    "named_parameters": lambda layer: [weight for _, weight in layer.named_parameters()],
}


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_every_way_to_take_parameters_out_of_a_layer_is_noted(way):
    """A gradient that is not noted would come in the middle of backward, hooks out of place."""

    def scenario(run):
        layer = paddle.nn.Layer()
        layer.add_parameter("first", param([2.0]))
        layer.add_parameter("second", param([3.0]))
        weights = layer.parameters()
        told = [heard(weight) for weight in weights]
        before = dict(layer._parameters)

        def region(x):
            first, second = WAYS_TO_READ[way](layer)
            layer._parameters.update(before)
            return x * first * second

        x = tensor([3.0])
        (run(region, x * 1.0) + run(region, x * 2.0)).sum().backward()
        return values(x.grad), [values(w.grad) for w in weights], told

    same(scenario)


def test_a_layer_that_is_made_in_the_region_of_weights_that_were_passed():
    """They are leaves there, whose own parameters must stay in their place in the graph."""

    def scenario(run):
        w, x = param([[1.0, 2.0], [3.0, 4.0]]), tensor([[1.0, 1.0]])

        def block(q, weight):
            layer = paddle.nn.Layer()
            layer.add_parameter("weight", weight)
            return run(lambda q: paddle.tanh(q) @ layer.weight, q) * run(lambda q: q * 2.0, q)

        for _ in range(2):
            (run(block, x * 1.0, w) + paddle.matmul(x, w)).sum().backward()
        return values(w.grad), values(x.grad)

    same(scenario)


def test_what_is_done_to_a_layer_while_its_uses_are_noted_is_done_to_it():
    def scenario(run):
        model = Model()

        def region(x):
            if "late" not in model._parameters:
                model.add_parameter("late", param([[2.0]]))
                del model.third.bias
            twin = copy.deepcopy(model.first)
            return x * model.late * twin.weight.detach() * model.second.weight

        x = tensor([[3.0]])
        run(region, x * 1.0).sum().backward()
        names = [name for name, _ in model.named_parameters()]
        return values(x.grad), names, type(model._parameters).__name__

    plain_result = scenario(plain)
    assert scenario(recompute) == plain_result


def test_caveat_the_hook_of_a_parameter_that_is_passed_and_not_used_is_called_with_none():
    """As Paddle calls it wherever a PyLayer has returned None. Without recompute it is not."""

    def scenario(run):
        w, told = param([2.0]), []
        w.register_hook(lambda g: told.append(g is None or not g._is_initialized()))
        run(lambda x, w: x * 2.0, tensor([3.0]) * 1.0, w).sum().backward()
        return told, w.grad

    assert scenario(plain) == ([], None)
    assert scenario(recompute) == ([True], None)


def test_caveat_a_parameter_that_no_search_finds_is_told_once_for_each_region():
    hidden = types.SimpleNamespace(box=types.SimpleNamespace(w=None))

    def scenario(run):
        hidden.box.w = param([2.0])
        told = heard(hidden.box.w)
        h = tensor([1.0]) * 1.0
        for _ in range(2):
            h = run(lambda a: a * hidden.box.w, h)
        h.sum().backward()
        return told.count("ready"), values(hidden.box.w.grad)

    assert scenario(plain) == (1, [4.0])
    assert scenario(recompute) == (2, [4.0])


# Other threads.


def test_threads_may_recompute_on_the_same_weights():
    """Each records regions while the others replay. Only Paddle's own adding up needs the lock."""
    w = param(np.ones(8))
    errors = []
    adding_up = threading.Lock()

    def work():
        try:
            for _ in range(20):
                y = recompute(lambda a: a * w, tensor(np.ones(8)) * 1.0)
                y = recompute(lambda a, p: a * p, y, w)
                with adding_up:
                    y.sum().backward()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert values(w.grad) == [160.0] * 8


def test_caveat_a_graph_that_another_thread_records_meanwhile_is_refused():
    """Its gradient would go to the replay's leaf, and be lost."""
    w, x = param([2.0]), tensor([3.0])
    recorded, outcome = [], []

    def region(a):
        if calls:
            other = threading.Thread(target=lambda: recorded.append(x * w))
            other.start()
            other.join()
        calls.append(1)
        return a * w

    calls = []
    y = recompute(region, tensor([1.0]) * 1.0)

    def backward():
        try:
            y.backward()
        except BaseException as exc:
            outcome.append(exc)

    replaying = threading.Thread(target=backward)
    replaying.start()
    replaying.join()
    assert not outcome
    assert values(w.grad) == [1.0]
    with pytest.raises(OSError, match="was recorded while another thread replayed"):
        recorded[0].backward()


def test_claims_are_by_parameter():
    """Another thread may go on with weights of its own, and waits for these."""
    w, other = param([1.0]), param([1.0])
    order = []
    aside = Aside([w])
    with aside.recording():
        free = threading.Thread(target=lambda: _record(Aside([other]), order, "free"))
        waiting = threading.Thread(target=lambda: _record(Aside([w, other]), order, "waiting"))
        waiting.start()
        free.start()
        free.join(10)
        assert order == ["free"]
        with Aside([w, w]).recording():  # the same thread, a region in a region
            order.append("inner")
    waiting.join(10)
    assert order == ["free", "inner", "waiting"]


def _record(aside, order, name):
    with aside.recording():
        order.append(name)
