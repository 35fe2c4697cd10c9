"""Time to compute what is not cached."""

from __future__ import annotations

import pytest

from router.policy.costs.prefill import Prefill
from tests.policy.costs.placements import at


def test_only_what_is_not_cached_costs() -> None:
    """c0 + c1 (n - p) + c2 (n^2 - p^2), by hand."""
    assert Prefill().cost_ms(at(prompt_tokens=1000)) == pytest.approx(1.0 + 0.02 * 1000 + 4e-7 * 1_000_000)
    warm = Prefill().cost_ms(at(prompt_tokens=1000, cached_tokens=800))
    assert warm == pytest.approx(1.0 + 0.02 * 200 + 4e-7 * (1_000_000 - 640_000))
