"""Neighbours that decode."""

from __future__ import annotations

import pytest

from router.policy.costs.decode import DecodeTerm
from router.types import InFlight, PodLoad
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
