"""LMetric's worked example."""

from __future__ import annotations

import pytest

from router.types import InFlight
from tests.sim.peers.fleets import decided, fleet


@pytest.mark.parametrize(("batch", "winner", "score"), [(8, "holder", 7200), (10, "other", 8000)])
def test_the_score_is_new_prefill_tokens_times_batch(batch: int, winner: str, score: int) -> None:
    """A prompt of 1,600 tokens. other: (400 + 1600) * 4 = 8000; holder of 50 blocks: 800 * (batch + 1)."""
    there = {"other": InFlight(3, 1, prefill_tokens=400), "holder": InFlight(batch)}
    decision = decided(fleet(there, {"holder": 50}), "lmetric")
    assert decision.candidates[0].pod.id == winner
    assert decision.reason == f"lowest product, {score}"
