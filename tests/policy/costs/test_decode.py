"""Neighbours that decode."""

from __future__ import annotations

import pytest

from router.policy.costs.effects import DecodeTerm
from router.types import Congestion, InFlight, PodLoad
from tests.kit.scenes import SPEED, scene
from tests.policy.costs.placements import at


def test_neighbours_slow_every_token_of_the_output() -> None:
    """weight * output * (d1 * running + d2 * context), by hand."""
    busy = at(output_tokens=100, inflight=InFlight(requests=10, prefill_requests=4, context_tokens=5000))
    assert DecodeTerm(weight=0.5).cost_ms(busy) == pytest.approx(0.5 * 100 * (0.01 * 6 + 4e-5 * 5000))


def test_the_larger_of_scrape_and_ledger_counts() -> None:
    """A scrape lags; a ledger does not see other routers."""
    ours = InFlight(requests=10)
    costs = [DecodeTerm().cost_ms(at(inflight=ours, load=PodLoad(running=running))) for running in (0, 10, 20)]
    assert costs[0] == costs[1]
    assert costs[2] == pytest.approx(2 * costs[1])


def test_an_idle_pod_costs_nothing() -> None:
    """Zero for any output."""
    assert DecodeTerm().cost_ms(at(output_tokens=10_000)) == 0.0


def test_prompts_slow_the_decoding_of_all_pods_as_fast() -> None:
    """pace * output * d0 / (1 - busy), by hand, on top of what neighbours cost."""
    seen = scene(congestion=Congestion(busy_shares={"a": 0.75}))
    idle, busy = at(output_tokens=100), at(output_tokens=100, scene=seen)
    more_ms = DecodeTerm(pace=0.2).cost_ms(busy) - DecodeTerm(pace=0.2).cost_ms(idle)
    assert more_ms == pytest.approx(0.2 * 100 * SPEED.d0_ms * 4)


def test_a_pod_that_is_always_busy_costs_a_finite_price() -> None:
    """A share of 1 counts as 0.95."""
    seen = scene(congestion=Congestion(busy_shares={"a": 1.0}))
    assert DecodeTerm(pace=1.0).cost_ms(at(output_tokens=1, scene=seen)) == pytest.approx(SPEED.d0_ms * 20)


def test_the_pace_of_equal_pods_is_left_out() -> None:
    """It would be the same everywhere."""
    busy = at(inflight=InFlight(requests=10), scene=scene(congestion=Congestion(2.0, 0.9, 300.0)))
    assert DecodeTerm(pace=5.0).cost_ms(busy) == DecodeTerm(pace=0.0).cost_ms(busy)
