"""Eight threads at once, of both engines and none: each gets what it gets alone, without recompute.

All values are small integers where anything is added up in an order of its own, so
that sums are exact, and results are compared bit for bit.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle
import pytest
from support import FusedLinear, hooked, param, plain, tensor
from test_dispatch import SeenBox, is_clean

import paramproxy
from paramproxy import _dispatch, is_recomputing, keep, recompute


THREADS = 8
STEPS = 60
PATIENCE = 60


@pytest.fixture(autouse=True)
def _impatient_threads():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(jobs):
    """Run the jobs, each in a thread, from the same moment on. Returns what each gave.

    A job that raises gives its error, and one that never ends fails the test.
    """
    barrier = threading.Barrier(len(jobs))
    results = [None] * len(jobs)

    def work(index, job):
        try:
            barrier.wait(PATIENCE)
            results[index] = job()
        except BaseException as exc:
            results[index] = exc
        state = paddle.is_grad_enabled(), is_recomputing(), len(_dispatch._local.frames)
        if state != (True, False, 0):
            results[index] = state, results[index]

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), results
    return results


def assert_lights_are_off():
    """No hooks are left, once the last thread has saved a tensor."""
    paddle.exp(tensor([1.0]))
    dispatcher = _dispatch._dispatcher
    assert (dispatcher.users, dispatcher.registered, dispatcher.native) == (0, None, None)
    assert not dispatcher.is_shared
    assert is_clean()
    assert paddle.is_grad_enabled()
    assert not is_recomputing()


def integers(seed):
    return np.random.RandomState(seed).randint(-2, 3, (4, 4))


def bits(*tensors):
    """The bytes of each tensor; None for None."""
    return [None if t is None else t.numpy().tobytes() for t in tensors]


class Model:
    """The weights of one thread."""

    def __init__(self, seed):
        self.w, self.u = param(integers(seed)), param(integers(seed + 1))
        self.w.main_grad = paddle.zeros([4, 4])
        self.linear = paddle.nn.Linear(4, 4)
        self.linear.weight.set_value(paddle.to_tensor(integers(seed + 2).astype("float32")))
        self.norm = paddle.nn.BatchNorm1D(4)
        self.parameters = [
            *(self.w, self.u),
            *self.linear.parameters(),
            *self.norm.parameters(),
        ]

    def input(self, step):
        self.x = tensor(integers(100 + step))
        return self.x * 1.0

    def gradients(self):
        """Those of the step, which are cleared."""
        found = bits(self.x.grad, *(p.grad for p in self.parameters))
        for parameter in self.parameters:
            parameter.clear_gradient(False)
        return found

    def state(self):
        return bits(self.w.main_grad, self.norm._mean, self.norm._variance)


# What a thread does in a step, with regions `run` and, inside of them, `inner`.


def captured(m, step, run, inner):
    w, u = m.w, m.u
    run(lambda a: paddle.tanh(paddle.matmul(a, w)) * u, m.input(step)).sum().backward()


def passed(m, step, run, inner):
    y = run(lambda a, p, *, q: paddle.nn.functional.relu(a @ p) * q, m.input(step), m.w, q=m.u)
    run(lambda a, p: FusedLinear.apply(a, p), y, m.w).sum().backward()


def layers(m, step, run, inner):
    norm, u = m.norm, m.u
    h = run(m.linear, m.input(step))
    run(lambda a: norm(paddle.nn.functional.relu(a)) * u, h).sum().backward()


def nested(m, step, run, inner):
    w, u, linear = m.w, m.u, m.linear

    def region(a):
        b = inner(lambda b: paddle.matmul(b * b, w), a)
        return inner(lambda b, p: b * p, b, u) + linear(a)

    run(region, m.input(step)).sum().backward()


def kept(m, step, run, inner):
    w, u = m.w, m.u

    def region(a):
        return keep(lambda a: paddle.matmul(a * a, w), a) * u * u

    run(region, m.input(step)).sum().backward()


def early(m, step, run, inner):
    """Several outputs, one of which is not used, and a graph that is dropped."""
    w, u = m.w, m.u
    run(lambda a: paddle.exp(a * w), m.input(step))
    with paramproxy.report():
        y, (z, _) = run(lambda a: (a * a * w, [a * u, paddle.exp(a)]), m.input(step))
        (y.sum() * 2.0 + z.sum()).backward()


def hooks_inside(m, step, run, inner):
    """Hooks of the thread's own."""
    w, u = m.w, m.u

    def region(a):
        with SeenBox():
            b = paddle.matmul(a * a, w)
        return b * u

    run(region, m.input(step)).sum().backward()


def raises_at_first(m, step, run, inner):
    w, u = m.w, m.u

    def region(a):
        paddle.matmul(a * w, u)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(region, m.input(step))
    nested(m, step, run, inner)


def raises_in_the_replay(m, step, run, inner):
    """And the next step is as if nothing had been."""
    w, linear = m.w, m.linear

    def region(a):
        b = inner(lambda b: paddle.tanh(b * w), a)
        if is_recomputing():
            raise ValueError("again")
        return b * linear(a)

    y = run(region, m.input(step)).sum()
    if run is not plain:
        with pytest.raises(OSError, match="again"):
            y.backward()
    m.gradients()
    nested(m, step, run, inner)


some = functools.partial(recompute, policy=paramproxy.save_ops("matmul"))
all_of_it = functools.partial(recompute, policy=paramproxy.save_everything)

BODIES = [captured, passed, layers, nested, kept, early, raises_at_first, raises_in_the_replay]
ENGINES = [
    *((run, inner) for run in (recompute, hooked) for inner in (recompute, hooked)),
    *((recompute, plain), (plain, plain), (some, recompute), (recompute, all_of_it)),
]
JOBS = [*itertools.product(BODIES, ENGINES), *((hooks_inside, (hooked, plain)) for _ in range(4))]


def train(seed, body, run, inner):
    """The gradients of each step, and the state after the last."""
    model, found = Model(seed), []
    for step in range(STEPS):
        body(model, step, run, inner)
        found.append(model.gradients())
    return found, model.state()


@functools.cache
def alone(seed, body):
    return train(seed, body, plain, plain)


def assert_as_alone(jobs):
    """Assert that each of these (body, engines) gives what it gives alone without recompute."""
    expected = [alone(seed, body) for seed, (body, _) in enumerate(jobs)]
    results = together([
        functools.partial(train, seed, body, *engines)
        for seed, (body, engines) in enumerate(jobs)
    ])  # fmt: skip
    for result, wanted, job in zip(results, expected, jobs):
        assert not isinstance(result, BaseException), (job, repr(result))
        assert result == wanted, job
    assert_lights_are_off()


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize("mix", range(12))
def test_models_of_their_own(mix):
    assert_as_alone(random.Random(mix).sample(JOBS, THREADS))


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize("body", [nested, raises_in_the_replay, early])
def test_models_of_their_own_that_do_the_same(body):
    """With all engines there are."""
    assert_as_alone([(body, engines) for engines in ENGINES])


# Weights that all threads share.


class Shared:
    """Weights for each engine that captures them, and one for all, who are passed it.

    While a thread replays a region in reentrant mode that captures a weight, nobody may
    record on that without recompute.
    """

    def __init__(self):
        self.passed = param(integers(1))
        self.captured = {run: param(integers(2)) for run in (recompute, hooked)}
        self.adding_up = threading.Lock()  # Paddle does it without one


def share(shared, seed, run, engine):
    """Steps on shared weights. Returns the gradients of the inputs and of what is not shared."""
    own, passed, found = param(integers(seed)), shared.passed, []
    captured = shared.captured.get(engine, own)

    def outer(a, p):
        return run(lambda b: paddle.matmul(b * p, captured) * own, a)

    for step in range(STEPS):
        x = tensor(integers(step + seed))
        y = run(lambda a: a * captured, run(outer, x * 1.0, passed))
        with shared.adding_up:
            y.sum().backward()
        found.append(bits(x.grad, own.grad))
        own.clear_gradient(False)
    return found


def gradients(shared):
    return bits(*(weight.grad for weight in (shared.passed, *shared.captured.values())))


@pytest.mark.parametrize("counts", [(8, 0, 0), (0, 8, 0), (4, 4, 0), (3, 3, 2)])
def test_weights_that_are_shared(counts):
    runs = [run for run, count in zip((recompute, hooked, plain), counts) for _ in range(count)]
    expected, shared = Shared(), Shared()
    wanted = [share(expected, seed, plain, run) for seed, run in enumerate(runs)]
    results = together([
        functools.partial(share, shared, seed, run, run) for seed, run in enumerate(runs)
    ])  # fmt: skip
    assert results == wanted
    assert gradients(shared) == gradients(expected)
    assert_lights_are_off()


# Graphs that one thread records and another one runs backward.


def hand_over(seed, run, inner):
    model, found = Model(seed), []
    w, u, linear = model.w, model.u, model.linear

    def region(a):
        return inner(lambda b: paddle.matmul(b * b, w), a) * u + linear(a)

    with ThreadPoolExecutor(1) as other:
        for step in range(STEPS):
            loss = run(region, model.input(step)).sum()
            if step % 10 == 9:
                del loss  # a graph that is waiting when others come and go
                continue
            other.submit(contextvars.copy_context().run, loss.backward).result(PATIENCE)
            found.append(model.gradients())
        return found


def test_a_graph_that_another_thread_runs_backward():
    engines = ENGINES[: THREADS // 2]
    wanted = [hand_over(seed, plain, plain) for seed, _ in enumerate(engines)]
    results = together([
        functools.partial(hand_over, seed, *pair) for seed, pair in enumerate(engines)
    ])  # fmt: skip
    assert results == wanted
    assert_lights_are_off()


def test_a_thread_that_knows_nothing_of_it():
    """Its tuples are its own while it fills them: nobody may take a reference to one."""
    done = threading.Event()

    def fill():
        while not done.is_set():
            assert tuple([i] for i in range(30)) == tuple([i] for i in range(30))
        return "filled"

    def work():
        found = train(1, BODIES[0], hooked, hooked)
        done.set()
        return found

    *filled, found = together([fill, fill, fill, work])
    assert filled == ["filled"] * 3
    assert found == alone(1, BODIES[0])
