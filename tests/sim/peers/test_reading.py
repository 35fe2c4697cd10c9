"""The functions that several formulas share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decision import Candidate
from router.policy.decide import decide
from router.sim.peers.peer_pickers import inflight_of, lowest_first, match_share, random_index, uncached_tokens
from router.types import InFlight, PrefixTrust, Scene
from tests.policy.scenes import POLICIES, pod, prompt_of, request, scene
from tests.sim.peers.fleets import BLOCKS, TOKENS, busy, fleet


def candidates_of(seen: Scene) -> list[Candidate]:
    """In the order of their ids."""
    return sorted(decide(seen, POLICIES["round_robin"]).candidates, key=lambda candidate: candidate.pod.id)


def test_a_match_is_a_share_of_the_prompts_full_blocks() -> None:
    """A fully held prompt is 1, although an engine computes its last block again."""
    seen = fleet(busy(a=0, b=0, c=0), {"a": BLOCKS, "b": 25})
    a, b, c = candidates_of(seen)
    assert [match_share(seen, each) for each in (a, b, c)] == [1.0, 0.25, 0.0]
    assert [uncached_tokens(seen, each) for each in (a, b, c)] == [16, TOKENS - 400, TOKENS]


@pytest.mark.parametrize("trust", [PrefixTrust.UNTESTED, PrefixTrust.MISMATCH])
def test_an_untrusted_pod_matches_nothing(trust: PrefixTrust) -> None:
    """Even if the index has its blocks."""
    seen = fleet(busy(a=0), {"a": BLOCKS}, pods=[pod("a", trust=trust)])
    (only,) = candidates_of(seen)
    assert match_share(seen, only) == 0.0
    assert uncached_tokens(seen, only) == TOKENS


def test_a_prompt_without_blocks_is_at_least_one_token() -> None:
    """Not read, or shorter than a block."""
    for asked, tokens in ((None, 1), (prompt_of([]), 1), (prompt_of([7] * 5), 5)):
        seen = fleet(busy(a=0), prompt=asked)
        (only,) = candidates_of(seen)
        assert match_share(seen, only) == 0.0
        assert uncached_tokens(seen, only) == tokens


def test_a_pod_without_an_entry_is_idle() -> None:
    """The ledger lists only pods with work."""
    seen = fleet(busy(a=0, b=4))
    a, b = candidates_of(seen)
    assert inflight_of(fleet({}, pods=[a.pod, b.pod]), a) == InFlight()
    assert inflight_of(seen, b).requests == 4


@settings(max_examples=60)
@given(scores=st.lists(st.integers(0, 3), min_size=1, max_size=8), name=st.text(min_size=1, max_size=8))
def test_the_lowest_comes_first_and_the_rest_ascends(scores: list[int], name: str) -> None:
    """Each candidate stays in the list."""
    seen = fleet(busy(**{f"p{number}": score for number, score in enumerate(scores)}), request=request(name))
    ranked = lowest_first(seen, candidates_of(seen), lambda candidate: inflight_of(seen, candidate).requests)
    assert [inflight_of(seen, each).requests for each in ranked] == sorted(scores)
    assert len({each.pod.id for each in ranked}) == len(scores)


def test_only_the_lowest_scores_are_shuffled() -> None:
    """Each of the two is first about equally often, the third never."""
    pods = busy(a=1, b=2, c=1)
    first: Counter[str] = Counter()
    for number in range(200):
        seen = fleet(pods, request=request(f"r{number}"))
        ranked = lowest_first(seen, candidates_of(seen), lambda candidate: pods[candidate.pod.id].requests)
        first[ranked[0].pod.id] += 1
    assert set(first) == {"a", "c"}
    assert min(first.values()) > 70


def test_a_random_index_is_below_the_count_and_reproducible() -> None:
    """It depends on the request id only."""
    lots = [random_index(scene(request=request(f"r{number}")), 7) for number in range(100)]
    assert set(lots) == set(range(7))
    assert lots == [random_index(scene(request=request(f"r{number}"), turn=3), 7) for number in range(100)]
