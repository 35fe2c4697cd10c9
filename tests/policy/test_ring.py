"""Where keys lie, and what moves when pods come and go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.ring import KEY_BLOCKS_BEYOND_SHARED, affinity_key, rendezvous, ring_order, tie_key
from router.types import PromptPrefix
from tests.policy.scenes import BLOCK, pod, prompt_of, ready, request, scene

POINTS = 100
keys = st.integers(0, 2**64 - 1)
pod_sets = st.sets(st.integers(0, 30).map(lambda number: f"10.0.0.{number}:8000"), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(key=keys, pods=pod_sets, extra=st.integers(31, 60).map(lambda number: f"10.0.0.{number}:8000"))
def test_a_pod_more_or_less_leaves_the_order_of_the_others(key: int, pods: set[str], extra: str) -> None:
    """So that adding moves keys only onto it, and removing only its own keys."""
    without = ring_order(key, tuple(sorted(pods)), POINTS)
    with_extra = ring_order(key, tuple(sorted(pods | {extra})), POINTS)
    assert [each for each in with_extra if each != extra] == without
    assert sorted(without) == sorted(pods)


@settings(max_examples=30, deadline=None)
@given(key=keys, pods=pod_sets)
def test_the_order_in_which_pods_are_listed_does_not_matter(key: int, pods: set[str]) -> None:
    """Two routers agree."""
    listed = sorted(pods)
    assert ring_order(key, tuple(listed), POINTS) == ring_order(key, tuple(reversed(listed)), POINTS)


def test_every_pod_gets_its_share_of_keys() -> None:
    """Within a half of the mean at 100 points a pod."""
    pods = tuple(f"10.0.0.{number}:8000" for number in range(8))
    first = Counter(ring_order(key * 0x9E3779B97F4A7C15 % 2**64, pods, POINTS)[0] for key in range(4000))
    assert min(first.values()) > 250
    assert max(first.values()) < 750


@settings(max_examples=60)
@given(key=keys, pods=pod_sets)
def test_rendezvous_keeps_its_winner_when_another_leaves(key: int, pods: set[str]) -> None:
    """Ties move as little as ring positions."""
    winner = max(pods, key=lambda each: rendezvous(key, each))
    for gone in pods - {winner}:
        assert max(pods - {gone}, key=lambda each: rendezvous(key, each)) == winner


def with_prompt(prompt: PromptPrefix | None, shared_blocks: int, session: str = "") -> int | None:
    asked = request(session=session)
    return affinity_key(scene(*ready(pod("a")), prompt=prompt, shared_blocks=shared_blocks, request=asked))


@settings(max_examples=60)
@given(shared=st.integers(0, 10), own=st.integers(1, 6), more=st.integers(0, 6))
def test_the_key_lies_beyond_what_everybody_shares(shared: int, own: int, more: int) -> None:
    """Prompts that differ right behind the shared prefix have other keys; a later turn of one keeps its key."""
    system = list(range(shared * BLOCK))
    mine, yours = [1] * (own * BLOCK), [2] * (own * BLOCK)
    key = with_prompt(prompt_of(system + mine), shared)
    assert key is not None
    assert key != with_prompt(prompt_of(system + yours), shared)
    assert key not in prompt_of(system).hashes
    if own >= KEY_BLOCKS_BEYOND_SHARED:
        assert key == with_prompt(prompt_of(system + mine + [3] * (more * BLOCK)), shared)


def test_without_a_block_of_its_own_a_request_goes_by_session_or_has_no_key() -> None:
    """It has no blocks of its own; only its session can be its key."""
    short = prompt_of([1] * (BLOCK - 1))
    for prompt, shared in ((None, 0), (short, 0), (prompt_of([1] * BLOCK), 1), (prompt_of([1] * BLOCK), 3)):
        assert with_prompt(prompt, shared) is None
        key = with_prompt(prompt, shared, "s1")
        assert key is not None
        assert key != with_prompt(prompt, shared, "s2")


def test_ties_without_a_key_are_broken_by_the_request() -> None:
    """Two requests differ, one request never from itself."""
    first, again, second = (
        tie_key(scene(*ready(pod("a")), prompt=None, request=request(name))) for name in ("r1", "r1", "r2")
    )
    assert first == again != second
