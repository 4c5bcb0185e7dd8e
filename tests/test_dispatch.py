"""One pair of saved-tensor hooks for everyone: a caller's own, other threads, other libraries."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import paddle
import pytest
from support import MODES, hooked, param, plain, run_python, same, tensor, values

from paramproxy import UnsupportedError, _dispatch, recompute
from paramproxy._compat import (
    PACKED_VALUES_LEAK,
    core,
    register_saved_tensors_hooks,
    reset_saved_tensors_hooks,
)


def is_clean():
    """Nothing is registered with Paddle, and nobody waits on a stack."""
    register_saved_tensors_hooks(lambda t: t, lambda t: t)  # raises if it is not
    reset_saved_tensors_hooks()
    local = _dispatch._local
    return not (local.frames or local.entered or _dispatch._dispatcher.users)


class Seen:
    """A caller's own hooks. What they give back is `factor` times what they got."""

    def __init__(self, factor=1.0):
        self.factor = factor
        self.packed, self.unpacked = [], []

    def __enter__(self):
        self.hooks = paddle.autograd.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, t):
        self.packed.append(list(t.shape))
        return t.numpy() * self.factor, t.stop_gradient

    def unpack(self, packed):
        array, flag = packed
        self.unpacked.append(list(array.shape))
        return paddle.to_tensor(array, stop_gradient=flag)


# A pack hook may not return a tuple around a PyLayer.
class SeenBox(Seen):
    def pack(self, t):
        return {"packed": super().pack(t)}

    def unpack(self, packed):
        return super().unpack(packed["packed"])


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("backward_too", [True, False])
def test_around_a_region_they_see_what_they_would_see(factor, backward_too):
    """Each saved tensor once, if not at the same time. Lossy ones have their effect."""

    def scenario(run):
        x, w, seen = tensor([1.0, 2.0]), param([3.0, 4.0]), SeenBox(factor)
        with seen:
            h = x * x
            y = run(lambda a: paddle.tanh(a * w) * a, h)
            s = (y * y).sum()
            if backward_too:
                s.backward()
        if not backward_too:
            s.backward()
        assert is_clean()
        return values(x.grad), values(w.grad), len(seen.packed), len(seen.unpacked)

    same(scenario, runs=(hooked,))


def test_inside_a_region_they_see_both_runs():
    def scenario(run):
        x, seen = tensor([1.0, 2.0]), SeenBox(2.0)

        def region(a):
            b = paddle.exp(a)
            with seen:
                c = b * b
            return paddle.tanh(c)

        run(region, x * 1.0).sum().backward()
        assert len(seen.packed) == (2 if run is plain else 4)
        return values(x.grad), len(seen.unpacked)

    same(scenario, runs=(hooked,))


@pytest.mark.parametrize("pack", [lambda t: t, lambda t: {"kept": t}], ids=["itself", "box"])
def test_hooks_inside_that_keep_what_they_get(pack):
    """An early stop empties what the pack hook was called with."""

    def unpack(packed):
        return packed["kept"] if isinstance(packed, dict) else packed

    def scenario(run):
        def region(a):
            with paddle.autograd.saved_tensors_hooks(pack, unpack):
                return paddle.exp(a)

        x = tensor([1.0, 2.0])
        run(region, x * 1.0).sum().backward()
        return values(x.grad)

    expected = values(paddle.exp(tensor([1.0, 2.0])))
    assert scenario(hooked) == expected
    assert scenario(lambda f, a: hooked(lambda b: hooked(f, b), a)) == expected


def test_hooks_that_are_entered_by_hand_and_never_left():
    def region(a):
        hooks = paddle.autograd.saved_tensors_hooks(lambda t: t.numpy(), paddle.to_tensor)
        hooks.__enter__()
        b = paddle.exp(a)
        hooks.__exit__(None, None, None)
        return b

    x = tensor([1.0])
    hooked(region, x * 1.0).sum().backward()
    assert values(x.grad) == pytest.approx([np.e])
    assert is_clean()


def test_two_pairs_raise_as_in_paddle_outside_and_nest_inside():
    one, other = SeenBox(), SeenBox()
    with one, pytest.raises(ValueError, match="only one pair of hooks"):
        other.__enter__()
    assert is_clean()

    def region(a):
        with one:
            b = paddle.exp(a)
            with other:
                b = paddle.tanh(b)
        return b

    hooked(region, tensor([1.0]) * 1.0).sum().backward()
    assert (len(one.packed), len(other.packed)) == (2, 2)
    assert is_clean()


def test_they_are_back_after_a_region():
    seen = SeenBox()
    x = tensor([1.0, 2.0])
    with seen:
        y = hooked(lambda a: paddle.exp(a), x * 1.0)
        before = len(seen.packed)
        z = paddle.exp(y)
        assert len(seen.packed) == before + 1
    paddle.exp(x)
    assert len(seen.packed) == before + 1
    z.sum().backward()
    assert is_clean()


@pytest.mark.parametrize("run", MODES)
def test_entered_under_no_grad_they_do_nothing_as_in_paddle(run):
    seen = SeenBox()
    with paddle.no_grad():
        seen.__enter__()
    y = run(lambda a: paddle.exp(a), tensor([1.0]) * 1.0)
    seen.__exit__(None, None, None)
    y.sum().backward()
    assert not seen.packed
    assert is_clean()


def test_an_exception_in_them_reaches_the_caller_and_leaves_nothing():
    def fails(t):
        raise RuntimeError("disk full")

    x = tensor([1.0]) * 1.0
    hooks = paddle.autograd.saved_tensors_hooks
    with pytest.raises(OSError, match="disk full"), hooks(fails, lambda t: t):
        hooked(lambda a: paddle.exp(a), x).sum().backward()
    assert is_clean()
    with hooks(lambda t: 1, fails):
        y = hooked(lambda a: paddle.exp(a), x)
    with pytest.raises(OSError, match="disk full"):
        y.sum().backward()
    assert is_clean()
    assert paddle.is_grad_enabled()


def test_an_exception_in_a_region_leaves_nothing():
    def fails(a):
        paddle.exp(a)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        hooked(fails, tensor([1.0]) * 1.0)
    assert is_clean()


def test_hooks_that_are_not_known_are_named():
    """As those of somebody who looked up Paddle's C functions before paramproxy was imported."""
    register_saved_tensors_hooks(lambda t: t, lambda t: t)
    try:
        with pytest.raises(UnsupportedError, match="saved-tensor hooks are registered that"):
            hooked(lambda a: paddle.exp(a), tensor([1.0]) * 1.0)
    finally:
        reset_saved_tensors_hooks()
    assert is_clean()


class OwnHooks:
    """What a client may put in the place of `paddle.autograd.saved_tensors_hooks`."""

    def __init__(self, pack, unpack):
        self.pair = pack, unpack

    def __enter__(self):
        core.eager.register_saved_tensors_hooks(*self.pair)

    def __exit__(self, *error):
        core.eager.reset_saved_tensors_hooks()


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("inside", [True, False])
def test_hooks_that_a_client_registers_by_itself_are_known(run, inside):
    seen = SeenBox()

    def hooks():
        return OwnHooks(seen.pack, seen.unpack)

    def region(a):
        if not inside:
            return paddle.exp(a) * a
        with hooks():
            return paddle.exp(a) * a

    x = tensor([1.0])
    with contextlib.nullcontext() if inside else hooks():
        y = run(region, x * 1.0)
    assert is_clean()
    y.sum().backward()
    assert values(x.grad) == pytest.approx([2 * np.exp(1.0)])
    assert seen.packed
    assert seen.unpacked
    assert is_clean()


def test_hooks_inside_of_a_region_see_the_tensor_by_its_name():
    """PaddleFormers' refined recompute marks by its name what it is to keep."""
    names = []

    def pack(t):
        names.append(t.name)
        return {"t": t.numpy(), "flag": t.stop_gradient}

    def unpack(packed):
        return paddle.to_tensor(packed["t"], stop_gradient=packed["flag"])

    def region(a):
        a.name = "mine"
        with paddle.autograd.saved_tensors_hooks(pack, unpack):
            return a * a

    hooked(region, tensor([3.0]) * 1.0).backward()
    assert set(names) == {"mine"}


def test_a_replay_does_not_stop_under_hooks_of_the_functions_own():
    """They may count what they pack, as those of other recompute engines do."""
    counts = []

    def region(a):
        seen = SeenBox()
        with seen:
            b = paddle.exp(a)
            paddle.tanh(b * b)  # of which nothing is needed
        counts.append(len(seen.packed))
        return b

    x = tensor([1.0])
    hooked(region, x * 1.0).backward()
    assert counts[0] == counts[1] > 1
    assert values(x.grad) == pytest.approx([np.exp(1.0)])


def test_who_takes_the_place_of_paddles_hooks_hears_of_a_replay_by_the_names_of_paddles_own(
    monkeypatch,
):
    """As ERNIE's refined recompute does. It counts on all of the replay, so none stops early."""
    entered, ran = [], []

    class Listening(OwnHooks):
        def __enter__(self):
            entered.append([f"{hook.__module__}.{hook.__name__}" for hook in self.pair])
            super().__enter__()

    def region(a):
        ran.append(len(entered))
        b = paddle.exp(a)
        ran.append("tail")
        return b + 1.0

    monkeypatch.setattr(paddle.autograd, "saved_tensors_hooks", Listening)
    x = tensor([1.0])
    hooked(region, x * 1.0).backward()
    module = "paddle.distributed.fleet.recompute.recompute"
    assert entered == [[f"{module}.inner_pack", f"{module}.inner_unpack"]]
    assert ran == [0, "tail", 1, "tail"]
    assert values(x.grad) == pytest.approx([np.exp(1.0)])
    assert is_clean()


def test_leaving_hooks_under_no_grad_takes_off_no_others():
    """Entered under no_grad Paddle registers nothing, and then takes off the outer ones."""
    outer, inner = [], []
    x = tensor([1.0])
    with paddle.autograd.saved_tensors_hooks(lambda t: outer.append(1) or t.detach(), lambda t: t):
        with (
            paddle.no_grad(),
            paddle.autograd.saved_tensors_hooks(lambda t: inner.append(1) or t, lambda t: t),
        ):
            paddle.exp(x)
        y = paddle.exp(x)
    y.sum().backward()
    assert (len(outer), len(inner)) == (1, 0)
    assert is_clean()


def test_a_reset_too_much_does_nothing():
    core.eager.reset_saved_tensors_hooks()
    x = tensor([1.0])
    hooked(lambda a: paddle.exp(a), x).sum().backward()
    assert values(x.grad) == pytest.approx([np.exp(1.0)])
    assert is_clean()


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_with_paddles_own_recompute(theirs, ours, outside):
    if PACKED_VALUES_LEAK and not theirs:
        pytest.skip("the hook mode of Paddle 2.6 refuses a CPU")
    from paddle.distributed.fleet.utils import recompute as paddles

    def own(function, *args):
        return recompute(function, *args, use_reentrant=ours)

    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])

        def paddles_own(function, *args):
            return (
                run(function, *args)
                if run is plain
                else paddles(function, *args, use_reentrant=theirs)
            )

        outer, inner = (run, paddles_own) if outside else (paddles_own, run)
        y = outer(lambda a: inner(lambda b: paddle.tanh(b * w) * b, paddle.exp(a * 0.1)), x * 1.0)
        y.sum().backward()
        assert is_clean()
        return values(x.grad), values(w.grad)

    same(scenario, runs=(own,))


# Threads


def train(run, factor, steps, wrong):
    """Steps of one block, each gradient compared with what numpy says."""
    try:
        w = param(np.full(32, float(factor)))
        for i in range(steps):
            x = tensor(np.full(32, 1.0 + i % 7))
            w.clear_gradient(False)
            run(lambda a: paddle.tanh(a * 0.01) * w * w, x * 1.0).sum().backward()
            expected = np.tanh((1.0 + i % 7) * 0.01) * 2 * factor
            if not np.allclose(w.grad.numpy(), expected, rtol=1e-4):
                wrong.append((factor, i))
    except BaseException as exc:
        wrong.append(repr(exc))


@pytest.mark.parametrize("runs", [(hooked,) * 4, (hooked, plain), (hooked, recompute, plain)])
def test_threads_do_not_see_each_other(runs):
    wrong = []
    threads = [
        threading.Thread(target=train, args=(run, 2 + i, 150, wrong)) for i, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    train(plain, 3, 3, wrong)  # the last to leave turns off the light
    assert not wrong
    assert is_clean()


def test_a_thread_without_a_region_is_as_without_hooks():
    """In the middle of another thread's region: same objects, same checks."""
    inside, done, told = threading.Event(), threading.Event(), []
    w = param([2.0])

    class Looks(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a, w)
            ctx.a = a
            return a * w

        @staticmethod
        def backward(ctx, dy):
            a, p = ctx.saved_tensor()
            told.append((a is ctx.a, p is w))
            return dy * p

    def other():
        inside.wait(60)
        x = tensor([1.0])
        h = x * 3.0
        y = Looks.apply(h) * h
        y.sum().backward()
        told.append(values(x.grad))
        h = x * 3.0
        z = h * h
        with paddle.no_grad():
            h.add_(paddle.ones([1]))
        try:
            z.sum().backward()
        except Exception as exc:
            told.append("changed in place" in str(exc))
        done.set()

    def region(a):
        inside.set()
        done.wait(60)
        return paddle.exp(a)

    thread = threading.Thread(target=other)
    thread.start()
    hooked(region, tensor([1.0]) * 1.0)
    thread.join()
    assert told == [(True, True), [36.0], True]
    plain(lambda: paddle.exp(tensor([1.0])))
    assert is_clean()


def test_backward_in_another_thread():
    x = tensor([1.0, 2.0])
    y = hooked(lambda a: paddle.exp(a) * a, x * 1.0).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert values(x.grad) == pytest.approx([2 * np.e, 3 * np.e**2], rel=1e-5)


ENDINGS = {
    "a graph that lives": "y = hooked(lambda a: paddle.exp(a), x)\n",
    "threads": (
        "import threading\n"
        "from test_dispatch import train\n"
        "ts = [threading.Thread(target=train, args=(hooked, 2, 50, [])) for _ in range(3)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\n"
    ),
    "a daemon in a region": (
        "import threading, time\n"
        "inside = threading.Event()\n"
        "def region(a):\n"
        "    inside.set(); time.sleep(60)\n"
        "    return paddle.exp(a)\n"
        "threading.Thread(target=hooked, args=(region, x), daemon=True).start()\n"
        "inside.wait(30)\n"
    ),
}


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_the_process_ends(ending):
    done = run_python(
        "import paddle\nfrom support import hooked, tensor\nx = tensor([1.0]) * 1.0\n"
        + ENDINGS[ending]
        + "print('the end')\n"
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-2000:]
