"""A thousand steps leave nothing behind: no bytes, no objects, no cycles, nothing in C++.

`test_letting_go` and `test_memory` look at what one region holds and when it lets
go. Here a step is tiny and repeated, so that the smallest thing it leaves behind
adds up. The garbage collector is off meanwhile. Where Paddle itself leaks, the same
failure without recompute says how much.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import os
import sys
import weakref
from pathlib import Path

import attrs
import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute as paddles
from support import MODES, FusedLinear, allocated, hooked, param, tensor

import paramproxy
from paramproxy import (
    Decision,
    ParamLeaf,
    ParamView,
    _dispatch,
    _hooked,
    is_recomputing,
    keep,
    recompute,
    recompute_sequential,
    unwrap,
)
from paramproxy._compat import PACKED_VALUES_LEAK, tracer


WARMUP = 100
STEPS = 1000


# What is measured.


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Malloc


def malloced():
    """The bytes that C++ has allocated, but for Python's objects; 0 where nobody can say."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return info.uordblks + info.hblkhd


def resident():
    """The bytes that the process has in memory; 0 where nobody can say."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Left:
    """What a number of steps has left behind.

    Attributes:
        tensors: The bytes of the CPU allocator.
        young: Objects, before a garbage collection.
        garbage: What that has found of cycles.
        objects: Objects, after it.
        blocks: Blocks of Python's allocator, after it.
        malloced: Bytes that C++ has allocated.
        resident: Bytes of the process.
        alive: Watched objects that live.
        weakrefs: Weak references to the weights.
        kinds: The types of the objects.
    """

    tensors: int
    young: int
    garbage: int
    objects: int
    blocks: int
    malloced: int
    resident: int
    alive: int
    weakrefs: int
    kinds: dict[str, int]


class Kit:
    """The weights of a scenario, the objects that it watches and those that it holds."""

    def __init__(self):
        eye = np.eye(4)
        self.x, self.w, self.u = tensor(0.5 * eye), param(0.5 * eye + 0.1), param(eye)
        self.w.main_grad = paddle.zeros([4, 4])
        self.linear = paddle.nn.Linear(4, 4)
        self.norm = paddle.nn.BatchNorm1D(4)
        self.layers = paddle.nn.Sequential(*(paddle.nn.Linear(4, 4) for _ in range(3)))
        self.view = ParamView(self.u)
        self.recent = collections.deque(maxlen=8)
        self.watched = weakref.WeakValueDictionary()
        self._weights = [
            self.w,
            self.u,
            *self.linear.parameters(),
            *self.norm.parameters(),
            *self.layers.parameters(),
        ]
        self._numbers = itertools.count()

    def watch(self, thing):
        """The same. It is expected to be gone when the step is over."""
        self.watched[next(self._numbers)] = thing
        return thing

    def input(self):
        return self.watch(self.x * 1.0)

    def clear(self):
        for weight in (self.x, *self._weights):
            weight.clear_gradient(False)

    def weakrefs(self):
        return sum(map(weakref.getweakrefcount, (*self._weights, self.linear, self.norm)))


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """Both engines have filled their caches, and Python's and C's allocators theirs."""
    for run in (recompute, hooked):
        left_by(captured, run)
    yield
    gc.unfreeze()


def left_by(scenario, run, collect_every=STEPS):
    """What the steps of a scenario leave behind, once it has warmed up."""
    kit = Kit()

    def repeat(times):
        for _ in range(times):
            scenario(kit, run)
            kit.clear()

    gc.collect()
    gc.freeze()  # what was there before is neither counted nor looked through
    gc.disable()
    try:
        repeat(WARMUP)
        gc.collect()
        before = _counts(kit)
        garbage = 0
        for _ in range(STEPS // collect_every):
            repeat(collect_every)
            young, alive = len(gc.get_objects()) - before["objects"], len(kit.watched)
            garbage += gc.collect()
        after = _counts(kit)
        kinds = _kinds()
    finally:
        gc.enable()
    grown = {name: after[name] - before[name] for name in before}
    return Left(young=young, garbage=garbage, alive=alive, kinds=kinds, **grown)


def _counts(kit):
    return {
        "tensors": allocated(),
        "malloced": malloced(),
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "resident": resident(),
        "weakrefs": kit.weakrefs(),
    }


def _kinds():
    counter = collections.Counter(type(thing).__name__ for thing in gc.get_objects())
    return {kind: count for kind, count in counter.most_common(8) if count >= STEPS // 2}


def packs(scenario, run):
    """How often a step packs a tensor, and how many regions of the hook engine it opens."""
    kit, calls = Kit(), collections.Counter()
    counted = {_dispatch._Pack.__init__.__code__: "packs", _hooked.run.__code__: "regions"}

    def profile(frame, event, arg):
        if event == "call" and frame.f_code in counted:
            calls[counted[frame.f_code]] += 1

    scenario(kit, run)
    sys.setprofile(profile)
    try:
        scenario(kit, run)
    finally:
        sys.setprofile(None)
    return calls["packs"], calls["regions"]


# Caches fill up, the allocator of Python keeps what it has had. A single thing
# that every step leaves behind is more than any of that.
FEW = STEPS * 3 // 4
FEW_BYTES = 24 * STEPS
SLACK = 2**22


def assert_nothing(left, *, leaked=0, bytes_leaked=0):
    """Assert that nothing was left.

    Args:
        left: What was.
        leaked: How many objects Paddle leaks in each step.
        bytes_leaked: How many bytes of C++ it does.
    """
    assert left.tensors == 0, left
    assert left.garbage == 0, left
    assert left.alive == 0, left
    assert left.weakrefs == 0, left
    assert left.young < leaked * STEPS + FEW, left
    assert left.objects < leaked * STEPS + FEW, left
    # A list or a bound method has a block besides that of the object.
    assert left.blocks < 2 * leaked * STEPS + FEW, left
    assert left.malloced < bytes_leaked * STEPS + FEW_BYTES, left
    assert left.resident < (200 * leaked + bytes_leaked) * STEPS + SLACK, left


# What a step may do.


def function_of(kit):
    """A function of its own for each step, as a closure in a loop is."""
    w, u = kit.w, kit.u

    def region(a):
        return paddle.tanh(paddle.matmul(a, w)) * u

    return kit.watch(region)


def captured(kit, run):
    run(function_of(kit), kit.input()).sum().backward()


def passed(kit, run):
    w, u = kit.w, kit.u
    region = kit.watch(lambda a, p, *, scale: paddle.tanh(paddle.matmul(a, p[0])) * p[1] * scale)
    run(region, kit.input(), (w, u), scale=2.0).sum().backward()


def layer(kit, run):
    run(kit.linear, run(kit.linear, kit.input())).sum().backward()


def buffers(kit, run):
    norm = kit.norm
    run(lambda a: paddle.exp(norm(a)), kit.input()).sum().backward()


def random_streams(kit, run):
    w = kit.w
    run(lambda a: paddle.nn.functional.dropout(a, 0.5) * w, kit.input()).sum().backward()


def fused(kit, run):
    region = kit.watch(lambda a, p: FusedLinear.apply(paddle.exp(a), p))
    run(region, kit.input(), kit.w).sum().backward()


def several_outputs(kit, run):
    """Of which one is not used, and one needs no gradient."""
    w = kit.w
    region = kit.watch(lambda a: {"y": a * w, "z": [paddle.exp(a), a.detach()], "c": 1})
    run(region, kit.input())["y"].sum().backward()


def objects(kit, run):
    """A cache among the arguments, that the function adds to."""
    w = kit.w
    cache = kit.watch(Cache())

    def region(a, cache):
        cache.keys.append(a.detach())
        return paddle.exp(a) * w

    run(region, kit.input(), cache).sum().backward()


class Cache:
    def __init__(self):
        self.keys = []


def dropped(kit, run):
    run(function_of(kit), kit.input())


def held(kit, run):
    """Graphs that are waiting for a backward which never comes, and losses after theirs."""
    w = kit.w
    kit.recent.append(run(lambda a: paddle.exp(a * w), kit.x * 1.0))
    loss = run(lambda a: paddle.exp(a * w), kit.x * 1.0).sum()
    loss.backward()
    kit.recent.append(loss)


def options(kit, run):
    w = kit.w
    run(
        kit.watch(lambda a, b: paddle.exp(a * w) * b),
        kit.input(),
        b=kit.input(),
        preserve_rng_state=False,
        preserve_buffers=False,
        offload_indices=[0, "b"],
        debug=True,
    ).sum().backward()


def kept(kit, run):
    w, u = kit.w, kit.u
    region = kit.watch(lambda a: paddle.exp(keep(paddle.matmul, paddle.tanh(a), w)) * u)
    run(region, kit.input()).sum().backward()


def kept_and_dropped(kit, run):
    linear = kit.linear
    run(lambda a: paddle.exp(keep(linear, paddle.tanh(a))), kit.input())


def under_report(kit, run):
    with paramproxy.report() as report:
        captured(kit, run)
    kit.recent.append(report)


def without_early_stop(kit, run):
    with paramproxy.set_checkpoint_early_stop(False), paramproxy.set_checkpoint_debug_enabled(True):
        y = run(function_of(kit), kit.input())
    y.sum().backward()


def own_hooks(kit, run):
    if PACKED_VALUES_LEAK:
        pytest.skip("Paddle 2.6 never frees what a pack hook returned")
    with paddle.autograd.saved_tensors_hooks(lambda t: {"t": t.detach()}, lambda box: box["t"]):
        captured(kit, run)


def nested(kit, run, inner):
    w, u = kit.w, kit.u
    region = kit.watch(lambda b: paddle.tanh(paddle.matmul(b, w)) * u)
    outer = kit.watch(lambda a: inner(region, paddle.tanh(a)))
    run(outer, kit.input()).sum().backward()


def nested_and_dropped(kit, run, inner):
    w = kit.w
    run(lambda a: inner(kit.watch(lambda b: paddle.exp(b * w)), paddle.tanh(a)), kit.input())


def decorated(kit, run):
    """A decorator that is applied in each step."""
    checkpointed = paramproxy.checkpoint(use_reentrant=run is recompute)(function_of(kit))
    kit.watch(checkpointed)(kit.input()).sum().backward()


def sequential(kit, run):
    ctx = {"segments": 2, "use_reentrant": run is recompute}
    recompute_sequential(ctx, kit.layers, kit.input()).sum().backward()


def patched(kit, run):
    paramproxy.patch()
    try:
        paddles(function_of(kit), kit.input(), use_reentrant=run is recompute).sum().backward()
    finally:
        paramproxy.unpatch()


def views(kit, run):
    """A view and its leaf that live for ever, new ones, and leaves of replays, all kept."""
    w = kit.w
    view = ParamView(w)
    kit.recent.append((view, view.leaf))

    def region(a, p):
        kit.recent.append(p)
        return paddle.matmul(a, p) * kit.view.leaf.detach()

    run(region, kit.input(), view if run is recompute else w).sum().backward()


def fails_at_first(kit, run):
    w = kit.w

    def region(a):
        paddle.tanh(a * w)
        raise ValueError("mine")

    raises(ValueError, functools.partial(run, kit.watch(region), kit.input()))


def fails_inside(kit, run, inner):
    """In the first run of an inner region."""
    w = kit.w

    def region(a):
        paddle.tanh(a * w)
        raise ValueError("mine")

    raises(ValueError, lambda: run(lambda a: inner(kit.watch(region), paddle.exp(a)), kit.input()))


def refused(kit, run):
    """By us, at once: a write into an argument, a generator for one."""
    raises(paramproxy.MutationError, lambda: run(lambda a: a.add_(kit.x), kit.input()))
    generator = (i for i in range(2))
    raises(paramproxy.UnsupportedError, lambda: run(lambda a, g: a * 2.0, kit.input(), generator))


def raises(kind, call):
    """As `pytest.raises`, which makes cycles of its own."""
    try:
        call()
    except kind:
        return
    raise AssertionError


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(captured, passed, layer, buffers, random_streams, fused, several_outputs, objects),
        *(dropped, held, options, kept, kept_and_dropped, under_report, without_early_stop),
        *(own_hooks, decorated, sequential, patched, views, fails_at_first, refused),
    )
}
NESTED = {
    f"{scenario.__name__}, {name} inside": functools.partial(scenario, inner=inner)
    for scenario in (nested, nested_and_dropped, fails_inside)
    for inner, name in ((recompute, "reentrant"), (hooked, "hooks"))
}


def check(scenario, run):
    left = left_by(scenario, run)
    if PACKED_VALUES_LEAK:
        # Two for each tensor that is packed, and what it knows its region by.
        packed, regions = packs(scenario, run)
        assert_nothing(left, leaked=2 * packed + regions, bytes_leaked=32 * packed)
    else:
        assert_nothing(left)


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize("name", [*SCENARIOS, *NESTED])
@pytest.mark.parametrize("run", MODES)
def test_a_step(name, run):
    check({**SCENARIOS, **NESTED}[name], run)


POLICIES = {
    "everything": paramproxy.save_everything,
    "nothing": paramproxy.save_nothing,
    "some": paramproxy.save_ops("tanh") | paramproxy.save_under(4),
    "host": paramproxy.offload_over(4),
    "mine": lambda saved: Decision.SAVE if saved.shape == [4, 4] else Decision.RECOMPUTE,
}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [*((name, captured) for name in POLICIES), ("everything", dropped), ("mine", kept)],
)
def test_a_step_with_a_policy(name, scenario):
    check(scenario, functools.partial(recompute, policy=POLICIES[name]))


def second_backward(kit, run):
    loss = run(function_of(kit), kit.input()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def double_gradient(kit, run):
    y = run(lambda a: a * a * kit.w, kit.input()).sum()
    (gradient,) = paddle.grad(y, [kit.w], create_graph=True)
    (gradient * kit.u).sum().backward()


@pytest.mark.parametrize("scenario", [second_backward, double_gradient])
def test_a_step_that_only_the_hook_engine_takes(scenario):
    check(scenario, hooked)


def test_a_view_that_lives_for_ever():
    """Leaves that are given up on, gradients that are taken, hooks that are taken off."""

    def scenario(kit, run):
        view = kit.view
        hook = view.leaf.register_hook(lambda gradient: gradient * 2.0)
        paddle.matmul(kit.input(), view.leaf).sum().backward()
        assert view.leaf_grad is not None
        hook.remove()
        leaf = view.leaf
        paramproxy.grads((leaf,))  # which retires it
        assert view.leaf is not leaf
        assert unwrap(view.leaf) is kit.u
        assert type(view.leaf) is ParamLeaf
        detached = paramproxy.detach([kit.x, kit.u, {"w": kit.w}])
        (detached[0] * detached[1] * detached[2]["w"]).sum().backward()
        paramproxy.grads(detached)

    assert_nothing(left_by(scenario, None))


# Where a backward fails, Paddle leaks.


class Fails(paddle.autograd.PyLayer):
    """A PyLayer whose backward raises. Its context holds what a region's does by then."""

    @staticmethod
    def forward(ctx, a):
        ctx.region, ctx.positions = None, [0]
        return a * 1.0

    @staticmethod
    def backward(ctx, dy):
        raise ValueError("again")


class Box:
    """What a pack hook returns: an object that knows something weakly."""

    def __init__(self, owner):
        self.owner = weakref.ref(owner)


def plainly(kit, run):
    """The failure of a region that is replayed, without a region."""
    if run is recompute:
        y = Fails.apply(kit.input())
    else:
        with paddle.autograd.saved_tensors_hooks(boxed, not_unpacked):
            y = paddle.exp(kit.input())
    raises(OSError, y.sum().backward)
    tracer()._has_grad = True  # which Paddle leaves off


def boxed(t):
    owner = {t.name}
    return Box(owner)


def not_unpacked(packed):
    raise ValueError("again")


def fails_in_the_replay(kit, run):
    w = kit.w

    def region(a):
        b = paddle.tanh(a * w)
        if is_recomputing():
            raise ValueError("again")
        return paddle.exp(b)

    raises(OSError, run(kit.watch(region), kit.input()).sum().backward)


def fails_in_a_captured_layer(kit, run):
    """While its parameters are set aside."""
    linear = kit.linear

    def region(a):
        b = linear(a)
        if is_recomputing():
            raise ValueError("again")
        return paddle.exp(b)

    raises(OSError, run(kit.watch(region), kit.input()).sum().backward)


def gives_another_shape(kit, run):
    def region(a):
        return paddle.exp(paddle.tanh(a[:2] if is_recomputing() else a) * 1.0)

    raises(OSError, run(kit.watch(region), kit.input()).sum().backward)


def is_changed_in_between(kit, run):
    w = kit.w
    a = kit.input()
    y = run(kit.watch(lambda a: paddle.exp(a * w)), a)
    with paddle.no_grad():
        a.add_(kit.x)
    raises(OSError, y.sum().backward)


def fails_in_an_inner_replay(kit, run, inner):
    w = kit.w
    calls = itertools.count()

    def region(a):
        b = paddle.tanh(a * w)
        if next(calls) == 2:
            raise ValueError("again")
        return paddle.exp(b)

    outer = kit.watch(lambda a: inner(kit.watch(region), paddle.exp(a)))
    raises(OSError, run(outer, kit.input()).sum().backward)


FAILURES = {
    scenario.__name__: scenario
    for scenario in (
        *(fails_in_the_replay, fails_in_a_captured_layer, gives_another_shape),
        is_changed_in_between,
    )
}
INNER_FAILURES = {
    f"{fails_in_an_inner_replay.__name__}, {name}": functools.partial(
        fails_in_an_inner_replay, inner=inner
    )
    for inner, name in ((recompute, "reentrant"), (hooked, "hooks"))
}


@functools.cache
def left_plainly(run):
    return left_by(plainly, run)


@pytest.mark.parametrize("name", [*FAILURES, *INNER_FAILURES])
@pytest.mark.parametrize("run", MODES)
def test_a_backward_that_fails(name, run, capfd):
    scenario = {**FAILURES, **INNER_FAILURES}[name]
    failing = [run] if name in FAILURES else [run, INNER_FAILURES[name].keywords["inner"]]
    # The hook engine serves what is inside, and Paddle calls it once.
    expected = [left_plainly(engine) for engine in ([hooked] if run is hooked else failing)]
    left = left_by(scenario, run, collect_every=100)
    capfd.readouterr()  # Paddle tells of each
    packed, regions = packs(scenario, run) if PACKED_VALUES_LEAK else (0, 0)
    assert left.tensors <= sum(plain.tensors for plain in expected), left
    assert left.garbage == 0, left
    assert left.alive == left.weakrefs == 0, left
    # What the pack hook gave stands between Paddle, which leaks it, and the ticket.
    ours = 2 * packed + regions + (hooked in failing or run is hooked)
    leaked = sum(plain.objects for plain in expected) + ours * STEPS
    assert left.objects < leaked + FEW, left
    leaked = sum(plain.malloced for plain in expected) + 32 * packed * STEPS
    assert left.malloced < leaked + FEW_BYTES, left
