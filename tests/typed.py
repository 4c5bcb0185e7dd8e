"""What a type checker has to make of the public names: `make types` runs it on this file."""

from __future__ import annotations

from collections.abc import Callable

import paramproxy
from paramproxy import Decision, SavedTensor


def function(x: int, *, y: str) -> float:
    return float(x) + len(y)


bare = paramproxy.checkpoint(function)
options = paramproxy.checkpoint(use_reentrant=False, debug=True)(function)


class Block:
    @paramproxy.checkpoint
    def forward(self, x: int) -> str:
        return str(x)


def signatures_survive() -> None:
    one: float = bare(1, y="a")
    two: float = options(2, y="b")
    three: str = Block().forward(3)
    bare("1", y="a")  # type: ignore[arg-type]
    options(2)  # type: ignore[call-arg]
    Block().forward("3")  # type: ignore[arg-type]
    paramproxy.checkpoint(use_reentrent=False)  # type: ignore[call-overload]
    print(one, two, three)


def results_survive() -> None:
    one: float = paramproxy.recompute(function, 1, y="a")
    two: float = paramproxy.keep(function, 1, y="a")
    three: str = paramproxy.keep(function, 1, y="a")  # type: ignore[assignment]
    print(one, two, three)


def policies_compose() -> Callable[[SavedTensor], Decision]:
    def mine(saved: SavedTensor) -> Decision:
        return Decision.SAVE if saved.nbytes < 8 else Decision.RECOMPUTE

    return paramproxy.save_ops("exp") | mine | paramproxy.offload_over(8)


def reports_have_rows() -> float:
    with paramproxy.report() as r:
        pass
    return sum(row.first_seconds for row in r.rows)


def the_entry_points_of_paddle() -> None:
    one: float = paramproxy.recompute_hybrid(
        {"mp_group": None, "offload": True}, function, 1, y="a"
    )
    paramproxy.recompute_sequential({"segments": 2}, [function, str], 1, use_reentrant=False)
    paramproxy.recompute_sequential(2, [function])  # type: ignore[arg-type]
    leaves: tuple[object, ...] = paramproxy.detach_variable([1, None])
    with paramproxy.switch_rng_state_tracker(None, {}):
        paramproxy.check_recompute_necessary(leaves)
    print(one)


def patches_are_contexts() -> bool:
    with paramproxy.patch() as patched:
        first: bool = patched.is_first
    paramproxy.unpatch()
    return first
