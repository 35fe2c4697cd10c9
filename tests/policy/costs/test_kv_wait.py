"""Memory that others still use."""

from __future__ import annotations

import pytest

from router.policy.costs.until_first_token import KvWaitTerm
from router.types import InFlight, PodLoad
from tests.kit.scenes import SPEED
from tests.policy.costs.placements import at


def test_a_prompt_waits_for_the_share_of_what_runs_that_it_needs() -> None:
    """By hand: 8,000 of 10,000 tokens in use, 1,100 before it, 1,100 its own: 200 short, a fortieth of what runs, which
    is over after 100 steps of 4 requests and 8,000 tokens."""
    busy = InFlight(requests=6, prefill_requests=2, prefill_tokens=1100)
    full = at(capacity_tokens=10_000, load=PodLoad(running=3, kv_usage=0.8), inflight=busy, output_tokens=100)
    step_ms = 6.0 + 0.01 * 4 + 4e-5 * 8000
    assert SPEED.step_ms(4, 8000) == pytest.approx(step_ms)
    assert KvWaitTerm().cost_ms(full) == pytest.approx(200 / 8000 * 100 * step_ms)
    assert KvWaitTerm(weight=0.5).cost_ms(full) == pytest.approx(0.5 * 200 / 8000 * 100 * step_ms)


def test_without_a_shortage_there_is_no_wait() -> None:
    """To the last token."""
    for kv_usage, waits in ((0.89, False), (0.9, True)):
        placed = at(capacity_tokens=10_000, load=PodLoad(kv_usage=kv_usage), output_tokens=100)
        assert (KvWaitTerm().cost_ms(placed) > 0) is waits


def test_where_the_capacity_is_unknown_nothing_is_guessed() -> None:
    """However full it says it is."""
    assert KvWaitTerm().cost_ms(at(load=PodLoad(running=50, kv_usage=1.0))) == 0.0


def test_a_prompt_that_is_longer_than_an_empty_pod_has_a_price_all_the_same() -> None:
    """The engine refuses it; dividing by what runs would break the others' decision."""
    assert 0 < KvWaitTerm().cost_ms(at(capacity_tokens=500)) < float("inf")
