"""A choice is priced as by `decide`, also if another policy made it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.decision import Direct, Pull, Split
from router.errors import RouterError
from router.policy.decide import decide
from router.policy.price import Choice, choice_of, price
from router.policy.spec import Policy
from router.types import Link, Links, Scene
from tests.kit.scenes import POLICIES, holding, pod, policy, ready, scene, scenes

PRICED = [
    *(POLICIES[name] for name in ("cost_aware", "cost_aware_pd", "least_load")),
    policy("queue", "prefill", "transfer", "tier_read", "handoff", "kv_wait", "decode_interference"),
]


@given(scenes(), st.sampled_from(PRICED))
def test_every_candidate_has_its_own_price(seen: Scene, by: Policy) -> None:
    """To the bit, for direct plans, pulls and splits."""
    try:
        decision = decide(seen, by)
    except RouterError:
        return
    for candidate in decision.candidates:
        assert price(seen, choice_of(candidate.plan), by) == candidate.cost


def test_what_is_not_there_has_no_price() -> None:
    """A pod that has gone, on either side; a pair without a link."""
    seen = scene(*ready(pod("a"), pod("b")))
    by = POLICIES["cost_aware_pd"]
    assert [price(seen, choice, by) for choice in (Choice("c"), Choice("a", "c"), Choice("a", "b"))] == [None] * 3


def test_a_pull_without_a_term_for_it_is_priced_without_the_pull() -> None:
    """It would be cached for nothing otherwise."""
    fast = {"pulls": "p2p", "kv_bytes_per_token": 1000}
    seen = holding(scene(*ready(pod("a", **fast), pod("b", **fast)), links=Links(elsewhere=Link(0.1, 1e6))), "b", 60)
    pulled, own = Choice("a", pull_from="b"), Choice("a")
    without, with_pulls = policy("queue", "prefill"), policy("queue", "prefill", "transfer")
    assert price(seen, pulled, without) == price(seen, own, without)
    cheap, dear = price(seen, pulled, with_pulls), price(seen, own, with_pulls)
    assert cheap and dear and cheap.total_ms < dear.total_ms


def test_a_choice_reads_as_what_flows_where() -> None:
    """Prefill to decode; pod from holder."""
    a, b = pod("a"), pod("b")
    plans = (Direct(a), Direct(a, Pull("b", 16)), Split(b, a))
    assert [str(choice_of(plan)) for plan in plans] == ["a", "a < b", "b > a"]
