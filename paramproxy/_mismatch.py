"""What a replay saves, compared with what its first run saved, and the words for it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import attrs

from paramproxy._saved import Metadata, user_lines
from paramproxy.exceptions import MutationError, ReplayMismatchError


__all__ = ["CAUSES", "Comparison"]

CAUSES = (
    "A region has to do the same each time. Usual causes: it reads a global, an attribute or a "
    "clock that has changed; it draws random numbers of a generator that is not restored; it "
    "writes what it reads; it branches on a value that is not reproducible."
)


@attrs.define(eq=False)
class Comparison:
    """Compares the tensors that a replay saves, one after the other.

    Attributes:
        name: How an error names the region.
        metadata: What the first run saved.
        lines: The user's lines that saved each, in debug mode.
        is_open: Whether the first run is still going on, and will save more.
        replaced: The storages that the replay has put in the place of others, to be
            written as it likes.
        error: The first difference.
    """

    name: str
    metadata: list[Metadata]
    lines: list[list[str]] | None
    is_open: bool
    replaced: Set[int]
    error: Exception | None = None

    def compare(self, index: int, tensor: Any) -> bool:
        """Whether the replay saves at this place what the first run did."""
        if index >= len(self.metadata):
            if not self.is_open:
                self._differ(index, "there was none", str(Metadata.of(tensor)))
            return False
        before, now = self.metadata[index], Metadata.of(tensor)
        if before != now:
            self._differ(index, f"it was {before.told(now)}", now.told(before))
        elif now.was_written(before) and now.pointer not in self.replaced:
            self._refuse_write(index, before, now)
        return self.error is None

    def finish(self, count: int) -> None:
        """The replay ran to its end, and saved so many."""
        if self.error is None and count < len(self.metadata):
            msg = (
                f"Cannot replay {self.name}: it saved {count} tensors for backward, and "
                f"{len(self.metadata)} in its first run. {CAUSES}"
            )
            self.error = ReplayMismatchError(msg)

    def _refuse_write(self, index: int, before: Metadata, now: Metadata) -> None:
        msg = (
            f"Cannot replay {self.name}: saved tensor {index} ({now}), which it reads from "
            f"outside, was changed in place after the first run (version {before.version}, now "
            f"{now.version}), so its gradients would be wrong. Change it after backward, or read "
            "a clone of it."
        )
        self.error = MutationError(msg)

    def _differ(self, index: int, before: str, now: str) -> None:
        msg = (
            f"Cannot replay {self.name}: saved tensor {index} (of {len(self.metadata)}) is {now}, "
            f"and in the first run {before}. {CAUSES}"
        )
        if self.lines is None:
            msg += " debug=True shows the lines that save it."
        else:
            first = self.lines[index] if index < len(self.lines) else ["(nothing)"]
            msg = "\n".join([msg, "In the first run:", *first, "In the replay:", *user_lines()])
        self.error = ReplayMismatchError(msg)
