"""What a leaf of a parameter costs, beside the copy that Paddle makes of one.

`make bench` runs it. Times are medians; the two are measured in turn.
"""

from __future__ import annotations

import statistics
import time

import paddle
from rich.console import Console
from rich.table import Table

from paramproxy._compat import paddle_recompute
from paramproxy._leaf import Handover, make_leaf


ROUNDS = 9


def microseconds(function, argument, calls):
    start = time.perf_counter()
    for _ in range(calls):
        function(argument)
    return (time.perf_counter() - start) / calls * 1e6


def parameter(size, *, main_grad):
    made = paddle.create_parameter([size, size], "float32")
    if main_grad:
        made.main_grad = paddle.zeros([size, size])
    return made


def main():
    handover = Handover()
    table = Table("parameter", "leaf, µs", "Paddle's copy, µs", "ratio")
    for size, main_grad in ((4, False), (4, True), (2048, True)):
        param = parameter(size, main_grad=main_grad)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(microseconds(lambda p: make_leaf(p, handover), param, 500))
            theirs.append(microseconds(paddle_recompute()._varbase_help, param, 5))
        leaf, copy = statistics.median(ours), statistics.median(theirs)
        name = f"{size}x{size}" + (" with a main_grad" if main_grad else "")
        table.add_row(name, f"{leaf:.1f}", f"{copy:.1f}", f"{copy / leaf:.0f}")
    Console().print(f"Paddle {paddle.__version__}")
    Console().print(table)


if __name__ == "__main__":
    main()
