"""Those who wait while a prompt is computed."""

from __future__ import annotations

import pytest

from router.policy.costs.effects import DecodeInterferenceTerm
from router.types import InFlight, PodLoad
from tests.policy.costs.placements import at

DECODING = InFlight(requests=7, prefill_requests=2)


def test_every_decoding_request_waits_for_the_prompt() -> None:
    """weight * requests * (c1 (n - p) + c2 (n^2 - p^2)), by hand."""
    placed = at(inflight=DECODING, prompt_tokens=1000, cached_tokens=600)
    compute_ms = 0.02 * 400 + 4e-7 * (1_000_000 - 360_000)
    assert DecodeInterferenceTerm(weight=0.1).cost_ms(placed) == pytest.approx(0.1 * 5 * compute_ms)


def test_the_larger_of_scrape_and_ledger_counts() -> None:
    """A scrape lags; a ledger does not see other routers."""
    costs = [
        DecodeInterferenceTerm().cost_ms(at(inflight=DECODING, load=PodLoad(running=running))) for running in (0, 5, 10)
    ]
    assert costs[0] == costs[1]
    assert costs[2] == pytest.approx(2 * costs[1])


def test_it_costs_nothing_on_a_pod_without_decoding_requests() -> None:
    """As on one that only prefills."""
    assert DecodeInterferenceTerm().cost_ms(at(inflight=InFlight(requests=4, prefill_requests=4))) == 0.0
