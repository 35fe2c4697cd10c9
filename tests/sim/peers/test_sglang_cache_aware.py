"""SGLang's worked examples."""

from __future__ import annotations

import pytest

from router.sim.peers.peer_pickers import SglangCacheAware
from router.types import InFlight
from tests.sim.peers.fleets import busy, chosen, decided, fleet

NAME = "sglang_cache_aware"


@pytest.mark.parametrize(
    ("holder", "other", "winner"),
    [
        (42, 10, "holder"),  # 32 apart is not more than 32
        (43, 10, "other"),  # 33 apart, and 43 > 1.1 * 10
        (433, 400, "holder"),  # 33 apart, but 433 <= 1.1 * 400
        (33, 0, "other"),
    ],
)
def test_both_thresholds_must_be_exceeded_to_leave_the_cache(holder: int, other: int, winner: str) -> None:
    """Absolute and relative; then the shortest queue takes it."""
    seen = fleet(busy(holder=holder, other=other), {"holder": 90})
    assert chosen(seen, NAME) == winner


@pytest.mark.parametrize(("held", "winner"), [(51, "holder"), (50, "small"), (0, "small")])
def test_a_match_must_exceed_the_threshold(held: int, winner: str) -> None:
    """Otherwise the smallest tree takes it: here, the fewest prompt tokens in flight."""
    trees = {"holder": InFlight(1, context_tokens=500), "small": InFlight(2, context_tokens=100)}
    seen = fleet(trees, {"holder": held})
    assert chosen(seen, NAME) == winner


def test_other_settings_decide_differently() -> None:
    """The defaults of the documentation, 0.3 / 64 / 1.5, choose the holder."""
    seen = fleet(busy(holder=60, other=10), {"holder": 40})
    documented = SglangCacheAware(cache_threshold=0.3, balance_abs_threshold=64, balance_rel_threshold=1.5)
    assert chosen(seen, NAME) == "other"
    assert chosen(seen, NAME, documented) == "holder"
    assert decided(seen, NAME, documented).reason == "balanced: best match"
