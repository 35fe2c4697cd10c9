"""The delay of the prompts that come after this one."""

from __future__ import annotations

import pytest

from router.policy.costs.effects import MAX_DELAY, CongestionTerm, EvictionTerm
from router.policy.term import Placement
from router.types import Congestion, InFlight
from tests.kit.scenes import SPEED, scene
from tests.policy.costs.placements import at

BUSY = Congestion(prompts_per_s=2.0, busy_share=0.5, backlog_ms=300.0)
REACHED_PER_MS = 2.0 / 1000 / 0.5


def busy_at(congestion: Congestion = BUSY, **facts: object) -> Placement:
    return at(scene=scene(congestion=congestion), **facts)


def test_in_an_idle_fleet_no_prompt_delays_another() -> None:
    """The price is what it was without this term."""
    assert CongestionTerm().costs_ms([at(), at(cached_tokens=500)]) == [0.0, 0.0]
    assert EvictionTerm(congestion=1.0).cost_ms(at()) == EvictionTerm().cost_ms(at())


def test_a_prompt_delays_those_behind_it_on_its_pod() -> None:
    """K x (W + x / 2), by hand: 100 ms of work ahead."""
    placed = busy_at(inflight=InFlight(1, 1, 5000, 100.0), cached_tokens=400)
    x_ms = SPEED.compute_ms(400, 1000)
    assert placed.work_ahead_ms == 100.0
    expected_ms = REACHED_PER_MS * x_ms * (100.0 + x_ms / 2)
    assert CongestionTerm(pod=1.0, fleet=0.0).cost_ms(placed) == pytest.approx(expected_ms)


def test_a_part_is_counted_at_the_backlog_of_the_fleet() -> None:
    """Wherever the prompt goes: only its own compute makes a difference."""
    term = CongestionTerm(pod=0.0, fleet=1.0)
    expected_ms = REACHED_PER_MS * SPEED.compute_ms(400, 1000) * 300.0
    for prefill_ms in (0.0, 1000.0):
        placed = busy_at(inflight=InFlight(1, 1, 5000, prefill_ms), cached_tokens=400)
        assert term.cost_ms(placed) == pytest.approx(expected_ms)


def test_a_prefix_of_all_traffic_delays_nobody() -> None:
    """It is computed once, whichever prompt brings it."""
    assert CongestionTerm().cost_ms(busy_at(shared_tokens=999)) == CongestionTerm().cost_ms(busy_at(cached_tokens=999))


def test_the_more_the_fleet_has_to_do_the_more_an_evicted_token_is_worth() -> None:
    """1 + K * backlog times as much, by hand."""
    idle, busy = (EvictionTerm(congestion=1.0).cost_ms(placed) for placed in (at(), busy_at()))
    assert busy == pytest.approx(idle * (1 + REACHED_PER_MS * 300.0))
    assert EvictionTerm(congestion=0.0).cost_ms(busy_at()) == idle


def test_prices_stay_bounded() -> None:
    """Even where pods are never idle and the backlog grows without end."""
    worst = busy_at(Congestion(1e3, 1.0, 1e9))
    idle_ms = EvictionTerm().cost_ms(at())
    assert EvictionTerm(congestion=1.0).cost_ms(worst) == pytest.approx(idle_ms * (1 + MAX_DELAY))
    assert CongestionTerm(fleet=0.0).cost_ms(worst) < 1e6
