"""The doctor: what recompute does to a parameter, on the Paddle that is installed.

Each row is a small program with a known right answer. It runs under Paddle's own
recompute and under paramproxy's, in a subprocess for each engine, because a row
may crash the interpreter.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import paddle
from rich.console import Console
from rich.table import Table
from rich.text import Text

import paramproxy
from paramproxy._compat import paddle_recompute
from paramproxy._version import __version__
from paramproxy.patching import unpatched


__all__ = ["diagnose", "show"]

Run = Callable[..., Any]

# One row may not keep the others waiting for ever.
SECONDS_PER_ENGINE = 300
REPEATS = 3
WORKER = "from paramproxy import _doctor; _doctor.work({engine!r}, {start})"


class FusedMatmul(paddle.autograd.PyLayer):  # type: ignore[misc]
    """Accumulates both weight gradients in `main_grad`, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return paddle.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        a, b = ctx.saved_tensor()
        for operand in (a, b):
            if getattr(operand, "main_grad", None) is None:
                operand.main_grad = paddle.zeros(operand.shape, "float32")
            operand.main_grad.add_(paddle.ones_like(operand.main_grad))
        return paddle.matmul(dy, b, transpose_y=True), paddle.matmul(a, dy, transpose_x=True)


def fused_matmul(a: Any, b: Any) -> Any:
    """A function of its own: Paddle can't read the signature of `apply`."""
    return FusedMatmul.apply(a, b)


def _parameter(*shape: int) -> Any:
    return paddle.create_parameter(list(shape), "float32")


def _with_main_grad(param: Any) -> Any:
    param.main_grad = paddle.zeros(param.shape, "float32")
    return param


def _mean_main_grads(*params: Any) -> str:
    grads = [getattr(param, "main_grad", None) for param in params]
    return ", ".join("none" if grad is None else f"{float(grad.mean()):g}" for grad in grads)


def fused_main_grad(run: Run) -> str:
    a, b = _with_main_grad(_parameter(3, 4)), _with_main_grad(_parameter(4, 5))
    run(fused_matmul, a, b).mean().backward()
    return _mean_main_grads(a, b)


def lazy_main_grad(run: Run) -> str:
    a, b = _parameter(3, 4), _parameter(4, 5)
    run(fused_matmul, a, b).mean().backward()
    return _mean_main_grads(a, b)


def tuple_of_parameters(run: Run) -> str:
    a, b = _with_main_grad(_parameter(3, 4)), _with_main_grad(_parameter(4, 5))
    run(lambda pair: FusedMatmul.apply(*pair), (a, b)).mean().backward()
    return _mean_main_grads(a, b)


def tag_in_the_region(run: Run) -> str:
    x, w = paddle.ones([2, 3]), _parameter(3, 3)
    x.stop_gradient = False
    w.sequence_parallel = True
    seen = []

    def region(x: Any, w: Any) -> Any:
        seen.append(getattr(w, "sequence_parallel", "lost"))
        return paddle.tanh(paddle.matmul(x, w))

    run(region, x, w).sum().backward()
    return ", ".join(map(str, seen))


def uncopyable_attribute(run: Run) -> str:
    x, w = paddle.ones([2, 3]), _parameter(3, 3)
    x.stop_gradient = False
    w.lock = threading.Lock()

    def region(x: Any, w: Any) -> Any:
        with w.lock:
            return paddle.matmul(x, w)

    run(region, x, w).sum().backward()
    return f"{float(w.grad.mean()):g}"


@attrs.frozen
class Row:
    """One program and its right answer."""

    title: str
    program: Callable[[Run], str]
    expected: str


ROWS = (
    Row("#70508: main_grads of a, b", fused_main_grad, "1, 1"),
    Row("the same, made in backward", lazy_main_grad, "1, 1"),
    Row("the same, a and b in a tuple", tuple_of_parameters, "1, 1"),
    Row("a tag, in both runs", tag_in_the_region, "True, True"),
    Row("a gradient beside a lock", uncopyable_attribute, "2"),
)


def _paddle(**mode: bool) -> Run:
    return functools.partial(paddle_recompute().recompute, **mode)


ENGINES: dict[str, Callable[[], Run]] = {
    "Paddle reentrant": lambda: _paddle(use_reentrant=True),
    "Paddle hooks": lambda: _paddle(use_reentrant=False),
    "paramproxy reentrant": lambda: paramproxy.recompute,
    "paramproxy hooks": lambda: functools.partial(paramproxy.recompute, use_reentrant=False),
}
OURS = ("paramproxy reentrant", "paramproxy hooks")


@attrs.frozen
class Outcome:
    """What one engine gave for one row, and how long forward and backward took."""

    got: str
    milliseconds: float | None = None


def _examine(row: Row, run: Run) -> Outcome:
    """The best of a few runs; the answer of the last, or the error of the first that raised."""
    best = float("inf")
    got = ""
    for _ in range(REPEATS):
        start = time.perf_counter()
        try:
            got = row.program(run)
        except Exception as exc:
            return Outcome(f"{type(exc).__name__}: {_last_words(exc)}")
        best = min(best, (time.perf_counter() - start) * 1000)
    return Outcome(got, round(best, 3))


def _last_words(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line or line.startswith("AssertionError")]
    return (told or lines or [""])[-1][:120]


def work(engine: str, start: int) -> None:
    """The subprocess: examine the rows from `start` on, a line of JSON for each."""
    run = ENGINES[engine]()
    with unpatched():
        for row in ROWS[start:]:
            print(json.dumps(attrs.asdict(_examine(row, run))), flush=True)


def _outcomes(engine: str) -> Iterator[Outcome]:
    """One outcome a row, in a new subprocess after each row that ended one."""
    done = 0
    while done < len(ROWS):
        code = WORKER.format(engine=engine, start=done)
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            process = subprocess.run(  # noqa: S603 - this Python, with code of this file
                command, capture_output=True, text=True, timeout=SECONDS_PER_ENGINE, check=False
            )
            output, ending = process.stdout, _ending(process)
        except subprocess.TimeoutExpired as exc:
            output, ending = _text(exc.stdout), f"no answer in {SECONDS_PER_ENGINE} s"
        for line in output.splitlines():
            if line.startswith("{"):
                yield Outcome(**json.loads(line))
                done += 1
        if done < len(ROWS):
            yield Outcome(ending)
            done += 1


def _ending(process: subprocess.CompletedProcess[str]) -> str:
    if process.returncode < 0:
        return f"crashed the interpreter (signal {-process.returncode})"
    words = process.stderr.strip().splitlines()[-1:] or [""]
    return f"ended with {process.returncode}: {words[0][:120]}"


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def diagnose() -> dict[str, Any]:
    """Run every row under every engine.

    Returns:
        What `--json` prints: the versions, the rows with what each engine gave,
        and `ok`: whether paramproxy gave the right answer in every row.
    """
    columns = {engine: list(_outcomes(engine)) for engine in ENGINES}
    rows: list[dict[str, Any]] = [
        {
            "case": row.title,
            "expected": row.expected,
            "engines": {
                engine: {
                    **attrs.asdict(outcomes[index]),
                    "right": outcomes[index].got == row.expected,
                }
                for engine, outcomes in columns.items()
            },
        }
        for index, row in enumerate(ROWS)
    ]
    return {
        "paddle": paddle.__version__,
        "paramproxy": __version__,
        "device": paddle.get_device(),
        "rows": rows,
        "ok": all(row["engines"][engine]["right"] for row in rows for engine in OURS),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print a diagnosis as a table."""
    table = Table(
        title=f"A parameter under recompute: Paddle {report['paddle']} on {report['device']}, "
        f"paramproxy {report['paramproxy']}",
        title_justify="left",
        caption="What each program gave, and the time of one forward and backward. Paddle's "
        "default mode is the reentrant one.",
        caption_justify="left",
        show_lines=True,
    )
    table.add_column("program", min_width=10)
    table.add_column("expected")
    for engine in ENGINES:
        table.add_column(engine)
    for row in report["rows"]:
        cells = [_cell(outcome) for outcome in row["engines"].values()]
        table.add_row(row["case"], row["expected"], *cells)
    console.print(table)
    if report["ok"]:
        console.print("paramproxy gave the right answer in every row.", style="green")
    else:
        console.print("paramproxy gave a wrong answer: please report this table.", style="red")


def _cell(outcome: dict[str, Any]) -> Text:
    mark, style = ("✓", "green") if outcome["right"] else ("✗", "red")
    cell = Text(f"{mark} {outcome['got']}", style=style)
    if outcome["milliseconds"] is not None:
        cell.append(f"\n{outcome['milliseconds']:.2f} ms", style="dim")
    return cell
