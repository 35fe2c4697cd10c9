"""llm-d keeps a request on warm pods until they are saturated."""

from __future__ import annotations

import pytest

from router.sim.peers.peer_pickers import LlmD
from router.types import InFlight
from tests.policy.scenes import SPEED, pod
from tests.sim.peers.fleets import chosen, decided, fleet

NAME = "llm_d"
CHUNK_MS = SPEED.prefill_ms(8192)
TAU_TOKENS = int(18_000 / CHUNK_MS * 8192)


def waiting(tokens: int) -> InFlight:
    return InFlight(1, 1, prefill_tokens=tokens)


@pytest.mark.parametrize(("ahead", "winner"), [(TAU_TOKENS - 1, "warm"), (TAU_TOKENS + 1, "cold")])
def test_stickiness_ends_at_the_penalty(ahead: int, winner: str) -> None:
    """18 s at the peak prefill speed of the pod's own coefficients, relative to the best other pod."""
    seen = fleet({"warm": waiting(500 + ahead), "cold": waiting(500)}, {"warm": 80})
    assert chosen(seen, NAME) == winner


def test_a_slower_pod_is_saturated_by_fewer_tokens() -> None:
    """Each pod's own speed prices its queue."""
    slow = SPEED.__class__(2 * SPEED.c0_ms, 2 * SPEED.c1_ms_per_token, 2 * SPEED.c2_ms_per_token2)
    pods = [pod("cold"), pod("warm", speed=slow)]
    seen = fleet({"warm": waiting(TAU_TOKENS * 6 // 10)}, {"warm": 80}, pods=pods)
    assert chosen(seen, NAME) == "cold"


@pytest.mark.parametrize(("held", "winner"), [(80, "holder"), (79, "idle")])
def test_less_than_the_threshold_is_not_warm(held: int, winner: str) -> None:
    """A holder of 79 % competes by token load only, and has 20,000 more."""
    seen = fleet({"holder": waiting(20_000), "idle": InFlight()}, {"holder": held})
    assert chosen(seen, NAME) == winner


def test_among_the_warm_the_lowest_token_load_wins() -> None:
    """Uncached tokens in flight plus what this prompt adds: 0 + 320 at 80 %, 200 + 160 at 90 %, 100 + 160 at 90 %."""
    there = {"a": InFlight(), "b": waiting(200), "c": waiting(100), "cold": InFlight()}
    decision = decided(fleet(there, {"a": 80, "b": 90, "c": 90}), NAME)
    assert [candidate.pod.id for candidate in decision.candidates] == ["c", "a", "b", "cold"]
    assert decision.reason == "sticky: lowest token load"


def test_a_fleet_of_warm_pods_only_never_saturates() -> None:
    """There is no other pod to compare with."""
    seen = fleet({"a": waiting(9_000_000), "b": waiting(9_000_001)}, {"a": 100, "b": 100})
    assert decided(seen, NAME, LlmD(max_ttft_penalty_ms=0.0)).reason == "sticky: lowest token load"
