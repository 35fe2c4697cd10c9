"""A candidate of the queue counts the work of both pods of a split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.admission.admission_queue import FULL_SHARE, queue_candidate
from router.decision import Candidate, Cost, Direct, Split
from router.types import PRIOR_OUTPUT_TOKENS, InFlight, PodSpeed, Role
from tests.kit.scenes import make_pod

SPEED = PodSpeed(10.0, 0.1, 0.0, 20.0, 0.1, 0.0)
PREFILL = make_pod("p", speed=SPEED, role=Role.PREFILL)
DECODE = replace(PREFILL, id="d", role=Role.DECODE, capacity_tokens=10_000)
COST = Cost(("queue",), (200.0,), 200.0)
SPLIT = Candidate(Split(PREFILL, DECODE, 1000), COST, 0)
DIRECT = Candidate(Direct(DECODE), COST, 0)


def test_a_handed_over_prompt_waits_for_the_prompts_that_the_decode_pod_computes_itself() -> None:
    """As far as they are not computed when it arrives."""
    for prefill_ms, ttft_ms in ((100.0, 200.0), (700.0, 700.0)):
        inflight = {"d": InFlight(requests=1, prefill_requests=1, prefill_ms=prefill_ms)}
        candidate = queue_candidate(SPLIT, inflight, 0.0, 1000, 200.0)
        assert (candidate.pod, candidate.decode_pod, candidate.queue_ms, candidate.ttft_ms) == ("p", "d", 0.0, ttft_ms)


@pytest.mark.parametrize("candidate", [SPLIT, DIRECT])
def test_a_decode_pod_without_room_for_the_kv_is_not_open_before_enough_requests_end(candidate: Candidate) -> None:
    """Those that prefill pods compute for it count as well. They leave it evenly while the prompt is computed."""
    full = int(10_000 * FULL_SHARE)
    fits, short = (InFlight(requests=4, context_tokens=tokens) for tokens in (full - 1000, full))
    assert queue_candidate(candidate, {"d": fits}, 0.0, 1000, 200.0).room_ms == 0.0
    all_ms = PRIOR_OUTPUT_TOKENS * SPEED.step_ms(4, full)
    assert queue_candidate(candidate, {"d": short}, 0.0, 1000, 200.0).room_ms == pytest.approx(
        all_ms * 1000 / full - 200.0
    )
    assert queue_candidate(candidate, {}, 0.0, 20_000, 200.0).room_ms == 0.0


def test_a_long_prompt_waits_no_longer_than_until_all_requests_end() -> None:
    """Where it needs more room than they leave."""
    one = {"d": InFlight(requests=1, context_tokens=10)}
    all_ms = PRIOR_OUTPUT_TOKENS * SPEED.step_ms(1, 10)
    assert queue_candidate(DIRECT, one, 0.0, 9900, 0.0).room_ms == pytest.approx(all_ms)


def test_pods_that_compute_and_decode_have_room_as_before() -> None:
    """Their KV has shared prefixes, which requests in flight count several times; and a capacity may be unknown."""
    many = {"d": InFlight(requests=40, context_tokens=100_000)}
    for pod in (replace(DECODE, role=Role.BOTH), replace(DECODE, capacity_tokens=None)):
        assert queue_candidate(Candidate(Direct(pod), COST, 0), many, 0.0, 1000, 200.0).room_ms == 0.0
