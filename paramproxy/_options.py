"""What a caller may ask of a region besides its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from paramproxy._caller import warn
from paramproxy._policy import Decision, SavedTensor


__all__ = ["Options"]


def _as_tuple(indices: Iterable[int | str] | None) -> tuple[int | str, ...]:
    return () if indices is None else tuple(indices)


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
        for name in given:
            if name not in cls.names():
                msg = f"Cannot take the option {name!r}: expected one of {', '.join(cls.names())}."
                raise TypeError(msg)
        return cls(**given)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in attrs.fields(cls))

    @classmethod
    def from_ctx(cls, ctx: Any, own: tuple[str, ...], entry: str) -> Options:
        """The options in the `ctx` of one of Paddle's entry points.

        Args:
            ctx: What its caller gave.
            own: The keys that are the entry point's own.
            entry: Its name.

        Raises:
            TypeError: `ctx` is not a mapping.
        """
        if not isinstance(ctx, Mapping):
            msg = f"Cannot call {entry}: expected a dict as ctx, got {type(ctx).__name__}."
            raise TypeError(msg)
        for key in ctx:
            if key not in (*own, *cls.names()):
                warn(
                    f"{entry} does nothing with {key!r} in ctx: expected one of "
                    f"{', '.join((*own, *cls.names()))}."
                )
        return cls(**{key: ctx[key] for key in cls.names() if key in ctx})
