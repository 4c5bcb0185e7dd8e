"""`report`: what each region of a step kept for backward, and what that cost in time."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs

from paramproxy._captured import function_name
from paramproxy._parameter import nbytes


if TYPE_CHECKING:  # it takes longer to import than most of this package
    from rich.table import Table


__all__ = ["Meter", "Report", "ReportRow", "meter", "report"]


@attrs.define
class ReportRow:
    """One line of a report: the regions of one function.

    Attributes:
        name: The function, with its file and line if it has them.
        calls: How often it was called.
        replays: How often it was run again.
        saved_bytes: What all calls together kept for backward: inputs, and what
            a policy or `keep` has kept. In each call a storage counts once, and
            parameters do not count.
        plain_bytes: What they would have kept without recompute: what is kept
            anyway of it, and what replays have computed again. Not known of a
            call before its replay. A tensor that a policy keeps for one operator
            and not for another counts twice.
        first_seconds: Time in first runs.
        replay_seconds: Time in replays, without the backward itself.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([256])
        >>> x.stop_gradient = False
        >>> with paramproxy.report() as r:
        ...     paramproxy.recompute(lambda x: paddle.exp(paddle.tanh(x)), x).sum().backward()
        >>> r.rows[0].saved_bytes, r.rows[0].plain_bytes  # the input; two results
        (1024, 2048)
    """

    name: str
    calls: int = 0
    replays: int = 0
    saved_bytes: int = 0
    plain_bytes: int = 0
    first_seconds: float = 0.0
    replay_seconds: float = 0.0


@attrs.define
class Report:
    """What the regions of a block did. Prints as a table.

    Attributes:
        rows: One [`ReportRow`][paramproxy.ReportRow] for each function, in the
            order of their first calls.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> with paramproxy.report() as r:
        ...     paramproxy.recompute(paddle.nn.Tanh(), x).sum().backward()
        >>> [(row.name, row.calls, row.replays) for row in r.rows]
        [('Tanh', 1, 1)]
    """

    rows: list[ReportRow] = attrs.field(factory=list)

    def row(self, name: str) -> ReportRow:
        """The row of that name, a new one if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        self.rows.append(ReportRow(name))
        return self.rows[-1]

    def __rich__(self) -> Table:
        from rich.filesize import decimal
        from rich.table import Table

        table = Table(caption="Bytes kept for backward, against those of the same calls without")
        table.add_column("region", overflow="fold")
        for title in ("calls", "replays", "saved", "without", "first run", "replay"):
            table.add_column(title, justify="right")
        for row in self.rows:
            table.add_row(
                row.name,
                str(row.calls),
                str(row.replays),
                decimal(row.saved_bytes),
                decimal(row.plain_bytes) if row.plain_bytes else "-",
                f"{row.first_seconds * 1000:.2f} ms",
                f"{row.replay_seconds * 1000:.2f} ms" if row.replays else "-",
            )
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue()


@attrs.define(eq=False)
class Meter:
    """Measures one region for its row. A storage counts once, a parameter's never.

    Attributes:
        row: The row.
        parameters: The addresses of parameters.
        saved: The addresses of what is kept.
        plain: The addresses of what would have been kept without recompute.
    """

    row: ReportRow
    parameters: set[int] = attrs.field(factory=set)
    saved: set[int] = attrs.field(factory=set)
    plain: set[int] = attrs.field(factory=set)

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        self.row.calls += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self.row.first_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """A replay, during which `see` is told what it saves."""
        self.row.replays += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self.row.replay_seconds += time.perf_counter() - start

    def leave_out(self, parameters: Iterable[Any]) -> None:
        self.parameters.update(p.data_ptr() for p in parameters if p._is_initialized())

    def keep(self, tensor: Any) -> None:
        """An input, which the region keeps."""
        self.row.saved_bytes += self._new(tensor, self.saved)

    def save(self, tensor: Any) -> None:
        """What a policy or a kept call keeps, as it would be without recompute."""
        self.keep(tensor)
        self.see(tensor)

    def see(self, tensor: Any) -> None:
        """What a replay recomputes."""
        self.row.plain_bytes += self._new(tensor, self.plain)

    def _new(self, tensor: Any, seen: set[int]) -> int:
        """The tensor's bytes, if they are not among those."""
        if not (tensor._is_initialized() and tensor.is_dense()):
            return 0
        address = tensor.data_ptr()
        if address in seen or address in self.parameters:
            return 0
        seen.add(address)
        return nbytes(tensor)


_REPORT: ContextVar[Report | None] = ContextVar("report", default=None)


@contextlib.contextmanager
def report() -> Iterator[Report]:
    """Measure the regions that are opened in this block, in both engines.

    Times are those of the host: on an accelerator synchronize before you read
    anything into them.

    Yields:
        A [`Report`][paramproxy.Report], which is complete once the backward of
        those regions has run. A region inside another one has a row of its own,
        for what it does while the outer one is replayed.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([256, 4])
        >>> x.stop_gradient = False
        >>> def block(x):
        ...     return paddle.tanh(paddle.exp(x))
        >>> with paramproxy.report() as r:
        ...     paramproxy.recompute(block, x, use_reentrant=False).sum().backward()
        >>> [(row.calls, row.replays, row.saved_bytes, row.plain_bytes) for row in r.rows]
        [(1, 1, 4096, 8192)]
        >>> "block" in str(r)
        True
    """
    made = Report()
    token = _REPORT.set(made)
    try:
        yield made
    finally:
        _REPORT.reset(token)


def meter(function: Any) -> Meter | None:
    """A meter for a region of this function that opens now, or None where nobody asks."""
    current = _REPORT.get()
    return None if current is None else Meter(current.row(function_name(function)))
