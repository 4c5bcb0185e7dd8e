"""The other names that clients import from Paddle's recompute module, on our parts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from paramproxy._ambient import CustomState, RandomState
from paramproxy._caller import warn
from paramproxy._compat import Tensor
from paramproxy._options import Options
from paramproxy._recompute import recompute_call
from paramproxy._streams import Snapshot
from paramproxy._tree import detach, flatten
from paramproxy._view import unwrap


__all__ = [
    "check_recompute_necessary",
    "detach_variable",
    "recompute_as_paddle",
    "switch_rng_state_tracker",
]

_PADDLES = ("use_reentrant", "preserve_rng_state", "offload_indices")


def recompute_as_paddle(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`recompute` with the options that Paddle's has.

    In Paddle's place the names of our other options are the function's own.
    """
    options = {name: kwargs.pop(name) for name in _PADDLES if name in kwargs}
    return recompute_call(function, args, kwargs, Options(**options))


def detach_variable(inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments for a function that is to be run again, cut off from the graph.

    [`detach`][paramproxy.detach] under the name that checkpointing code of
    Paddle's clients imports. Paddle's makes a copy of every parameter.

    Args:
        inputs: Tensors of any shape and dtype, and anything else; containers too.

    Returns:
        As many: a leaf for a parameter, a detached tensor with its flag for any
        other one, the rest as it is. What backward leaves on them,
        `tensor.grad` or [`grads`][paramproxy.grads] reads.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> leaf, mask = paramproxy.detach_variable((w, None))
        >>> leaf is w, paramproxy.unwrap(leaf) is w, mask
        (False, True, None)
    """
    detached: tuple[Any, ...] = detach(tuple(inputs))
    return detached


def check_recompute_necessary(inputs: Iterable[Any]) -> None:
    """Warn if no tensor among the arguments of a function needs a gradient.

    A reentrant recompute like Paddle's does nothing then, and the function's own
    parameters get no gradient. [`recompute`][paramproxy.recompute] itself has no
    need to warn: its hook engine takes such a call.

    Args:
        inputs: The arguments; tensors in containers count.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> paramproxy.check_recompute_necessary([x, "mask"])
    """
    leaves = map(unwrap, flatten(list(inputs))[0])
    if all(leaf.stop_gradient for leaf in leaves if isinstance(leaf, Tensor)):
        warn(
            "None of the inputs of this recomputed block needs a gradient, so a reentrant "
            "recompute does nothing for it."
        )


@contextlib.contextmanager
def switch_rng_state_tracker(
    rng_state: Any,
    tracker: Any,
    numpy_state: Any = None,
    random_state: Any = None,
    custom_state: Any = None,
    custom_get_state_func: Callable[[], Any] | None = None,
    custom_set_state_func: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """Set every random stream for a block of code; afterwards all are as they were.

    Args:
        rng_state: What `paddle.get_rng_state()` gave.
        tracker: What `get_rng_state_tracker().get_states_tracker()` gave.
        numpy_state: What `numpy.random.get_state()` gave. None leaves numpy's
            stream alone.
        random_state: What `random.getstate()` gave. None leaves Python's alone.
        custom_state: A state of your own.
        custom_get_state_func: Gives your state as it is now.
        custom_set_state_func: Sets it.

    Raises:
        TypeError: A `custom_state` without the two functions.

    Examples:
        >>> import paddle, paramproxy
        >>> from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
        >>> state = paddle.get_rng_state(), get_rng_state_tracker().get_states_tracker()
        >>> first = paddle.rand([2])
        >>> with paramproxy.switch_rng_state_tracker(*state):
        ...     again = paddle.rand([2])
        >>> bool((first == again).all())
        True
    """
    custom = None
    if custom_state is not None:
        if custom_get_state_func is None or custom_set_state_func is None:
            msg = (
                "Cannot set custom_state: expected custom_get_state_func and "
                "custom_set_state_func beside it."
            )
            raise TypeError(msg)
        custom = CustomState(custom_state, custom_get_state_func, custom_set_state_func)
    numpy = None if numpy_state is None else Snapshot(numpy_state, np.random.set_state)
    python = None if random_state is None else Snapshot(random_state, random.setstate)
    with RandomState(rng_state, tracker, custom, numpy, python).restored():
        yield
