"""paramproxy in the place of Paddle's own recompute, for code that calls Paddle's.

Model libraries import Paddle's functions by name, keep them in closures, partials
and defaults, or look them up in one of three modules. Whatever they hold is the
same function object. So the objects stay, and what is exchanged is their code: it
calls ours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import attrs

from paramproxy._caller import log
from paramproxy._compat import paddle_recompute, paddle_recompute_hybrid
from paramproxy.exceptions import UnsupportedError


__all__ = ["Patch", "is_patched", "patch", "unpatch"]


# Run in Paddle's modules, with their globals: they import all they need.


def _recompute(function: Any, *args: Any, **kwargs: Any) -> Any:
    from paramproxy._drop_in import recompute_as_paddle

    return recompute_as_paddle(function, *args, **kwargs)


def _recompute_sequential(ctx: Any, functions: Any, *args: Any, **kwargs: Any) -> Any:
    from paramproxy._sequential import recompute_sequential

    return recompute_sequential(ctx, functions, *args, **kwargs)


def _recompute_hybrid(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    from paramproxy._hybrid import recompute_hybrid

    return recompute_hybrid(ctx, function, *args, **kwargs)


def _varbase_help(param: Any) -> Any:
    from paramproxy._tree import detach

    return detach(param)


def _detach_variable(inputs: Any) -> Any:
    from paramproxy._drop_in import detach_variable

    return detach_variable(inputs)


@attrs.frozen(eq=False)
class _Exchange:
    """A function of Paddle's whose code is exchanged.

    Attributes:
        function: The function.
        theirs: Its code.
        ours: The code that calls ours.
    """

    function: Any
    theirs: types.CodeType
    ours: types.CodeType

    @classmethod
    def of(cls, module: Any, name: str, substitute: Any) -> _Exchange:
        function = getattr(module, name)
        if not isinstance(function, types.FunctionType) or function.__module__ != module.__name__:
            msg = (
                f"Cannot patch {module.__name__}.{name}: something else is in its place already, "
                f"{function!r}. Call paramproxy.patch() before that is put there."
            )
            raise UnsupportedError(msg)
        code = substitute.__code__.replace(co_name=name)
        return cls(function, function.__code__, code)


_lock = threading.RLock()
_exchanged: list[_Exchange] = []


@attrs.frozen(eq=False)
class Patch:
    """What [`patch`][paramproxy.patch] returns: for a `with` block, or for nothing.

    Attributes:
        is_first: Whether that call put the patch in. Leaving the block takes out
            only what its own call put in.
    """

    is_first: bool

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_first:
            unpatch()


def patch() -> Patch:
    """Have everybody who calls Paddle's recompute call paramproxy's.

    `recompute`, `recompute_sequential`, `recompute_hybrid` and the two functions
    that copy parameters for a replay, `_varbase_help` and `detach_variable`: for
    every client, whether it has imported them already or will, from
    `paddle.distributed.fleet.utils`, `paddle.distributed.fleet.recompute`,
    `paddle.incubate.distributed.fleet` or a module below; in closures, partials
    and defaults as well. To patch twice is to patch once.

    A patched `recompute` has the options of Paddle's: `use_reentrant`,
    `preserve_rng_state` and `offload_indices`. Any other keyword is the function's.

    Two other ways leave the client's code alone: `python -m paramproxy run train.py`
    and the environment variable `PARAMPROXY_PATCH=1`, which takes effect as soon as
    Paddle was imported.

    Returns:
        A context manager: `with paramproxy.patch():` takes the patch out in the
        end, if it was not in before.

    Raises:
        UnsupportedError: Somebody else has replaced one of Paddle's functions.

    Examples:
        >>> import paddle, paramproxy
        >>> from paddle.distributed.fleet.utils import recompute  # Paddle's
        >>> w = paddle.create_parameter([2], "float32")
        >>> w.tag = "mine"
        >>> tags = []
        >>> def block(w):
        ...     tags.append(getattr(w, "tag", None))
        ...     return paddle.exp(w)
        >>> with paramproxy.patch():
        ...     recompute(block, w).sum().backward()
        >>> tags
        ['mine', 'mine']
    """
    with _lock:
        if _exchanged:
            return Patch(is_first=False)
        exchanges = [_Exchange.of(*exchange) for exchange in _substitutes()]
        for exchange in exchanges:
            exchange.function.__code__ = exchange.ours
        _exchanged.extend(exchanges)
        log.debug("Paddle's recompute is paramproxy's now")
        return Patch(is_first=True)


def unpatch() -> None:
    """Put back Paddle's own code. Does nothing where there is no patch.

    Raises:
        UnsupportedError: Somebody else has replaced the code of one of the functions
            since; that one is left as it is, the others are put back.

    Examples:
        >>> import paramproxy
        >>> paramproxy.unpatch()
    """
    with _lock:
        exchanges = list(_exchanged)
        _exchanged.clear()
        if exchanges:
            log.debug("Paddle's recompute is Paddle's own again")
        changed = []
        for exchange in exchanges:
            if exchange.function.__code__ is exchange.ours:
                exchange.function.__code__ = exchange.theirs
            else:
                changed.append(exchange.function.__qualname__)
    if changed:
        msg = (
            f"Cannot unpatch {', '.join(changed)}: something else has replaced the code since "
            "paramproxy.patch(). Undo that first."
        )
        raise UnsupportedError(msg)


def is_patched() -> bool:
    """Whether paramproxy is in Paddle's place."""
    return bool(_exchanged)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Paddle's own for the time of a block."""
    was_patched = is_patched()
    unpatch()
    try:
        yield
    finally:
        if was_patched:
            patch()


def patch_where_asked() -> None:
    """Patch if the environment says so, with `PARAMPROXY_PATCH=1`.

    For a program that does not import paramproxy a line that Python reads when it
    starts does, `paramproxy.pth`, as soon as Paddle was imported.
    """
    if os.environ.get("PARAMPROXY_PATCH", "").lower() not in ("", "0", "false", "off", "no"):
        patch()


def _substitutes() -> list[tuple[Any, str, Any]]:
    recompute, hybrid = paddle_recompute(), paddle_recompute_hybrid()
    return [
        (recompute, "recompute", _recompute),
        (recompute, "recompute_sequential", _recompute_sequential),
        (hybrid, "recompute_hybrid", _recompute_hybrid),
        (recompute, "_varbase_help", _varbase_help),
        (recompute, "detach_variable", _detach_variable),
    ]
