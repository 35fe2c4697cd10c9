"""AIBrix's worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.peers.peer_pickers import AibrixPrefixCache
from tests.policy.scenes import request
from tests.sim.peers.fleets import BLOCKS, busy, chosen, decided, fleet

NAME = "aibrix_prefix_cache"


@pytest.mark.parametrize(("holder", "winner"), [(8, "holder"), (9, "other")])
def test_a_gap_above_eight_leaves_only_the_least_loaded(holder: int, winner: str) -> None:
    """At 8, the holder is at the mean of 4 plus a sigma of 4, which is allowed."""
    assert chosen(fleet(busy(holder=holder, other=0), {"holder": BLOCKS}), NAME) == winner


def test_the_best_match_within_a_sigma_wins() -> None:
    """Requests 8, 4, 3, 3: mean 4.5, sigma 2.06. The best match is above 6.56; the next best is not."""
    seen = fleet(busy(best=8, next=4, c=3, d=3), {"best": 100, "next": 40, "c": 20})
    assert [each.pod.id for each in decided(seen, NAME).candidates] == ["next", "c", "d", "best"]
    assert chosen(seen, NAME, AibrixPrefixCache(standard_deviations=2.0)) == "best"


@pytest.mark.parametrize("name", ["r1", "r2", "r3", "r4", "r5"])
def test_of_equal_matches_the_one_with_fewer_requests_wins(name: str) -> None:
    """Also without any match. The request id does not decide."""
    there = busy(a=3, b=2, c=4)
    assert chosen(fleet(there, {"a": 50, "c": 50}, request=request(name)), NAME) == "a"
    assert chosen(fleet(there, request=request(name)), NAME) == "b"


@settings(max_examples=60)
@given(requests=st.lists(st.integers(0, 40), min_size=1, max_size=6), held=st.lists(st.integers(0, 100), min_size=6))
def test_no_pod_far_above_the_mean_is_chosen(requests: list[int], held: list[int]) -> None:
    """The bound holds, and an imbalance leaves the least loaded only."""
    names = "abcdef"[: len(requests)]
    there = busy(**dict(zip(names, requests, strict=True)))
    won = there[chosen(fleet(there, dict(zip(names, held, strict=False))), NAME)].requests
    mean = sum(requests) / len(requests)
    sigma = (sum((count - mean) ** 2 for count in requests) / len(requests)) ** 0.5
    assert won <= mean + sigma + 1e-9
    assert won == min(requests) or max(requests) - min(requests) <= 8
