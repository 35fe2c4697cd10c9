"""Pods that run full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.costs.effects import KvPressureTerm
from router.types import InFlight, PodLoad
from tests.kit.scenes import SPEED
from tests.policy.costs.placements import at


def test_a_pod_half_full_costs_the_weight_in_prompts() -> None:
    """By hand: 4,000 of 10,000 tokens in use and 1,000 on their way, 1,000 of prompt and 100 of answer."""
    half = at(
        capacity_tokens=10_000,
        prompt_tokens=1000,
        output_tokens=100,
        load=PodLoad(kv_usage=0.4),
        inflight=InFlight(requests=1, prefill_requests=1, prefill_tokens=1000),
    )
    assert KvPressureTerm().cost_ms(half) == pytest.approx(0.3 * SPEED.c1_ms_per_token * 1100)
    assert KvPressureTerm(weight=0.6).cost_ms(half) == pytest.approx(0.6 * SPEED.c1_ms_per_token * 1100)


def test_requests_after_the_last_scrape_count_like_those_in_it() -> None:
    """Four run by its last word and eight of ours are there: twice as much is taken to be in use."""
    known = at(capacity_tokens=10_000, load=PodLoad(running=8, kv_usage=0.6), inflight=InFlight(requests=8))
    told_half = at(capacity_tokens=10_000, load=PodLoad(running=4, kv_usage=0.3), inflight=InFlight(requests=8))
    assert KvPressureTerm().cost_ms(told_half) == pytest.approx(KvPressureTerm().cost_ms(known))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 100_000))
def test_the_fuller_the_dearer_and_nineteen_times_its_weight_at_the_most(
    one: float, other: float, waiting: int
) -> None:
    """Also with waiting prompts."""

    def price(kv_usage: float) -> float:
        inflight = InFlight(requests=1, prefill_requests=1, prefill_tokens=waiting)
        return KvPressureTerm(weight=1.0).cost_ms(
            at(capacity_tokens=10_000, load=PodLoad(kv_usage=kv_usage), inflight=inflight)
        )

    placed = at(capacity_tokens=10_000)
    most = 19 * SPEED.c1_ms_per_token * (placed.request.prompt_tokens + placed.request.output_tokens)
    assert price(min(one, other)) <= price(max(one, other)) * (1 + 1e-9) <= most * (1 + 1e-6)


def test_where_the_capacity_is_unknown_nothing_is_guessed() -> None:
    """However full it says it is."""
    assert KvPressureTerm().cost_ms(at(load=PodLoad(kv_usage=1.0))) == 0.0
