"""Has a tenant used its share of the fleet's prefill?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_order import MAX_AHEAD_S, FairShares
from router.admission.tenant import Tenant

HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")
TRIPLE = Tenant(name="triple", weight=3.0)


def test_the_share_of_a_tenant_is_its_weight_in_those_of_the_active_ones() -> None:
    """50 ms of the fleet at a quarter of it are over after 200 ms."""
    shares = FairShares()
    shares.sent(TRIPLE, 500.0, 0.0)
    shares.sent(LIGHT, 50.0, 0.0)
    assert not shares.is_within(LIGHT, 0.199, 0.0)
    assert shares.is_within(LIGHT, 0.201, 0.0)


def test_a_tenant_is_active_until_its_prompts_are_computed_at_its_share() -> None:
    """Then the other one has the whole fleet."""
    shares = FairShares()
    shares.sent(HEAVY, 100.0, 0.0)
    shares.sent(LIGHT, 100.0, 0.101)
    assert not shares.is_within(LIGHT, 0.2, 0.0)
    assert shares.is_within(LIGHT, 0.202, 0.0)


def test_a_tenant_may_use_its_share_early_while_others_are_active() -> None:
    """Its requests do not wait for each other. Alone it gets nothing early."""
    shares = FairShares()
    shares.sent(LIGHT, 100.0, 0.0)
    assert not shares.is_within(LIGHT, 0.0, 500.0)
    shares.sent(HEAVY, 1000.0, 0.0)
    assert shares.is_within(LIGHT, 0.0, 500.0)
    shares.sent(LIGHT, 250.0, 0.0)
    assert not shares.is_within(LIGHT, 0.0, 500.0)


def test_bands_do_not_share_and_a_changed_weight_applies_to_the_next_prompt() -> None:
    """A tenant of another band takes no part; the file of tenants may change at any time."""
    shares = FairShares()
    shares.sent(Tenant(name="vip", band=1), 1000.0, 0.0)
    shares.sent(HEAVY, 1000.0, 0.0)
    shares.sent(Tenant(name="heavy", weight=3.0), 1000.0, 0.0)
    shares.sent(LIGHT, 100.0, 0.0)
    assert not shares.is_within(LIGHT, 0.399, 0.0)
    assert shares.is_within(LIGHT, 0.401, 0.0)


def test_what_a_tenant_used_while_others_sent_little_is_forgotten() -> None:
    """After ten minutes at most."""
    shares = FairShares()
    for _ in range(20):
        shares.sent(HEAVY, 1e6, 0.0)
    assert shares.is_within(HEAVY, MAX_AHEAD_S + 0.001, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(1.0, 300.0), st.floats(0.0, 0.2)),
        min_size=1,
        max_size=150,
    ),
    st.floats(0.0, 1000.0),
)
def test_memory_holds_active_tenants_only_and_weights_add_up(
    prompts: list[tuple[int, float, float]], early_ms: float
) -> None:
    """However much each of them sends."""
    shares, now_s = FairShares(), 0.0
    for number, fleet_ms, pause_s in prompts:
        now_s += pause_s
        tenant = Tenant(name=str(number), weight=1.0 + number)
        if shares.is_within(tenant, now_s, early_ms):
            shares.sent(tenant, fleet_ms, now_s)
        assert len(shares._ends) == len(shares._active)
        total = sum(use.weight for use in shares._active.values())
        assert abs(sum(shares._weights.values()) - total) < 1e-6
    shares.is_within(LIGHT, now_s + MAX_AHEAD_S + 1, 0.0)
    assert not shares._active and not shares._ends and not shares._weights
