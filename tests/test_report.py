"""`report`: rows for a program, a table for a person."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from rich.console import Console
from support import MODES, hooked, param, tensor

from paramproxy import keep, recompute, report, save_everything, save_ops


SIZE = 2**12
BYTES = 4 * SIZE


def block(a):
    return paddle.tanh(paddle.exp(paddle.tanh(a)))


@pytest.mark.parametrize("run", MODES)
def test_one_row_for_each_function(run):
    x = tensor(np.zeros(SIZE))
    with report() as r:
        h = run(block, run(block, x * 1.0))
        run(lambda a: paddle.exp(a), h).sum().backward()
    first, second = r.rows
    assert first.name.startswith("block (")
    assert "test_report.py" in first.name
    assert (first.calls, first.replays) == (2, 2)
    assert (first.saved_bytes, first.plain_bytes) == (2 * BYTES, 2 * 3 * BYTES)
    assert (second.calls, second.saved_bytes, second.plain_bytes) == (1, BYTES, BYTES)
    assert first.first_seconds > 0
    assert first.replay_seconds > 0


@pytest.mark.parametrize("run", MODES)
def test_a_storage_counts_once_and_a_parameter_never(run):
    x, w = tensor(np.zeros(SIZE)), param(np.zeros(SIZE))
    with report() as r:
        run(lambda a, p: a * p * a.reshape([SIZE]), x * 1.0, w).sum().backward()
    assert (r.rows[0].saved_bytes, r.rows[0].plain_bytes) == (BYTES, 2 * BYTES)


@pytest.mark.parametrize(
    ("policy", "saved", "replays"), [(save_everything, 4, 0), (save_ops("exp"), 2, 1)]
)
def test_what_a_policy_keeps_counts(policy, saved, replays):
    x = tensor(np.zeros(SIZE))
    with report() as r:
        recompute(block, x * 1.0, policy=policy).sum().backward()
    (row,) = r.rows
    assert (row.saved_bytes, row.plain_bytes) == (saved * BYTES, 3 * BYTES)
    assert row.replays == replays


@pytest.mark.parametrize("run", MODES)
def test_what_a_kept_call_saves_counts(run):
    x = tensor(np.zeros(SIZE))
    with report() as r:
        run(lambda a: paddle.exp(keep(paddle.tanh, paddle.exp(a))), x * 1.0).sum().backward()
    (row,) = r.rows
    assert (row.saved_bytes, row.plain_bytes) == (2 * BYTES, 3 * BYTES)


def test_an_inner_region_has_a_row_for_what_it_does_in_the_replay():
    with report() as r:
        hooked(
            lambda a: hooked(block, paddle.exp(a)), tensor(np.zeros(SIZE)) * 1.0
        ).sum().backward()
    outer, inner = r.rows
    assert (outer.calls, outer.replays) == (1, 1)
    assert inner.name.startswith("block (")
    assert (inner.calls, inner.replays) == (1, 1)


def test_it_prints_as_a_table():
    with report() as r:
        y = hooked(block, tensor(np.zeros(SIZE)) * 1.0)
        hooked(paddle.exp, y)
    text = str(r)
    for word in ("region", "calls", "replays", "saved", "without", "first run", "block", "16.4 kB"):
        assert word in text
    with Console(width=80, record=True, quiet=True) as console:
        console.print(r)


def test_without_a_report_nothing_is_measured():
    with report() as r:
        pass
    y = hooked(block, tensor([1.0]) * 1.0)
    y.sum().backward()
    assert r.rows == []


def test_regions_of_the_block_are_measured_to_their_end():
    with report() as r:
        y = hooked(block, tensor([1.0]) * 1.0)
    hooked(block, tensor([1.0]) * 1.0).sum().backward()
    y.sum().backward()
    assert (r.rows[0].calls, r.rows[0].replays) == (1, 1)
