"""Where keys lie, and what moves when pods come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uhashring import HashRing

from router.policy.decide import decide
from router.policy.ring import KEY_BLOCKS_BEYOND_SHARED, PodRing, _ring, affinity_key, rendezvous, tie_key
from router.types import InFlight, PodState, PodStatus, PromptPrefix
from tests.kit.scenes import BLOCK, POLICIES, pod, prompt_of, ready, request, scene

POINTS = 100
keys = st.integers(0, 2**64 - 1)
pod_sets = st.sets(st.integers(0, 30).map(lambda number: f"10.0.0.{number}:8000"), min_size=1, max_size=6)


def ring_order(key: int, pods: Iterable[str]) -> list[str]:
    return list(PodRing(pods, POINTS).walk(key))


@given(key=keys, pods=pod_sets, extra=st.integers(31, 60).map(lambda number: f"10.0.0.{number}:8000"))
def test_a_pod_more_or_less_leaves_the_order_of_the_others(key: int, pods: set[str], extra: str) -> None:
    """So that adding moves keys only onto it, and removing only its own keys."""
    without = ring_order(key, sorted(pods))
    with_extra = ring_order(key, sorted(pods | {extra}))
    assert [each for each in with_extra if each != extra] == without
    assert sorted(without) == sorted(pods)


@given(key=keys, pods=pod_sets)
def test_the_order_in_which_pods_are_listed_does_not_matter(key: int, pods: set[str]) -> None:
    """Two routers agree."""
    listed = sorted(pods)
    assert ring_order(key, listed) == ring_order(key, listed[::-1])


@given(key=keys, pods=pod_sets)
def test_the_ring_has_the_points_of_uhashring(key: int, pods: set[str]) -> None:
    """Which another program can compute."""
    theirs = HashRing(nodes=sorted(pods), hash_fn="ketama", vnodes=POINTS)
    assert ring_order(key, pods) == list(theirs.iterate_nodes(str(key)))


@pytest.mark.parametrize("name", ["ring_bounded_load", "session"])
def test_the_ring_is_built_once_for_a_fleet(name: str) -> None:
    """In any order of prices, and with any pods left out."""
    pods, random = [pod(f"pod-{number}") for number in range(16)], Random(1)
    builds = _ring.cache_info().misses
    for number in range(50):
        load = {each.id: InFlight(requests=1, prefill_ms=random.uniform(0, 50)) for each in pods}
        states = [PodState.READY if random.random() < 0.8 else PodState.DRAINING for _ in pods]
        statuses = [PodStatus(each, state) for each, state in zip(pods, states, strict=True)]
        prompt = prompt_of([number] * 100)
        decide(scene(*statuses, inflight=load, prompt=prompt, request=request(session="s")), POLICIES[name])
    assert _ring.cache_info().misses - builds <= 1


def test_every_pod_gets_its_share_of_keys() -> None:
    """Within a half of the mean at 100 points a pod."""
    pods = [f"10.0.0.{number}:8000" for number in range(8)]
    ring = PodRing(pods, POINTS)
    first = Counter(next(ring.walk(key * 0x9E3779B97F4A7C15 % 2**64)) for key in range(4000))
    assert min(first.values()) > 250
    assert max(first.values()) < 750


@given(key=keys, pods=pod_sets)
def test_rendezvous_keeps_its_winner_when_another_leaves(key: int, pods: set[str]) -> None:
    """Ties move as little as ring positions."""
    winner = max(pods, key=lambda each: rendezvous(key, each))
    for gone in pods - {winner}:
        assert max(pods - {gone}, key=lambda each: rendezvous(key, each)) == winner


def with_prompt(prompt: PromptPrefix | None, shared_blocks: int, session: str = "") -> int | None:
    asked = request(session=session)
    return affinity_key(scene(*ready(pod("a")), prompt=prompt, shared_blocks=shared_blocks, request=asked))


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
