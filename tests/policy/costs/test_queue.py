"""Work that stands before a request."""

from __future__ import annotations

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
