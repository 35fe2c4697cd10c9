"""Time to compute what is not cached."""

from __future__ import annotations

import pytest
from msgspec import structs

from router.policy.costs.until_first_token import PrefillTerm
from router.types import InFlight, ScenePicture
from tests.kit.scenes import SPEED, pod, ready, scene
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


def test_pictures_that_the_pod_has_not_seen_are_encoded_first() -> None:
    """c1 for each of their tokens, unless their KV is cached."""
    pictures = (
        ScenePicture(end_token=300, token_count=100),
        ScenePicture(end_token=700, token_count=200, pods=("other", "a")),
        ScenePicture(end_token=None, token_count=1024),
    )
    seen = scene(*ready(pod("a")), pictures=pictures)
    term, c1 = PrefillTerm(), SPEED.c1_ms_per_token

    def encoding_ms(name: str, cached_tokens: int) -> float:
        here = at(prompt_tokens=1000, cached_tokens=cached_tokens)
        with_pictures = structs.replace(here, pod=pod(name), request=structs.replace(here.request, scene=seen))
        return term.cost_ms(with_pictures) - term.cost_ms(here)

    assert encoding_ms("a", 0) == pytest.approx(c1 * (100 + 1024))
    assert encoding_ms("a", 300) == pytest.approx(c1 * 1024)
    assert encoding_ms("b", 299) == pytest.approx(c1 * (100 + 200 + 1024))
    assert encoding_ms("b", 999) == pytest.approx(c1 * 1024)
