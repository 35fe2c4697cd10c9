"""Work that stands before a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.policy.costs.until_first_token import QueueTerm
from router.types import InFlight, PodLoad, StepBegan
from tests.kit.scenes import SPEED
from tests.policy.costs.placements import at


def test_our_own_queue_counts_in_its_milliseconds() -> None:
    """What the engine reports of our own waiting requests is not counted again."""
    ours = InFlight(requests=3, prefill_requests=3, prefill_ms=120.0)
    assert QueueTerm().cost_ms(at(inflight=ours, load=PodLoad(waiting=3, our_prompts=3))) == 120.0
    assert QueueTerm().cost_ms(at(inflight=ours, load=PodLoad(waiting=0))) == 120.0


def test_requests_that_came_past_us_count_as_usual_prompts() -> None:
    """Each a whole prefill of the assumed length."""
    foreign = at(inflight=InFlight(1, 1, prefill_ms=10.0), load=PodLoad(waiting=3, our_prompts=1))
    assert QueueTerm(foreign_request_tokens=500).cost_ms(foreign) == 10.0 + 2 * SPEED.prefill_ms(500)


@given(waiting=st.integers(0, 50), then=st.integers(0, 50), now=st.integers(0, 50))
def test_what_came_past_us_costs_the_same_until_the_engine_speaks_again(waiting: int, then: int, now: int) -> None:
    """Waiting requests of the scrape without those that were ours at that time, and never below zero."""
    ours = InFlight(now, now, prefill_ms=10.0 * now)
    said = PodLoad(waiting=waiting, our_prompts=then)
    cost_ms = QueueTerm(foreign_request_tokens=500).cost_ms(at(inflight=ours, load=said))
    assert cost_ms == pytest.approx(10.0 * now + max(waiting - then, 0) * SPEED.prefill_ms(500))


@pytest.mark.parametrize(("now_s", "left_ms"), [(10.0, 121.0), (10.03, 91.0), (10.05, 71.0), (99.0, 70.0)])
def test_what_is_first_in_line_shrinks_while_it_is_computed(now_s: float, left_ms: float) -> None:
    """1 ms for the step and 50 of 120 are the first prompt's: once they are over it is late, and the others still stand
    there in full."""
    ours = InFlight(3, 3, prefill_ms=120.0, head_ms=50.0, head_since_s=10.0)
    assert QueueTerm().cost_ms(at(inflight=ours, now_s=now_s)) == pytest.approx(left_ms)


def test_progress_and_what_came_past_us_are_added() -> None:
    """Nobody knows how far a foreign prompt is."""
    ours = InFlight(1, 1, prefill_ms=50.0, head_ms=50.0, head_since_s=10.0)
    placed = at(inflight=ours, load=PodLoad(waiting=2, our_prompts=1), now_s=10.02)
    assert QueueTerm(foreign_request_tokens=500).cost_ms(placed) == pytest.approx(31.0 + SPEED.prefill_ms(500))


DECODING = InFlight(2, 0, decode_tokens=10_000)
STEP_MS = SPEED.step_ms(2, 10_000)


@pytest.mark.parametrize(("elapsed_s", "left_ms"), [(0.0, STEP_MS), (0.002, STEP_MS - 2), (0.1, 0.0)])
def test_a_prompt_waits_for_the_end_of_the_step_under_way(elapsed_s: float, left_ms: float) -> None:
    """Which began when tokens last came out."""
    placed = at(inflight=DECODING, step=StepBegan(3.0), now_s=3.0 + elapsed_s)
    assert QueueTerm().cost_ms(placed) == pytest.approx(left_ms)


def test_half_of_a_step_with_an_unobserved_begin_is_left() -> None:
    """On average."""
    assert QueueTerm().cost_ms(at(inflight=DECODING, now_s=3.0)) == pytest.approx(STEP_MS / 2)


def test_prompts_of_the_step_under_way_shrink_and_those_that_came_later_do_not() -> None:
    """20 of 50 ms were there when it began, the rest is in the next step, as we are."""
    work = structs.replace(DECODING, requests=4, prefill_requests=2, prefill_ms=50.0, head_ms=20.0, head_since_s=2.9)
    placed = at(inflight=work, step=StepBegan(3.0, 20.0), now_s=3.005)
    assert QueueTerm().cost_ms(placed) == pytest.approx(STEP_MS + 20.0 - 5.0 + 30.0)
    late = at(inflight=work, step=StepBegan(3.0, 20.0), now_s=9.0)
    assert QueueTerm().cost_ms(late) == pytest.approx(30.0)


def test_a_prompt_that_came_after_the_step_began_is_in_the_next_one() -> None:
    """What is left of the step, and all of the prompt."""
    work = structs.replace(DECODING, requests=3, prefill_requests=1, prefill_ms=20.0, head_ms=20.0, head_since_s=3.001)
    placed = at(inflight=work, step=StepBegan(3.0, 0.0), now_s=3.002)
    assert QueueTerm().cost_ms(placed) == pytest.approx(STEP_MS - 2.0 + 20.0)
