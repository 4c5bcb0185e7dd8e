"""What is measured, each beside what it has to be compared with, and the bar it has to reach."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import paddle
from measure import left_behind, microseconds, peak

from paramproxy import recompute
from paramproxy._compat import paddle_recompute
from paramproxy._leaf import Handover, make_leaf


ENGINES = {"reentrant": True, "hooks": False}


@attrs.frozen
class Row:
    """One number of ours.

    Attributes:
        group: What it belongs to.
        what: What was measured.
        ours: The number.
        unit: Its unit.
        beside: What it is compared with.
        theirs: That one's number; None where the bar is absolute.
        bar: The largest `ours / theirs` that will do; of `ours` where there is
            nothing beside it.
    """

    group: str
    what: str
    ours: float
    unit: str
    beside: str
    theirs: float | None
    bar: float

    @property
    def ratio(self) -> float:
        """What the bar is for."""
        return self.ours if self.theirs is None else self.ours / self.theirs

    @property
    def is_reached(self) -> bool:
        return self.ratio <= self.bar


def theirs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Paddle's own recompute."""
    return paddle_recompute().recompute(function, *args, **kwargs)


def leaf_rows() -> Iterator[Row]:
    """A leaf, beside the copy that Paddle's replay makes of a parameter."""
    handover = Handover()
    for size in (4, 2048):
        parameter = paddle.create_parameter([size, size], "float32")
        parameter.main_grad = paddle.zeros([size, size])
        copy = paddle_recompute()._varbase_help
        times = microseconds(
            {
                "ours": functools.partial(_times, 50, make_leaf, parameter, handover),
                "theirs": functools.partial(copy, parameter),
            },
            calls=5,
        )
        name = f"{size}x{size} with a main_grad"
        ours = times["ours"] / 50
        yield Row("a leaf", name, ours, "µs", "", None, 8.0)
        if size > 1000:
            beside = "Paddle's copy"
            yield Row("a leaf", name, ours, "µs", beside, times["theirs"], 0.001)


def _times(count: int, function: Callable[..., Any], *args: Any) -> None:
    for _ in range(count):
        function(*args)


def _block(x: Any, w: Any) -> Any:
    return paddle.tanh(paddle.matmul(x, w))


def _inputs(size: int = 8) -> tuple[Any, Any]:
    x = paddle.rand([size, size])
    x.stop_gradient = False
    return x, paddle.create_parameter([size, size], "float32")


def _twice(x: Any, w: Any) -> None:
    """What every recompute has to do: the function twice, its backward once."""
    with paddle.no_grad():
        _block(x, w)
    _block(x, w).sum().backward()


def region_rows() -> Iterator[Row]:
    """A small region: what it costs above running the function twice and its backward once."""
    x, w = _inputs()
    runs = {"twice": lambda: _twice(x, w), "theirs": lambda: theirs(_block, x, w).sum().backward()}
    runs["theirs hooks"] = lambda: theirs(_block, x, w, use_reentrant=False).sum().backward()
    for engine, mode in ENGINES.items():
        for preserve in (True, False):
            options = {"use_reentrant": mode, "preserve_rng_state": preserve}
            runs[f"{engine} {preserve}"] = functools.partial(_region, x, w, options)
    times = microseconds(runs, calls=100)
    fixed = {name: time - times["twice"] for name, time in times.items()}
    bars = {("reentrant", True): 0.30, ("hooks", True): 0.40}
    bars |= {("reentrant", False): 0.20, ("hooks", False): 0.30}
    for (engine, preserve), bar in bars.items():
        beside = "theirs hooks" if engine == "hooks" and preserve else "theirs"
        what = engine if preserve else f"{engine}, preserve_rng_state=False"
        yield Row(
            "fixed cost of a region",
            what,
            fixed[f"{engine} {preserve}"],
            "µs",
            "Paddle's hook mode" if beside == "theirs hooks" else "Paddle's default",
            fixed[beside],
            bar,
        )


def _region(x: Any, w: Any, options: dict[str, Any]) -> None:
    recompute(_block, x, w, **options).sum().backward()


def argument_rows() -> Iterator[Row]:
    """What one more parameter argument costs."""
    x, _ = _inputs()
    weights = [paddle.create_parameter([8, 8], "float32") for _ in range(33)]

    def block(x: Any, *weights: Any) -> Any:
        return paddle.add_n([x, *weights])

    def run(function: Callable[..., Any], count: int) -> None:
        function(block, x, *weights[:count]).sum().backward()

    runs = {}
    for count in (1, 33):
        runs[f"plain {count}"] = functools.partial(run, lambda f, *args: f(*args), count)
        runs[f"theirs {count}"] = functools.partial(run, theirs, count)
        for engine, mode in ENGINES.items():
            ours = functools.partial(recompute, use_reentrant=mode)
            runs[f"{engine} {count}"] = functools.partial(run, ours, count)
    times = microseconds(runs, calls=30)

    def each(name: str) -> float:
        plain = times["plain 33"] - times["plain 1"]
        return (times[f"{name} 33"] - times[f"{name} 1"] - plain) / 32

    for engine in ENGINES:
        yield Row(
            "one more parameter argument",
            engine,
            each(engine),
            "µs",
            "Paddle's",
            each("theirs"),
            0.5,
        )


def growth_rows() -> Iterator[Row]:
    """Whether a region costs more the more of them there are."""
    x, w = _inputs()

    def follow(mode: bool, count: int) -> None:
        h = x
        for _ in range(count):
            h = recompute(_block, h, w, use_reentrant=mode)
        h.sum().backward()

    for engine, mode in ENGINES.items():
        times = microseconds(
            {str(count): functools.partial(follow, mode, count) for count in (10, 100)}, calls=2
        )
        yield Row(
            "100 regions in a step",
            engine,
            times["100"] / 100,
            "µs each",
            "10 regions",
            times["10"] / 10,
            1.1,
        )


def transformer_rows() -> Iterator[Row]:
    """A transformer layer: the whole step."""
    layer = paddle.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1)
    x = paddle.rand([4, 128, 512])
    x.stop_gradient = False

    def by_hand() -> None:
        with paddle.no_grad():
            layer(x)
        layer(x).sum().backward()

    runs: dict[str, Callable[[], object]] = {
        "by hand": by_hand,
        "theirs": lambda: theirs(layer, x).sum().backward(),
    }
    for engine, mode in ENGINES.items():
        runs[engine] = functools.partial(_step, layer, x, mode)
    times = microseconds(runs, calls=1)
    for engine in ENGINES:
        for beside, name, bar in (
            ("theirs", "Paddle's", 1.0),
            ("by hand", "forward, forward, backward", 1.03),
        ):
            ours, other = times[engine] / 1000, times[beside] / 1000
            yield Row("a transformer layer", engine, ours, "ms", name, other, bar)


def _step(layer: Any, x: Any, mode: bool) -> None:
    recompute(layer, x, use_reentrant=mode).sum().backward()


def tail_rows() -> Iterator[Row]:
    """The tail after the last tensor that is saved, which early stop leaves out."""
    x = paddle.rand([256, 256])
    x.stop_gradient = False
    ran = []

    def region(a: Any) -> Any:
        b = paddle.exp(a)
        ran.append(1)
        tail = b.detach()
        for _ in range(20):
            tail = paddle.matmul(tail, tail)
        return b + tail.mean() * 0.0 + 1.0

    def step(mode: bool) -> None:
        recompute(region, x, use_reentrant=mode).sum().backward()

    ran.clear()
    step(False)
    again = len(ran) - 1
    yield Row("the tail", "runs again, hooks", again, "times", "", None, 0)
    times = microseconds({"hooks": lambda: step(False), "reentrant": lambda: step(True)}, calls=2)
    yield Row(
        "the tail",
        "hooks",
        times["hooks"] / 1000,
        "ms",
        "reentrant, which runs it again",
        times["reentrant"] / 1000,
        0.65,
    )


BLOCKS, SIZE = 12, 256


def memory_rows() -> Iterator[Row]:
    """The allocator's peak of a step of twelve blocks, and what it leaves."""
    weights = [
        [paddle.create_parameter([SIZE, SIZE], "float32") for _ in range(3)] for _ in range(BLOCKS)
    ]
    x = paddle.rand([SIZE, SIZE])
    x.stop_gradient = False

    def block(h: Any, *ws: Any) -> Any:
        for w in ws:
            h = paddle.tanh(paddle.matmul(h, w))
        return h

    def step(run: Callable[..., Any], passed: bool = True) -> None:
        h = x
        for ws in weights:
            h = run(block, h, *ws) if passed else run(lambda h, ws=ws: block(h, *ws), h)
        h.sum().backward()
        x.clear_gradient(False)
        for w in (w for ws in weights for w in ws):
            w.clear_gradient(False)

    other = peak(lambda: step(theirs))
    for engine, mode in ENGINES.items():
        ours = functools.partial(recompute, use_reentrant=mode)
        bytes_ = peak(lambda ours=ours: step(ours))
        yield Row("peak of 12 blocks", engine, bytes_ / 1024, "KiB", "Paddle's", other / 1024, 1.0)
        # Most is held in the last region to run backward: all weights' gradients, its own
        # three activations, and the gradients that an operator takes and gives.
        held = (3 * BLOCKS + 3 + 2) * SIZE * SIZE * 4
        yield Row(
            "peak of 12 blocks",
            engine,
            bytes_ / 1024,
            "KiB",
            "what must be held",
            held / 1024,
            1.01,
        )
        captured = peak(lambda ours=ours: step(ours, passed=False))
        for w in (w for ws in weights for w in ws):
            w.main_grad = paddle.zeros([SIZE, SIZE])
        passed = peak(lambda ours=ours: step(ours))
        for w in (w for ws in weights for w in ws):
            del w.main_grad
        more = float(passed - captured)
        yield Row("weights passed, with main_grads", engine, more, "bytes more", "", None, 0)
        left = float(left_behind(lambda ours=ours: step(ours)))
        yield Row("left after backward", engine, left, "bytes", "", None, 0)


def import_rows() -> Iterator[Row]:
    """Importing paramproxy where Paddle is imported already."""
    code = (
        "import time, warnings; warnings.simplefilter('ignore'); import paddle; "
        "start = time.perf_counter(); import paramproxy; print(time.perf_counter() - start)"
    )
    # Installed, modules are compiled already; an environment may forbid to keep that.
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", code]
        outputs = [subprocess.check_output(command, text=True, env=env) for _ in range(6)]
    times = sorted(float(output.split()[-1]) for output in outputs[1:])
    yield Row("import", "beyond Paddle", times[2] * 1000, "ms", "", None, 60)


GROUPS = (
    leaf_rows,
    region_rows,
    argument_rows,
    growth_rows,
    transformer_rows,
    tail_rows,
    memory_rows,
    import_rows,
)
