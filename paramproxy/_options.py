"""What a caller may ask of a region besides its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from paramproxy._policy import Decision, SavedTensor


__all__ = ["Options"]


def _as_tuple(indices: Iterable[int | str]) -> tuple[int | str, ...]:
    return tuple(indices)


@attrs.frozen
class Options:
    """The keywords of `recompute`, which says what each is for."""

    use_reentrant: bool = True
    preserve_rng_state: bool = True
    preserve_external_rng_state: bool = True
    preserve_buffers: bool = True
    offload_indices: tuple[int | str, ...] = attrs.field(default=(), converter=_as_tuple)
    policy: Callable[[SavedTensor], Decision] | None = None
    debug: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """The options of these names.

        Raises:
            TypeError: There is no option of that name.
        """
        names = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in names:
                msg = f"Cannot take the option {name!r}: expected one of {', '.join(names)}."
                raise TypeError(msg)
        return cls(**given)
