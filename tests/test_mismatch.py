"""A replay that is not a repetition is found and described, in the hook engine."""

from __future__ import annotations

import threading
import warnings

import paddle
import pytest
from support import hooked, param, tensor, values

from paramproxy import recompute, set_checkpoint_debug_enabled, set_checkpoint_early_stop
from paramproxy._mismatch import Comparison
from paramproxy._saved import Metadata
from paramproxy.exceptions import MutationError


def message(y):
    with pytest.raises(OSError, match="External") as caught:
        y.sum().backward()
    assert paddle.is_grad_enabled()
    return str(caught.value)


def switching(*functions):
    """A function that is the next of these at each call."""
    calls = iter(functions)
    return lambda a: next(calls)(a)


def test_another_shape():
    region = switching(lambda a: paddle.exp(a), lambda a: paddle.exp(a[:1]))
    text = message(hooked(region, tensor([1.0, 2.0]) * 1.0))
    assert "ReplayMismatchError: Cannot replay switching" in text
    assert "saved tensor 0 (of 1) is [1] float32, and in the first run it was [2] float32" in text
    assert "A region has to do the same each time. Usual causes:" in text
    assert "debug=True shows the lines that save it." in text


def test_another_dtype():
    region = switching(lambda a: paddle.exp(a), lambda a: paddle.exp(a.astype("float64")))
    text = message(hooked(region, tensor([1.0]) * 1.0))
    assert "is [1] float64, and in the first run it was [1] float32" in text


def test_another_layout():
    region = switching(
        lambda a: paddle.exp(a.transpose([1, 0])).sum(),
        lambda a: paddle.exp(
            a.transpose([1, 0]).contiguous().reshape([1, 4]).reshape([2, 2])
        ).sum(),
    )
    y = hooked(region, tensor([[1.0, 2.0], [3.0, 4.0]]) * 1.0)
    first = values(y)
    try:
        y.backward()
    except OSError as exc:
        assert "strides and offset" in str(exc)  # noqa: PT017
    else:
        assert first == pytest.approx(84.79, abs=0.1)


def test_too_few_tensors():
    region = switching(lambda a: paddle.tanh(paddle.exp(a)), lambda a: paddle.exp(a))
    text = message(hooked(region, tensor([1.0]) * 1.0))
    assert "it saved 1 tensors for backward, and 2 in its first run." in text


def test_none_at_all():
    region = switching(lambda a: paddle.exp(a), lambda a: a + 1.0)
    assert "it saved 0 tensors for backward, and 1" in message(hooked(region, tensor([1.0]) * 1.0))


def test_too_many_tensors_are_found_where_it_runs_to_its_end():
    region = switching(lambda a: paddle.exp(a), lambda a: paddle.tanh(paddle.exp(a)))
    with set_checkpoint_early_stop(False):
        y = hooked(region, tensor([1.0]) * 1.0)
    assert "saved tensor 1 (of 1) is [1] float32, and in the first run there was none" in message(y)


def one(a):
    return paddle.exp(a)


def other(a):
    return paddle.tanh(a[:1])


@pytest.mark.parametrize("by_context", [True, False])
def test_debug_names_the_lines_of_both_runs(by_context):
    region = switching(one, other)
    x = tensor([1.0, 2.0]) * 1.0
    if by_context:
        with set_checkpoint_debug_enabled(True):
            y = hooked(region, x)
    else:
        y = hooked(region, x, debug=True)
    text = message(y)
    first, second = text.split("In the replay:")
    line = one.__code__.co_firstlineno + 1
    assert f'test_mismatch.py", line {line}, in one' in first.split("In the first run:")[1]
    line = other.__code__.co_firstlineno + 1
    assert f'test_mismatch.py", line {line}, in other' in second


def test_the_context_overrules_the_argument():
    with set_checkpoint_debug_enabled(False):
        y = hooked(switching(one, other), tensor([1.0, 2.0]) * 1.0, debug=True)
    assert "debug=True shows" in message(y)


def test_a_failed_replay_leaves_nothing_dirty():
    x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
    message(hooked(switching(one, other), x * 1.0))
    hooked(lambda a: paddle.tanh(a * w), x * 1.0).sum().backward()
    again = values(x.grad), values(w.grad)
    x.clear_gradient(False)
    w.clear_gradient(False)
    paddle.tanh(x * 1.0 * w).sum().backward()
    assert again == (values(x.grad), values(w.grad))


@pytest.mark.parametrize("error", [ValueError("told"), KeyboardInterrupt("told")])
@pytest.mark.parametrize("no_grad", [True, False])
def test_an_exception_in_a_replay_is_told_and_grad_mode_is_as_it_was(error, no_grad):
    def fails(a):
        raise error

    s = hooked(switching(one, fails), tensor([1.0]) * 1.0).sum()
    with paddle.set_grad_enabled(not no_grad):
        with pytest.raises(OSError, match="told"):
            s.backward()
        assert paddle.is_grad_enabled() is not no_grad
    assert paddle.is_grad_enabled()


def change(t):
    with paddle.no_grad():
        t.add_(paddle.ones_like(t))


def test_an_input_that_was_changed():
    h = tensor([1.0, 2.0]) * 1.0
    y = hooked(lambda a: a * a, h)
    change(h)
    assert "MutationError: Cannot replay" in message(y)


@pytest.mark.parametrize("captured", [True, False])
def test_a_weight_that_was_changed(captured):
    w, h = param([3.0]), tensor([1.0]) * 1.0
    y = hooked(lambda a: a * w, h) if captured else hooked(lambda a, p: a * p, h, w)
    change(w)
    assert "was changed in place after the first run" in message(y)


def test_a_weight_that_nobody_could_find_was_changed():
    """The replay meets the storage of the first run in another version."""
    held = threading.local()
    held.box = [[[[[param([3.0])]]]]]
    y = hooked(lambda a: a * held.box[0][0][0][0][0], tensor([1.0]) * 1.0)
    change(held.box[0][0][0][0][0])
    text = message(y)
    assert "saved tensor 1 ([1] float32), which it reads from outside, was changed in place" in text


def test_a_function_that_overwrites_its_argument_is_refused_at_once():
    from paramproxy import MutationError

    def region(a):
        b = paddle.exp(a)
        a.add_(paddle.ones([1]))
        return b * a

    with pytest.raises(MutationError, match="it changes argument 0 in place"):
        hooked(region, tensor([1.0]) * 1.0)


def test_a_function_that_overwrites_what_it_has_saved_is_right_or_refused():
    """Paddle refuses it without recompute. Early stop does not get so far."""

    def region(a):
        b = paddle.exp(a)
        b.add_(paddle.ones([1]))
        return b

    with set_checkpoint_early_stop(False):
        y = hooked(region, tensor([0.0]) * 1.0)
    assert "has been changed in place since (version 0, now 1)" in message(y)
    x = tensor([0.0])
    hooked(region, x * 1.0).sum().backward()
    assert values(x.grad) == [1.0]


def test_no_warnings_on_the_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message(hooked(switching(one, other), tensor([1.0, 2.0]) * 1.0))


def test_other_calls_of_keep():
    from paramproxy import keep

    for mode in (True, False):
        region = switching(
            lambda a: paddle.exp(keep(paddle.tanh, a)),
            lambda a: paddle.exp(keep(paddle.tanh, keep(paddle.tanh, a))),
        )
        y = recompute(region, tensor([1.0]) * 1.0, use_reentrant=mode)
        assert "calls of keep" in message(y)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_storage_that_the_replay_itself_has_put_there_may_have_another_version(is_own):
    """The copy of a buffer may get the address of what the first run had saved, and freed since."""
    t = tensor([1.0, 2.0], grad=False)
    first = [Metadata.of(t)]
    t.scale_(2.0)
    comparison = Comparison("f", first, None, False, {t.data_ptr()} if is_own else set())
    assert comparison.compare(0, t) == is_own
    assert isinstance(comparison.error, MutationError) != is_own
