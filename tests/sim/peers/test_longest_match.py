"""Only the cache counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.peers.fleets import BLOCKS, busy, decided, fleet

matches = st.lists(st.integers(0, BLOCKS), min_size=1, max_size=6)


@settings(max_examples=50)
@given(held=matches, requests=st.lists(st.integers(0, 500), min_size=6, max_size=6))
def test_the_longest_match_wins_under_any_load(held: list[int], requests: list[int]) -> None:
    """A retry tries the next longest."""
    names = "abcdef"[: len(held)]
    seen = fleet(busy(**dict(zip(names, requests, strict=False))), dict(zip(names, held, strict=True)))
    order = [candidate.pod.id for candidate in decided(seen, "longest_match").candidates]
    assert [held[names.index(name)] for name in order] == sorted(held, reverse=True)
