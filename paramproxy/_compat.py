"""Every difference between Paddle versions, and every private name of Paddle's, in one place.

Nowhere else in the package is a version looked at, so a new Paddle release is
a change to this room only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar


try:
    import paddle
except ModuleNotFoundError as exc:
    if exc.name != "paddle":
        raise
    msg = (
        "Cannot import paramproxy: PaddlePaddle is not installed. "
        "Install it with `pip install 'paramproxy[cpu]'`, or with "
        "`pip install 'paramproxy[gpu]'` for a GPU build."
    )
    raise ImportError(msg) from exc

from paddle.base import core
from paddle.base.framework import EagerParamBase, _dygraph_tracer
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import (
    get_rng_state_tracker,
)
from paddle.jit.dy2static.program_translator import StaticFunction


__all__ = [
    "BATCH_NORMS",
    "LAYERS_MAY_SAVE_NONE",
    "LISTS_ARE_CHECKED",
    "PACKED_VALUES_LEAK",
    "SAVE_FOR_BACKWARD",
    "TENSORS_HAVE_ATTRIBUTES",
    "TENSORS_REDUCE",
    "EagerParamBase",
    "StaticFunction",
    "Tensor",
    "amp_module",
    "backward",
    "core",
    "custom_state_manager",
    "get_rng_state_tracker",
    "init_tensor",
    "is_made_by_no_op",
    "keep_out_of_to_static",
    "mark_recomputed",
    "paddle_recompute",
    "paddle_recompute_hybrid",
    "paddle_version",
    "register_saved_tensors_hooks",
    "reset_saved_tensors_hooks",
    "saved_tensors_hooks",
    "set_eval_frame",
    "tracer",
    "untraced",
    "with_own_counter",
    "with_own_header",
    "with_own_storage",
]

P = ParamSpec("P")
R = TypeVar("R")

Tensor: Any = core.eager.Tensor
"""The C type that every kernel checks for."""

init_tensor: Any = getattr(paddle, "original_init", Tensor.__init__)
"""C's constructor. 3.3 wraps it in Python for new call forms, at 2 us and 56 bytes a call."""


amp_module: Any = sys.modules["paddle.amp.auto_cast"]
"""Where Paddle keeps the state of `paddle.amp.auto_cast`."""

tracer = _dygraph_tracer
"""The object that holds grad mode and the AMP fields C++ reads."""


def paddle_version() -> tuple[int, ...]:
    """The installed Paddle as numbers; a nightly build, `0.0.0`, counts as newest."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", paddle.__version__)[:3])
    return numbers if any(numbers) else (999,)


# Whether the elements of a *list* argument (`paddle.stack([a, b])`) are checked
# before they are cast. Paddle 2.6 casts whatever is there, even `object()`, and
# crashes the interpreter. See `GetTensorListFromArgs` in Paddle's eager_utils.cc.
LISTS_ARE_CHECKED = paddle_version() >= (3,)

# From 3.0 on a plain Tensor has a `__dict__`, so people hang tags on it.
TENSORS_HAVE_ATTRIBUTES = "__dict__" in vars(Tensor)

# From 3.3 on Paddle can pickle a Tensor by itself.
TENSORS_REDUCE = "__reduce_ex__" in vars(Tensor)


BATCH_NORMS: Any = (paddle.nn.layer.norm._BatchNormBase, paddle.nn.BatchNorm)
"""The layers whose kernel writes running statistics."""

# Paddle 2.6 never frees the object that a pack hook returned for an operator, and
# takes the storage out of the tensor that the unpack hook gives it. From 3.0 on
# the object dies with its graph node, and the storage is shared. See
# `TensorWrapper::recover` in Paddle's tensor_wrapper.h.
PACKED_VALUES_LEAK = paddle_version() < (3,)

register_saved_tensors_hooks: Any = core.eager.register_saved_tensors_hooks
reset_saved_tensors_hooks: Any = core.eager.reset_saved_tensors_hooks


def saved_tensors_hooks() -> Any:
    """Paddle's own class. ERNIE puts another one in its place in `paddle.autograd`."""
    return sys.modules["paddle.autograd.saved_tensors_hooks"].saved_tensors_hooks


# Around any saved-tensor hooks Paddle 2.6 refuses the None among what a PyLayer saves.
LAYERS_MAY_SAVE_NONE = paddle_version() >= (3,)

SAVE_FOR_BACKWARD: Any = paddle.autograd.PyLayerContext.save_for_backward.__code__
"""The code from which the pack hook is called for what a PyLayer saves."""


@functools.cache
def paddle_recompute() -> Any:
    """Paddle's own recompute module (`import ... as m` would give the function)."""
    return _module("paddle.distributed.fleet.recompute.recompute")


@functools.cache
def paddle_recompute_hybrid() -> Any:
    """The module beside it."""
    return _module("paddle.distributed.fleet.recompute.recompute_hybrid")


def _module(name: str) -> Any:
    importlib.import_module(name)
    return sys.modules[name]


def mark_recomputed(function: Any) -> Any:
    """`function`, marked for recompute in the static graph that is being built.

    What Paddle 3's own `recompute` does outside dynamic mode; 2.6's raises there.
    """
    from paddle.distributed.auto_parallel.interface import recompute

    return recompute(function)


# The C function takes as many arguments as Paddle's own gives it, and crashes with fewer.
_BACKWARD = tuple(inspect.signature(paddle.autograd.backward).parameters)
_EXTRA: dict[tuple[str, ...], tuple[None, ...]] = {
    ("tensors", "grad_tensors", "retain_graph"): (),
    ("tensors", "grad_tensors", "retain_graph", "dump_backward_graph_path"): (None,),
}
_EXTRA_ARGUMENTS = _EXTRA.get(_BACKWARD)


def backward(tensors: list[Any], gradients: list[Any], retain_graph: bool = False) -> None:
    """`paddle.autograd.backward`, without its looking at the arguments.

    Whoever looks for the frame of a backward knows this one as well.
    """
    if _EXTRA_ARGUMENTS is None:
        paddle.autograd.backward(tensors, gradients, retain_graph)
    else:
        run: Any = core.eager.run_backward
        run(tensors, gradients, retain_graph, *_EXTRA_ARGUMENTS)


def is_made_by_no_op(tensor: Any) -> bool:
    """Whether no operator made this tensor: it was detached, or built from data.

    Paddle names such a tensor at once, and an op's output only when asked. A
    tensor written in place since may hold an op's result all the same.
    """
    name = tensor.name
    return name.startswith(("eager_in_tmp", "generated_tensor")) and not tensor._inplace_version()


def with_own_header(tensor: Any) -> Any:
    """The same storage and version counter under a header of its own, by a recorded op.

    `detach` shares the header too, and a PyLayer takes an output on the header
    of an input for an in-place change of that input. `tensor.reshape` returns
    the tensor itself where the shape is the same; the op does not. A sparse
    tensor has no such op, and comes back as it is.
    """
    if not tensor.is_dense():
        return tensor
    return paddle._C_ops.reshape(tensor, tensor.shape)


def with_own_counter(tensor: Any, version: int = 0) -> Any:
    """The same storage under a header and an in-place version counter of its own.

    A PyLayer that returns its input counts as a write into it. For a tensor
    that is strided or not dense the counter is shared.

    Args:
        tensor: The tensor.
        version: What the counter starts with.
    """
    if not (tensor.is_dense() and tensor._is_initialized() and tensor.is_contiguous()):
        return with_own_header(tensor)
    other = with_own_storage(tensor)
    for _ in range(version):
        other._bump_inplace_version()
    return other


def with_own_storage(tensor: Any) -> Any:
    """A contiguous tensor of that shape and dtype, on the same buffer."""
    other = Tensor.__new__(Tensor)
    init_tensor(other, tensor.dtype, list(tensor.shape), "", _DENSE, False)
    tensor._share_buffer_to(other)
    other.stop_gradient = tensor.stop_gradient
    return other


_KINDS = core.VarDesc.VarType
_DENSE = _KINDS.DENSE_TENSOR if hasattr(_KINDS, "DENSE_TENSOR") else _KINDS.LOD_TENSOR


class _CustomStatesManager:
    """The same where Paddle has none (2.6 and 3.0)."""

    def __init__(self) -> None:
        self.custom_get_state_func: Any = None
        self.custom_set_state_func: Any = None

    def set_custom_get_state_func(self, custom_get_state_func: Any) -> None:
        self.custom_get_state_func = custom_get_state_func

    def set_custom_set_state_func(self, custom_set_state_func: Any) -> None:
        self.custom_set_state_func = custom_set_state_func


custom_state_manager: Any = getattr(
    paddle_recompute(), "custom_state_manager", _CustomStatesManager()
)
"""Paddle's registry for a random state of the user's own."""


# Replaces the callback that sees every new Python frame, with which `to_static`
# traces bytecode, and returns the old one. Its tracer, which cannot look into
# it, ends its graph where it is called.
set_eval_frame: Any = core.set_eval_frame


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, during which no frame, of ours or of what it calls, is traced."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        old = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(old)

    return wrapper


def keep_out_of_to_static(module: Any) -> None:
    """Have both engines of `to_static` call the module's functions, not transcribe them.

    Paddle's own modules are left alone the same way. Transcribed, a frame of
    ours would be guarded on the text of `repr(function)`.
    """
    paddle.jit.ignore_module([module])
    core.eval_frame_skip_file_prefix((f"{Path(module.__file__).parent}{os.sep}",))
