"""Work that stands before a request."""

from __future__ import annotations

import pytest

from router.policy.costs.queue import Queue
from router.types import InFlight, PodLoad
from tests.policy.costs.placements import at
from tests.policy.scenes import SPEED


def test_our_own_queue_counts_in_its_milliseconds() -> None:
    """What the engine reports of our own waiting requests is not counted again."""
    ours = InFlight(requests=5, prefill_requests=3, prefill_ms=120.0)
    assert Queue().cost_ms(at(inflight=ours, load=PodLoad(waiting=3))) == 120.0
    assert Queue().cost_ms(at(inflight=ours, load=PodLoad(waiting=0))) == 120.0


def test_requests_that_came_past_us_count_as_usual_prompts() -> None:
    """Each a whole prefill of the assumed length."""
    foreign = at(inflight=InFlight(1, 1, prefill_ms=10.0), load=PodLoad(waiting=3))
    assert Queue(foreign_request_tokens=500).cost_ms(foreign) == 10.0 + 2 * SPEED.prefill_ms(500)


@pytest.mark.parametrize(("now_s", "left_ms"), [(10.0, 120.0), (10.03, 90.0), (10.05, 70.0), (99.0, 70.0)])
def test_what_is_first_in_line_shrinks_while_it_is_computed(now_s: float, left_ms: float) -> None:
    """50 of 120 ms are the first prompt's: once they are over it is late, and the others still stand there in full."""
    ours = InFlight(3, 3, prefill_ms=120.0, head_ms=50.0, head_since_s=10.0)
    assert Queue().cost_ms(at(inflight=ours, now_s=now_s)) == pytest.approx(left_ms)


def test_progress_and_what_came_past_us_are_added() -> None:
    """Nobody knows how far a foreign prompt is."""
    ours = InFlight(1, 1, prefill_ms=50.0, head_ms=50.0, head_since_s=10.0)
    placed = at(inflight=ours, load=PodLoad(waiting=2), now_s=10.02)
    assert Queue(foreign_request_tokens=500).cost_ms(placed) == pytest.approx(30.0 + SPEED.prefill_ms(500))
