"""What is logged under `paramproxy`, and at which line of the user's warnings stand."""

from __future__ import annotations

import inspect
import logging
import warnings

import paddle
import pytest
from support import hooked, param, run_python, tensor

import paramproxy
from paramproxy import _streams, recompute


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.DEBUG, logger="paramproxy")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_patch_is_logged_once(messages):
    with paramproxy.patch(), paramproxy.patch():
        pass
    assert messages() == [
        ("DEBUG", "Paddle's recompute is paramproxy's now"),
        ("DEBUG", "Paddle's recompute is Paddle's own again"),
    ]


def layer(h):
    return paddle.tanh(h)


def test_the_engine_is_logged_where_it_is_not_the_one_asked_for(messages):
    x = tensor([1.0])
    recompute(layer, x)
    hooked(layer, x)
    assert messages() == []
    recompute(layer, x, policy=paramproxy.save_everything)
    hooked(lambda h: recompute(layer, h), x).backward()
    recompute(lambda ids: layer(ids * 1.0), paddle.to_tensor([1.0]))
    reasons = [text.rpartition(": ")[2] for _, text in messages()]
    assert reasons == [
        "it has a policy",
        "it is inside of a region of that engine",
        "it has no differentiable input",
    ]
    level, text = messages()[0]
    assert level == "DEBUG"
    assert text.startswith("layer (")
    assert "test_log.py" in text


def test_a_stream_that_can_not_be_read_as_bytes_is_logged(messages, monkeypatch):
    monkeypatch.setattr(_streams, "_numpy_state", lambda state: None)
    _streams._is_numpy_proven.cache_clear()
    assert not _streams._is_numpy_proven()
    _streams._is_numpy_proven.cache_clear()
    text = "the random stream of numpy is read by its public state, which is slower"
    assert messages() == [("DEBUG", text)]


def test_nothing_is_printed_where_nobody_asked_for_it():
    done = run_python("import paramproxy; paramproxy.patch(); paramproxy.unpatch()")
    assert done.returncode == 0
    assert "Paddle's recompute" not in done.stdout + done.stderr


def retain_twice():
    for _ in range(2):
        recompute(layer, tensor([1.0])).sum().backward(retain_graph=True)


def offload_a_parameter():
    w = param([1.0])
    for _ in range(2):
        recompute(lambda h, w: layer(h * w), tensor([1.0]), w, offload_indices=[1])


def necessary():
    for _ in range(2):
        paramproxy.check_recompute_necessary([paddle.ones([1])])


def unknown_key():
    for _ in range(2):
        paramproxy.recompute_sequential({"segments": 1, "colour": 1}, [layer], tensor([1.0]))


@pytest.mark.parametrize(
    "program", [retain_twice, offload_a_parameter, necessary, unknown_key], ids=lambda p: p.__name__
)
def test_a_warning_stands_once_at_the_line_of_the_user(program):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        globals().pop("__warningregistry__", None)
        program()
    (warning,) = [w for w in caught if issubclass(w.category, UserWarning)]
    lines, start = inspect.getsourcelines(program)
    assert warning.filename == __file__
    assert warning.lineno == start + len(lines) - 1
