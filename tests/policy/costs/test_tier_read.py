"""Reading what lies outside the GPU."""

from __future__ import annotations

import pytest

from router.policy.costs.until_first_token import TierReadTerm
from router.types import Link, Links
from tests.policy.costs.placements import at

LINKS = Links(cpu=Link(1.0, 20_000.0), disk=Link(5.0, 4_000.0), remote=Link(50.0, 1_000.0))
"""Bytes a millisecond; a token has 1,000."""


@pytest.mark.parametrize(
    ("held", "expected_ms"),
    [
        ((800, 0, 0, 0), 0.0),
        ((0, 200, 0, 0), 1.0 + 10.0),
        ((0, 0, 200, 0), 5.0 + 50.0),
        ((0, 0, 0, 200), 50.0 + 200.0),
        ((300, 200, 200, 100), (1.0 + 10.0) + (5.0 + 50.0) + (50.0 + 100.0)),
    ],
)
def test_each_tier_is_read_over_its_own_link(held: tuple[int, int, int, int], expected_ms: float) -> None:
    """t0 + tokens * bytes / B, tier by tier; the GPU needs none."""
    placed = at(cached_tokens=sum(held), held_tokens=held, links=LINKS)
    assert TierReadTerm().cost_ms(placed) == pytest.approx(expected_ms)


def test_a_read_of_which_nothing_is_known_costs_nothing() -> None:
    """A tier without a link is taken for as near as the GPU."""
    assert TierReadTerm().cost_ms(at(cached_tokens=500, held_tokens=(100, 400, 0, 0))) == 0.0
