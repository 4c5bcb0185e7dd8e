"""How a row is measured: everything in one process, in turn, the order alternated, medians."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from paddle.base import core


ROUNDS = 15

Name = TypeVar("Name", bound=Hashable)


def microseconds(runs: Mapping[Name, Callable[[], object]], calls: int) -> dict[Name, float]:
    """The median time of one call of each, in µs.

    Args:
        runs: What to call, by name.
        calls: How many calls make one sample.
    """
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for round_ in range(ROUNDS):
        names = list(runs) if round_ % 2 else list(runs)[::-1]
        for name in names:
            run = runs[name]
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
            gc.enable()
    return {name: statistics.median(times) for name, times in samples.items()}


def allocated() -> int:
    """The bytes that the CPU allocator has handed out."""
    return int(core.host_memory_stat_current_value("Allocated", 0))


def peak(step: Callable[[], object]) -> int:
    """The allocator's peak above what was there, while `step` runs a second time."""
    step()
    gc.collect()
    before = allocated()
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    step()
    return int(core.host_memory_stat_peak_value("Allocated", 0)) - before


def left_behind(step: Callable[[], object], steps: int = 5) -> int:
    """The bytes that are there after some steps, without a garbage collection in between."""
    step()
    gc.collect()
    gc.disable()
    before = allocated()
    for _ in range(steps):
        step()
    after = allocated()
    gc.enable()
    return after - before
