"""How random programs are drawn."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from programs import (
    FORMS,
    ONCE_ONLY,
    OPERATIONS,
    POLICIES,
    PYLAYERS,
    RESULTS,
    WEIGHTS,
    Call,
    Operation,
    Program,
)


INDEX = st.integers(0, 7)


@attrs.frozen
class Scope:
    """What programs may have in them.

    Attributes:
        engines: The engines of regions.
        results: What a function may return.
        backwards: The most backwards through one graph.
        lasts: How the last of them may be run.
    """

    engines: tuple[str, ...]
    results: tuple[str, ...] = tuple(RESULTS)
    backwards: int = 1
    lasts: tuple[str, ...] = ("backward",)

    def programs(self):
        """Programs with at least one region."""
        region = self._calls(2, ["region"])
        steps = st.tuples(
            st.lists(self._operations(), max_size=2), region, self._steps(2, ["region"])
        ).map(lambda parts: [*parts[0], parts[1], *parts[2]])
        return st.builds(
            Program,
            steps=steps,
            trained=st.tuples(*[st.sampled_from([True, True, True, False])] * (2 + WEIGHTS)),
            rounds=st.integers(1, 2),
            backwards=st.integers(1, self.backwards),
            last=st.sampled_from(self.lasts),
            seed=st.integers(1, 9),
        )

    def _operations(self):
        names = set(OPERATIONS)
        if self.backwards > 1 or "penalty" in self.lasts:
            names -= set(PYLAYERS)
        if "penalty" in self.lasts:
            names -= set(ONCE_ONLY)
        return st.builds(Operation, name=st.sampled_from(sorted(names)), a=INDEX, b=INDEX, w=INDEX)

    def _calls(self, depth, kinds):
        has_policies = "hooks" in self.engines
        return st.builds(
            Call,
            kind=st.sampled_from(kinds),
            engine=st.sampled_from(self.engines),
            policy=st.sampled_from(list(POLICIES)) if has_policies else st.just("none"),
            form=st.sampled_from(sorted(FORMS)),
            result=st.sampled_from(self.results),
            amp=st.sampled_from(["O0", "O0", "O0", "O1", "O2"]),
            a=INDEX,
            b=INDEX,
            weights=st.integers(1, WEIGHTS),
            body=self._steps(depth - 1, ["region", "kept"]),
        )

    def _steps(self, depth, kinds):
        one = self._operations()
        if depth:
            one = st.one_of(one, self._operations(), self._calls(depth, kinds))
        return st.lists(one, min_size=1, max_size=5)
