"""Errors: the user's own come through, ours name the region, and nothing is left dirty."""

from __future__ import annotations

import builtins

import paddle
import pytest
from support import Counted, param, plain, run_python, same, tensor, values

import paramproxy
from paramproxy import ParamProxyError, RetainGraphWarning, recompute


def fails_in_the_replay(error):
    """A region that succeeds once."""

    def region(a, w):
        if region.calls:
            raise error
        region.calls += 1
        return a * w

    region.calls = 0
    return region


def test_an_error_of_the_first_run_is_the_functions_own():
    class Mine(Exception):
        pass

    def region(a):
        raise Mine("first")

    with pytest.raises(Mine, match="first"):
        recompute(region, tensor([1.0]) * 1.0)
    assert paddle.is_grad_enabled()


def test_an_error_of_the_replay_names_the_region_and_keeps_the_message():
    region = fails_in_the_replay(KeyError("the user's own words"))
    y = recompute(region, tensor([1.0]) * 1.0, param([2.0]))
    with pytest.raises(OSError, match="ReplayError") as caught:
        y.sum().backward()
    text = str(caught.value)
    assert "Cannot replay fails_in_the_replay.<locals>.region (" in text
    assert "test_errors.py:" in text
    assert 'KeyError: "the user\'s own words"' in text
    assert "in region" in text


def test_after_a_failed_replay_the_next_step_is_right():
    def scenario(run):
        w, x = param([2.0, 3.0]), tensor([1.0, 5.0])
        if run is not plain:
            y = run(fails_in_the_replay(MemoryError("simulated")), x * 1.0, w)
            with pytest.raises(OSError, match="simulated"):
                y.sum().backward()
        assert w.grad is None
        run(lambda a: paddle.nn.functional.dropout(a * w * a, 0.5), x * 1.0).sum().backward()
        return values(x.grad), values(w.grad), values(paddle.rand([1]))

    same(scenario)


def test_an_error_in_the_backward_of_the_region_comes_through():
    class Bad(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, dy):
            raise ValueError("in the fused backward")

    y = recompute(Bad.apply, tensor([1.0]) * 1.0)
    with pytest.raises(OSError, match="in the fused backward"):
        y.sum().backward()
    assert paddle.is_grad_enabled()
    x = tensor([1.0])
    recompute(lambda a: a * a, x * 1.0).sum().backward()
    assert values(x.grad) == [2.0]


def test_an_error_in_a_nested_replay_keeps_the_message():
    region = fails_in_the_replay(ValueError("deep inside"))
    w = param([2.0])
    seen = Counted(region)

    def outer(a, w):
        region.calls = 0 if seen.calls == 0 else region.calls
        return recompute(seen, a, w) * 2.0

    y = recompute(outer, tensor([1.0]) * 1.0, w)
    with pytest.raises(OSError, match="deep inside"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (
            lambda a: a.sum(),
            r"the first run gave 1 tensors \(\[2\] float32\), the replay 1 tensors \(\[\]",
        ),
        (lambda a: (a, a), r"the replay 2 tensors"),
        (lambda a: a.astype("float64"), r"the replay 1 tensors \(\[2\] float64\)"),
        (lambda a: None, r"the replay 0 tensors"),
    ],
    ids=["shape", "number", "dtype", "none"],
)
def test_a_replay_with_other_outputs_is_refused(again, words):
    calls = []

    def region(a):
        calls.append(1)
        return a * 2.0 if len(calls) == 1 else again(a * 2.0)

    y = recompute(region, tensor([1.0, 2.0]) * 1.0)
    with pytest.raises(OSError, match=words) as caught:
        y.sum().backward()
    assert "ReplayMismatchError: Cannot replay" in str(caught.value)
    assert "The function must do the same both times" in str(caught.value)


def test_double_gradients_are_refused():
    x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
    y = recompute(lambda a: a * a * w, x * 1.0)
    with pytest.raises(OSError, match="with create_graph=True") as caught:
        paddle.grad(y.sum(), [x], create_graph=True)
    assert "UnsupportedError" in str(caught.value)
    assert "use_reentrant=False" in str(caught.value)
    assert w.grad is None
    assert paddle.is_grad_enabled()


def test_paddle_grad_is_refused_and_leaves_no_gradient_behind():
    x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
    y = recompute(lambda a: a * a * w, x * 1.0)
    with pytest.raises(OSError, match=r"under paddle\.grad") as caught:
        paddle.grad(y.sum(), [x])
    assert "UnsupportedError" in str(caught.value)
    assert x.grad is None
    assert w.grad is None


def test_paddle_grad_inside_the_region_is_the_regions_business():
    def scenario(run):
        x = tensor([1.0, 2.0])

        def region(a):
            with paddle.set_grad_enabled(True):
                b = a.detach()
                b.stop_gradient = False
                (g,) = paddle.grad((b * b * b).sum(), [b])
            return a * g

        run(region, x * 1.0).sum().backward()
        return values(x.grad)

    same(scenario, [3.0, 12.0])


def test_retain_graph_warns_once_a_place_and_names_the_remedy():
    def step():
        y = recompute(lambda a: a * a, x * 1.0)
        y.sum().backward(retain_graph=True)

    x = tensor([1.0])
    with pytest.warns(RetainGraphWarning) as caught:
        step()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert caught[0].lineno == step.__code__.co_firstlineno + 2
    assert "a second backward through it crashes Paddle" in str(caught[0].message)
    assert "use_reentrant=False" in str(caught[0].message)
    assert values(x.grad) == [2.0]


@pytest.mark.parametrize(
    "call", ["y.backward(retain_graph=True)", "paddle.autograd.backward([y], retain_graph=True)"]
)
def test_the_warning_comes_before_the_crash(call):
    """A second backward through any PyLayer crashes Paddle; this engine is one."""
    done = run_python(
        "import sys, warnings, paddle\nfrom support import tensor\nimport paramproxy\n"
        "warnings.simplefilter('always', paramproxy.RetainGraphWarning)\n"
        f"y = paramproxy.recompute(lambda a: a.exp(), tensor([1.0]) * 1.0).sum()\n{call}\n"
        "sys.stderr.flush()\nprint('once', flush=True)\ny.backward()\nprint('twice', flush=True)"
    )
    assert "RetainGraphWarning" in done.stderr
    assert "once" in done.stdout
    assert "twice" not in done.stdout


def test_without_retain_graph_nothing_is_said(recwarn):
    recompute(lambda a: a * a, tensor([1.0]) * 1.0).sum().backward()
    assert not recwarn.list


def test_every_error_inherits_a_builtin_too():
    errors = [
        value
        for name, value in vars(paramproxy).items()
        if name in paramproxy.__all__ and isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(errors) >= 8
    builtin = {e for e in vars(builtins).values() if isinstance(e, type)} - {
        Exception,
        BaseException,
        object,
    }
    for error in errors:
        if error is not ParamProxyError:
            assert builtin & set(error.__mro__), error
            assert error.__doc__


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_replay_leaves_nothing_dirty(interrupt):
    y = recompute(fails_in_the_replay(interrupt("stop")), tensor([1.0]) * 1.0, param([2.0]))
    with pytest.raises((OSError, interrupt)):
        y.sum().backward()
    assert paddle.is_grad_enabled()
    x = tensor([3.0])
    recompute(lambda a: a * a, x * 1.0).sum().backward()
    assert values(x.grad) == [6.0]


def test_a_callers_error_in_forward_leaves_the_switches_as_they_were():
    with pytest.raises(ZeroDivisionError):
        recompute(lambda a: 1 / 0, tensor([1.0]))
    assert paddle.is_grad_enabled()
