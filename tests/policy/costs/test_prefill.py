"""Time to compute what is not cached."""

from __future__ import annotations

import pytest

from router.policy.costs.prefill import PrefillTerm
from router.types import InFlight
from tests.policy.costs.placements import at


def test_only_what_is_not_cached_costs() -> None:
    """c0 + c1 (n - p) + c2 (n^2 - p^2), by hand."""
    assert PrefillTerm().cost_ms(at(prompt_tokens=1000)) == pytest.approx(1.0 + 0.02 * 1000 + 4e-7 * 1_000_000)
    warm = PrefillTerm().cost_ms(at(prompt_tokens=1000, cached_tokens=800))
    assert warm == pytest.approx(1.0 + 0.02 * 200 + 4e-7 * (1_000_000 - 640_000))


def test_with_decoding_requests_the_fixed_part_is_a_decode_step() -> None:
    """d0 + d1 b + d2 context instead of c0."""
    busy = at(inflight=InFlight(3, 1, context_tokens=9000, decode_tokens=5000))
    more_ms = PrefillTerm().cost_ms(busy) - PrefillTerm().cost_ms(at())
    assert more_ms == pytest.approx(6.0 + 0.01 * 2 + 4e-5 * 5000 - 1.0)
