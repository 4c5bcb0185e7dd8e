"""The reentrant engine: a PyLayer whose backward runs a region again.

1. The function runs outside the PyLayer, without recording, so that its errors
   and its objects are its own. `apply` only ties its outputs into the graph.
2. A PyLayer sees tensors only among its flat arguments, so the differentiable
   operands go in flat and new outputs come out flat. Structure stays outside.
3. Whatever existed before the region (a mask that is returned, a parameter)
   does not pass through the PyLayer: it comes back as itself.
4. An output that nobody used gets None for a gradient, and its branch is not
   run backward.
"""

from __future__ import annotations

from typing import Any

import attrs
import paddle
from paddle.autograd import PyLayer

from paramproxy._ambient import streams_kept
from paramproxy._aside import Aside
from paramproxy._call import Result
from paramproxy._caller import backward_frame, warn
from paramproxy._compat import EagerParamBase, is_made_by_no_op, with_own_header
from paramproxy._dispatch import fresh_stack, pushed, unpack
from paramproxy._kept_graph import FirstRun, SecondRun
from paramproxy._placement import Placement
from paramproxy._region import Region
from paramproxy._replay import Replay
from paramproxy._tree import copy_attributes, is_differentiable, unflatten
from paramproxy.exceptions import RetainGraphWarning, UnsupportedError


__all__ = ["run"]


def run(region: Region, tensors: list[Any], placement: Placement) -> Any:
    """The region's result, in the graph, with the replay waiting in backward."""
    region.refuse_hidden()
    kept = region.keep(tensors, placement)
    inputs = []
    constants = set()
    for tensor in tensors:
        if tensor.stop_gradient:
            constants.add(id(tensor))
        else:
            inputs.append(tensor)
    with pushed(FirstRun(region, constants)):
        value = region.first_run(tensors, record=region.captured.has_static, note_uses=True)
    inputs += region.find_own_parameters()
    result = Result.of(value)
    region.record(result, tensors)
    fresh = _fresh(region, result, constants)
    if fresh and all(is_made_by_no_op(result.leaves[places[0]]) for places in fresh):
        # A replay now tells. Its graph is dropped at once.
        second = SecondRun(region)
        with streams_kept():
            again = _replay(region, kept, second).result.leaves
        second.loans.end()
        fresh = [places for places in fresh if not again[places[0]].stop_gradient]
    if not fresh:
        return value
    positions = [places[0] for places in fresh]
    outputs = _outputs(region, result, positions)
    with Aside.waited_for(inputs):
        outputs = _Reentrant.apply(_FirstRun(region, kept, outputs, positions), *inputs)
    for output, places in zip(outputs, fresh):
        # Paddle drops what a hook on a PyLayer's own output returns.
        hookable = with_own_header(output)
        copy_attributes(output, hookable)
        for position in places:
            result.leaves[position] = hookable
    return unflatten(result.spec, result.leaves)


@attrs.frozen(eq=False)
class _FirstRun:
    """What `forward` needs, out of sight of the PyLayer.

    It would take a tuple of tensors among its arguments for one more input.

    Attributes:
        region: The region.
        kept: What to save of its operands.
        outputs: Its new outputs.
        positions: Where each of them stands in the flat result.
    """

    region: Region
    kept: list[Any]
    outputs: tuple[Any, ...]
    positions: list[int]


class _Reentrant(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, first: _FirstRun, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.region = first.region
        ctx.positions = first.positions
        # Given to autograd, so that a caller's saved-tensor hooks see them.
        # They come back with stop_gradient=True; the operands know better.
        ctx.save_for_backward(*first.kept)
        return first.outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> tuple[Any, ...]:
        region, ctx.region = ctx.region, None
        kept = list(ctx.saved_tensor())
        # Where a backward raises, Paddle never frees its context.
        ctx.container = ()
        _look_at_caller(region)
        used = [pair for pair in zip(ctx.positions, output_grads) if pair[1] is not None]
        gradients = _run_again(region, kept, used) if used else region.no_gradients(kept)
        return tuple(gradients)


def _run_again(region: Region, kept: list[Any], used: list[tuple[int, Any]]) -> list[Any]:
    """The gradients of the operands, from those of the outputs, by their positions."""
    second = SecondRun(region)
    try:
        replay = _replay(region, kept, second)
        outputs = [
            (replay.result.leaves[position], grad)
            for position, grad in used
            if not replay.result.leaves[position].stop_gradient
        ]
        if outputs:
            _run_backward(region, replay, outputs)
        return replay.gradients()
    finally:
        second.loans.end()


def _replay(region: Region, kept: list[Any], second: SecondRun) -> Replay:
    hook = None if region.meter is None else unpack
    with fresh_stack(), pushed(second, hook):
        return region.replay(kept)


def _run_backward(region: Region, replay: Replay, outputs: list[tuple[Any, Any]]) -> None:
    try:
        replay.run_backward(outputs)
    except SystemError as exc:
        if "backward twice" not in str(exc):
            raise
        msg = (
            f"Cannot replay {region.name}: it uses an activation of the graph around it that was "
            "found neither among its arguments nor in its closure, so backward ran through that "
            f"graph twice. Pass it as an argument.\n{exc}"
        )
        raise UnsupportedError(msg) from exc


def _fresh(region: Region, result: Result, constants: set[int]) -> list[list[int]]:
    """The positions of each tensor of the result that the region may have to answer for.

    Under no_grad whatever the function computed has stop_gradient=True. What
    has not is older than the region, or was made a leaf on purpose, and comes
    back as itself. Two exceptions, which only the replay can tell: an
    intermediate that the caller passed in, since an identity PyLayer returns
    its input too, and one that the function recorded for itself.
    """
    older = constants
    if region.fixed:
        older = older.union(id(fixed.tensor) for _, fixed, _ in region.fixed)
    places: dict[int, list[int]] = {}
    for position, _, _ in region.metadata:
        leaf = result.leaves[position]
        if isinstance(leaf, EagerParamBase) or id(leaf) in older:
            continue
        if leaf.stop_gradient:
            may_need_one = not region.captured.has_static and is_differentiable(leaf)
        else:
            may_need_one = not leaf.is_leaf
        if may_need_one:
            places.setdefault(id(leaf), []).append(position)
    return list(places.values())


def _outputs(region: Region, result: Result, positions: list[int]) -> tuple[Any, ...]:
    """Aliases of the tensors at these positions, each with a header that no input has."""
    pointers = {operand.pointer for operand in region.operands if not operand.stop_gradient}
    outputs = []
    for position in positions:
        tensor = result.leaves[position]
        output = tensor.detach()
        if not output._is_initialized() or output.data_ptr() in pointers:
            output = with_own_header(output)
        copy_attributes(tensor, output)
        outputs.append(output)
    return tuple(outputs)


def _look_at_caller(region: Region) -> None:
    """Refuse, or warn of, what this engine cannot do, as the caller asked for it."""
    if paddle.is_grad_enabled():  # which in a PyLayer's backward means create_graph
        _refuse(region, "with create_graph=True: its graph is gone when it returns")
    frame = backward_frame()
    if frame is None:
        return
    if frame.f_code.co_name == "grad":
        _refuse(
            region,
            "under paddle.grad: parameters that no search finds would keep gradients in .grad",
        )
    if frame.f_locals.get("retain_graph"):
        msg = (
            f"retain_graph=True around {region.name}, recomputed in reentrant mode: a second "
            "backward through it crashes Paddle. Call it with use_reentrant=False there."
        )
        warn(msg, RetainGraphWarning)


def _refuse(region: Region, why: str) -> None:
    msg = (
        f"Cannot differentiate {region.name} in reentrant mode {why}. "
        "Call it with use_reentrant=False there."
    )
    raise UnsupportedError(msg)
