"""The price of pods that have just begun to serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.costs.effects import WarmUpTerm
from router.policy.decide import decide
from router.policy.term import Placement
from router.types import InFlight
from tests.kit.scenes import pod, policy, ready, scene
from tests.policy.costs.placements import at

NOW_S = 100.0


BUSY = InFlight(requests=2, prefill_requests=2, prefill_tokens=1000, prefill_ms=40.0)


def begun(age_s: float | None) -> Placement:
    """A placement on a pod that is ready since then and has work."""
    since_s = None if age_s is None else NOW_S - age_s
    return at(pod=pod("a", ready_since_s=since_s), now_s=NOW_S, inflight=BUSY)


@pytest.mark.parametrize(
    ("age_s", "share"), [(0.0, 1.0), (5.0, 0.5), (10.0, 0.0), (1e6, 0.0), (None, 0.0), (-1.0, 1.0)]
)
def test_a_queue_counts_double_at_first_and_ever_less(age_s: float | None, share: float) -> None:
    """A clock that goes back changes nothing."""
    assert WarmUpTerm(weight=1.0, slow_start_s=10.0).cost_ms(begun(age_s)) == pytest.approx(share * 40.0)


@given(ages=st.tuples(st.floats(0, 20), st.floats(0, 20)))
def test_the_older_is_never_dearer(ages: tuple[float, float]) -> None:
    """It only ever fades."""
    young, old = sorted(ages)
    assert WarmUpTerm().cost_ms(begun(young)) >= WarmUpTerm().cost_ms(begun(old))


@pytest.mark.parametrize(("work", "expected"), [({}, {"old", "new"}), ({"new": BUSY, "old": BUSY}, {"old"})])
def test_a_newcomer_is_neither_shunned_nor_flooded(work: dict[str, InFlight], expected: set[str]) -> None:
    """Idle it costs what any other costs; with as much to do as another, more."""
    seen = scene(*ready(pod("new", ready_since_s=NOW_S), pod("old", ready_since_s=0.0)), now_s=NOW_S, inflight=work)
    found = decide(seen, policy("queue", costs={"queue": {}, "prefill": {}, "warm_up": {}})).candidates
    least_ms = min(one.cost.total_ms for one in found)
    assert {one.pod.id for one in found if one.cost.total_ms == least_ms} == expected
