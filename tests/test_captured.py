"""What a function reads besides its arguments, as its first run found it."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import types
import weakref

import paddle
import pytest
from support import MODES, Counted, param, same, tensor, values

from paramproxy import MutationError, recompute
from paramproxy._captured import LARGEST_SEARCH, Captured


def test_an_activation_that_is_argument_and_captured_has_both_gradients():
    def scenario(run):
        x = tensor([1.0, 2.0])
        h = x * 3.0
        y = run(lambda a: a * h, h)
        (y + h).sum().backward()
        return values(y), values(x.grad)

    same(scenario, ([9.0, 36.0], [21.0, 39.0]))


@pytest.mark.parametrize(
    "capture",
    [
        lambda h: lambda a: a * h,
        lambda h: lambda a, b=h: a * b,
        lambda h: functools.partial(lambda b, a: a * b, h),
        lambda h: functools.partial(lambda a, b: a * b, b=h),
        lambda h: (lambda box: lambda a: a * box[0])([h]),
        lambda h: (lambda box: lambda a: a * box["h"])({"h": h, "n": 1}),
        lambda h: (lambda inner: lambda a: inner(a))(lambda a: a * h),
        lambda h: (lambda box: lambda a: a * box[0][1]["h"])([(0, {"h": h})]),
    ],
    ids=[
        "cell",
        "default",
        "partial",
        "partial keyword",
        "list",
        "dict",
        "nested function",
        "deep",
    ],
)
class TestCapturedActivations:
    """An activation of the caller's graph that the function did not get as an argument."""

    def test_the_graph_before_it_runs_backward_once(self, capture):
        calls = []

        class Count(paddle.autograd.PyLayer):
            @staticmethod
            def forward(ctx, x):
                return x * 2.0

            @staticmethod
            def backward(ctx, dy):
                calls.append(1)
                return dy * 2.0

        def scenario(run):
            calls.clear()
            x = tensor([1.0, 2.0])
            h = Count.apply(x)
            y = run(capture(h), x * 1.0)
            (y * y + h).sum().backward()
            return values(y), values(x.grad), len(calls)

        same(scenario)

    def test_freeing_it_between_forward_and_backward_is_no_matter(self, capture):
        def scenario(run):
            x = tensor([1.0, 2.0])
            h = x * 3.0
            y = run(capture(h), x * 1.0)
            h._clear_dataptr()
            y.sum().backward()
            return values(x.grad), h._is_initialized()

        same(scenario, ([6.0, 12.0], False))


def test_a_loop_variable_that_moved_on_is_as_the_first_run_found_it():
    def scenario(run):
        x = h = tensor([1.0, 2.0])
        for layer in [lambda a: a * 2.0, lambda a: a * a, lambda a: a + 1.0]:
            h = run(lambda a: layer(a), h * 1.0)  # noqa: B023
        h.sum().backward()
        return values(x.grad)

    same(scenario, [8.0, 16.0])


def test_a_variable_that_the_function_assigns_keeps_counting():
    calls = 0

    def region(a):
        nonlocal calls
        calls += 1
        return a * calls**0

    recompute(region, tensor([1.0]) * 1.0).sum().backward()
    assert calls == 2


def test_a_counter_in_a_captured_dict_keeps_counting():
    state = {"calls": 0}

    def region(a):
        state["calls"] += 1
        return a * 2.0

    recompute(region, tensor([1.0]) * 1.0).sum().backward()
    assert state["calls"] == 2


def test_a_function_that_captures_itself():
    def scenario(run):
        def power(a, n):
            return a if n == 0 else a * power(a, n - 1)

        x = tensor([2.0])
        h = x * 1.0
        run(lambda a: power(a, 3) * h, h).sum().backward()
        return values(x.grad)

    same(scenario, [80.0])


def test_a_variable_that_is_assigned_only_later():
    def scenario(run):
        def region(a):
            return a * (later if a.sum() > 100.0 else 2.0)

        y = run(region, tensor([1.0]) * 1.0)
        later = 5.0
        y.sum().backward()
        return values(y), later

    same(scenario)


def test_identity_of_what_is_captured_is_kept_where_it_can_be():
    w, mask = param([2.0]), tensor([1.0], grad=False)
    w.mask = mask
    seen = []

    def region(a):
        seen.append(w.mask is mask)
        return a * w * mask

    recompute(region, tensor([3.0]) * 1.0).sum().backward()
    assert seen == [True, True]


class Holder:
    """A callable that keeps a tensor as an attribute."""

    def __init__(self, mask):
        self.mask = mask

    def __call__(self, a):
        return a * self.mask * a

    def method(self, a):
        return self(a)


MASK = None
ACTIVATION = None


def _reads_a_global(a):
    return a * MASK * a


@pytest.mark.parametrize("kind", ["callable object", "bound method", "global"])
def test_what_no_stand_in_can_replace_is_lent_its_storage(kind):
    def scenario(run):
        global MASK
        x = tensor([1.0, 2.0])
        MASK = mask = tensor([3.0, 0.5], grad=False) * 1.0
        holder = Holder(mask)
        function = {
            "callable object": holder,
            "bound method": holder.method,
            "global": _reads_a_global,
        }[kind]
        y = run(function, x * 1.0)
        mask._clear_dataptr()
        y.sum().backward()
        return values(x.grad), mask._is_initialized()

    same(scenario, ([6.0, 2.0], False))


def _reads_an_activation(a):
    return a * ACTIVATION


class Remembers(paddle.nn.Layer):
    """Keeps an activation as an attribute, or in something it keeps."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def forward(self, a):
        memory = self.memory
        while not isinstance(memory, paddle.Tensor):
            memory = next(iter(vars(memory).values() if hasattr(memory, "__dict__") else memory))
        return a * memory

    def method(self, a):
        return self(a)


OUTSIDE = {
    "callable object": (Holder, "attribute 'mask'"),
    "bound method": (lambda h: Holder(h).method, "attribute 'mask'"),
    "layer": (Remembers, "attribute 'memory'"),
    "layer's list": (lambda h: Remembers([h]), "attribute 'memory'[0]"),
    "layer's method": (lambda h: Remembers(h).method, "attribute 'memory'"),
    "layer in a closure": (
        lambda h: (lambda layer: lambda a: layer(a))(Remembers(h)),
        "attribute 'memory'",
    ),
    "namespace in a closure": (
        lambda h: (lambda box: lambda a: a * box.h)(types.SimpleNamespace(h=h)),
        "attribute 'h'",
    ),
    "named tuple in a closure": (
        lambda h: (lambda box: lambda a: a * box.h)(Named(h)),
        "attribute 0",
    ),
    "global": (lambda h: globals().update(ACTIVATION=h) or _reads_an_activation, "global variable"),
}
Named = collections.namedtuple("Named", "h")


@pytest.mark.parametrize(("make", "words"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_an_activation_that_nothing_can_stand_in_for_is_refused_by_name(make, words):
    """Run backward from inside as well, the graph around would crash the interpreter."""
    w = param([3.0, 4.0])
    h = recompute(paddle.tanh, w)
    y = recompute(make(h), tensor([1.0, 2.0]) * 1.0) + h
    with pytest.raises(OSError, match="and no stand-in can be put there") as caught:
        y.sum().backward()
    assert f"it uses {words}" in str(caught.value)
    assert "Pass it as an argument." in str(caught.value)


@pytest.mark.parametrize("make", [Remembers, lambda h: Remembers([h])])
def test_an_activation_that_is_kept_and_not_used_is_no_matter(make):
    """As a layer's auxiliary loss of the step before."""

    class Stale(Remembers):
        def forward(self, a):
            self.memory = (a * a).sum()
            return a * 2.0

    def scenario(run):
        layer, x = Stale(tensor([1.0]) * 2.0), tensor([1.0, 2.0])
        for _ in range(3):
            run(layer, x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [6.0, 6.0])


@pytest.mark.parametrize(
    ("call", "literal"),
    [
        (lambda run, h: run(h.tanh), None),
        (lambda run, h: run(h.multiply, h), None),
        (lambda run, h: run(h.clone), [6.0, 6.0]),
    ],
    ids=["method", "method with argument", "C method"],
)
def test_a_method_of_an_activation(call, literal):
    def scenario(run):
        x = tensor([1.0, 2.0])
        h = x * 3.0
        (call(run, h) + h).sum().backward()
        return values(x.grad)

    same(scenario, literal)


def test_a_function_that_captures_itself_and_an_activation():
    def scenario(run):
        x = tensor([2.0, 3.0])
        h = x * 1.0

        def power(a, n):
            return a if n == 0 else power(a * h, n - 1)

        (run(lambda a: power(a, 3), x * 1.0) + h).sum().backward()
        return values(x.grad)

    same(scenario, [33.0, 109.0])


def test_a_function_or_layer_among_the_arguments_is_searched_too():
    def scenario(run):
        x, layer = tensor([[1.0, 2.0]]), paddle.nn.Linear(2, 2)
        paddle.nn.initializer.Constant(0.5)(layer.weight)
        h = x * 3.0
        y = run(lambda f, g, a: f(g(a)), lambda a: a * h, layer, x * 1.0)
        (y + h).sum().backward()
        return values(x.grad), values(layer.weight.grad)

    same(scenario)
    layer, x = paddle.nn.Linear(2, 2), tensor([[1.0, 2.0]])
    y = recompute(lambda g, a: g(a) * 1.0, layer, x)
    with paddle.no_grad():
        layer.weight.add_(paddle.ones([2, 2]))
    with pytest.raises(OSError, match="was changed in place"):
        y.sum().backward()


def test_state_of_an_owner_that_the_method_does_not_name_may_change():
    class Trainer:
        def __init__(self):
            self.w = param([2.0])
            self.other = paddle.nn.Linear(2, 2)
            self.total = tensor([0.0], grad=False)

        def region(self, a):
            return a * self.w

    def scenario(run):
        trainer, x = Trainer(), tensor([3.0])
        y = run(trainer.region, x * 1.0)
        with paddle.no_grad():
            trainer.total.add_(paddle.ones([1]))
            trainer.other.weight.add_(paddle.ones([2, 2]))
        y.sum().backward()
        return values(x.grad), values(trainer.w.grad)

    same(scenario, ([2.0], [3.0]))


@pytest.mark.parametrize("frozen_first", [True, False])
@pytest.mark.parametrize("how", ["closure", "layer", "method"])
def test_a_weight_that_is_frozen_or_unfrozen_in_between_is_as_in_the_first_run(how, frozen_first):
    """As a GAN does with its discriminator."""

    def scenario(run):
        layer, x = paddle.nn.Linear(2, 2), tensor([[1.0, 2.0]])
        weight = layer.weight
        weight.stop_gradient = frozen_first
        function = {
            "closure": lambda a: paddle.matmul(a, weight),
            "layer": layer,
            "method": layer.forward,
        }[how]
        y = run(function, x * 1.0)
        weight.stop_gradient = not frozen_first
        y.sum().backward()
        return values(weight.grad), weight.stop_gradient

    got = same(scenario)
    assert (got[0] is None) == frozen_first


def test_a_layer_that_is_switched_to_eval_in_between_is_replayed_in_training():
    def scenario(run):
        layer, x = (
            paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.5)),
            tensor([[1.0] * 4]),
        )
        layer[0].weight.set_value(paddle.ones([4, 4]))
        y = run(layer, x * 1.0)
        layer.eval()
        y.sum().backward()
        return values(y), values(x.grad), layer.training, layer[1].training

    same(scenario)


def test_state_in_a_closure_may_move_on_with_the_next_micro_batch():
    count = tensor([0.0], grad=False)

    def region(a):
        with paddle.no_grad():
            count.add_(paddle.ones([1]))
        return a * 2.0

    x = tensor([1.0])
    first, second = recompute(region, x * 1.0), recompute(region, x * 1.0)
    first.sum().backward()
    second.sum().backward()
    assert values(x.grad) == [4.0]


def test_a_captured_tensor_that_is_written_and_returned_is_refused():
    def make():
        out = paddle.zeros([2])

        def region(a):
            out[0] = a[0] * 3.0
            return out

        return region

    with pytest.raises(
        MutationError, match="it writes into closure variable 'out' and returns it"
    ) as caught:
        recompute(make(), tensor([1.0, 2.0]) * 1.0)
    assert "Return a new tensor." in str(caught.value)


def _cycle():
    tree = {"scale": 2.0, "children": []}
    tree["children"].append({"parent": tree})
    return lambda a: a * tree["scale"] * len(tree["children"])


def _deep():
    box = []
    for _ in range(3000):
        box = [box]
    return lambda a: a * 2.0 * len(box)


def _wide():
    box = [[[i] * 200 for i in range(200)] for _ in range(200)]
    return lambda a: a * 2.0 * (len(box) // 200)


@pytest.mark.parametrize("make", [_cycle, _deep, _wide], ids=["cycle", "deep", "wide"])
def test_whatever_is_captured_is_searched_within_bounds(make):
    def scenario(run):
        x = tensor([1.0])
        run(make(), x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [2.0])
    captured = Captured.by(make(), ())
    assert len(captured._seen) <= LARGEST_SEARCH + 1


def test_what_is_remembered_of_bytecode_keeps_no_class_alive():
    def once():
        class Local(paddle.nn.Layer):
            def forward(self, a):
                return a * 2.0

        recompute(Local().forward, tensor([1.0]) * 1.0).sum().backward()
        return weakref.ref(Local)

    dead = [once() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


def _global_helper(a):
    return a * DEEP_ACTIVATION


DEEP_ACTIVATION = None


def test_an_activation_that_was_not_found_is_named_as_the_likely_cause():
    global DEEP_ACTIVATION
    x = tensor([1.0])
    DEEP_ACTIVATION = paddle.tanh(x)
    y = recompute(lambda a: _global_helper(a), x * 1.0)
    with pytest.raises(
        OSError, match="it uses an activation of the graph around it that was found"
    ) as caught:
        (y + DEEP_ACTIVATION).sum().backward()
    assert "Pass it as an argument." in str(caught.value)


class TestFreedArguments:
    """Pipeline schedules free what they passed on; plain autograd keeps what it saved."""

    @pytest.mark.parametrize(
        ("wrap", "use"),
        [
            (lambda t: t, lambda a: a),
            (lambda t: (t, 1), lambda a: a[0]),
            (lambda t: {"deep": [t]}, lambda a: a["deep"][0]),
        ],
        ids=["argument", "tuple", "dict"],
    )
    @pytest.mark.parametrize("grad", [True, False])
    def test_freeing_one_between_forward_and_backward_is_no_matter(self, wrap, use, grad):
        def scenario(run):
            x = tensor([1.0, 2.0])
            h = tensor([3.0, 4.0], grad=grad) * 1.0
            region = Counted(lambda a, b: use(a) * b * use(a))
            y = run(region, wrap(h), x * 1.0)
            h._clear_dataptr()
            y.sum().backward()
            return values(x.grad), h._is_initialized()

        same(scenario, ([9.0, 16.0], False))

    def test_freeing_the_output_is_no_matter(self):
        def scenario(run):
            x = tensor([1.0, 2.0])
            y = run(lambda a: a * a, x * 1.0)
            z = (y * 3.0).sum()
            y._clear_dataptr()
            z.backward()
            return values(x.grad)

        same(scenario, [6.0, 12.0])


@pytest.mark.parametrize("where", ["closure", "list in a closure", "attribute", "list"])
def test_what_was_freed_before_the_first_run_is_no_matter(where):
    class Keeps(paddle.nn.Layer):
        def forward(self, a):
            return a * 2.0

    def scenario(run):
        x, layer = tensor([1.0, 2.0]), Keeps()
        h = x * 3.0
        box = [h]
        if where == "attribute":
            layer.kept = h
        elif where == "list":
            layer.kept = box
        function = {
            "closure": lambda a: a * 2.0 if h is not None else a,
            "list in a closure": lambda a: a * 2.0 * len(box),
        }.get(where, layer)
        h._clear_dataptr()
        run(function, x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [2.0, 2.0])


def test_a_large_container_is_data_and_not_searched():
    big = [tensor([float(i)], grad=False) for i in range(1000)]

    def scenario(run):
        x = tensor([1.0])
        run(lambda a: a * big[7], x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [7.0])


def test_two_threads_that_replay_one_function_do_not_meet():
    w = param([2.0])
    errors = []

    def work(k):
        try:
            for i in range(30):
                x = tensor([float(k)])
                h = x * float(i)
                y = recompute(lambda a: a * h * 2.0, h, preserve_rng_state=False)  # noqa: B023
                y.sum().backward()
                assert values(x.grad) == [4.0 * i * i * k]
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert w.grad is None


class Keeper(paddle.nn.Layer):
    """Holds a function, as a layer holds its activation, that has a world of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial, lambda f: Keeper(f).forward])
def test_what_a_function_captures_that_a_layer_holds(run, wrap):
    """Its weights, its constants, and the buffers that it writes."""

    def scenario(run):
        w, x = param([2.0, 3.0]), tensor([0.5, 1.0])
        told = []
        w.register_hook(lambda g: told.append(values(g)))
        state = paddle.nn.Layer()
        state.register_buffer("average", paddle.zeros([2]))
        c = tensor([2.0, 0.5], grad=False)

        def function(q):
            with paddle.no_grad():
                state.average.add_(q)
            return paddle.tanh(q * w) * c * state.average.clone()

        holder = Keeper(wrap(function))
        total = run(holder, x * 1.0) + run(lambda q: holder(q), x * 2.0)
        del function
        total.sum().backward()
        return values(x.grad), values(w.grad), told, values(state.average)

    same(scenario, runs=(run,))


def test_an_activation_that_such_a_function_captures_is_named():
    x = tensor([0.5, 1.0])
    h = x * 3.0
    layer = Keeper(lambda q: q * h)
    same(lambda run: values(run(layer, x * 1.0)))
    y = recompute(layer, x * 1.0)
    with pytest.raises(OSError, match=r"(?s)UnsupportedError.*closure variable 'h', an activation"):
        y.sum().backward()
    y = recompute(layer, x * 1.0, use_reentrant=False)
    y.sum().backward()
    assert values(x.grad) == [3.0, 6.0]


def test_a_constant_that_such_a_function_captures_may_not_be_written_in_between():
    x, c = tensor([0.5, 1.0]), tensor([2.0, 3.0], grad=False)
    y = recompute(Keeper(lambda q: q * c), x * 1.0)
    c.scale_(2.0)
    with pytest.raises(OSError, match=r"(?s)MutationError.*closure variable 'c'"):
        y.sum().backward()
