"""Which holder is which pod, and which store blocks a pod can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.holders import ALL_PODS, HolderFacts, Holders, KnownHolder, hashes_by_generation, holder_name
from router.types import BlocksByTier, Generation, Pod, PromptPrefix
from tests.kit.scenes import make_pod

GENERATION = Generation(model="m", revision="1", tokenizer="t", block_size_tokens=2)
NEXT = replace(GENERATION, revision="2")
OTHER_GENERATIONS = [
    {"model": "other"},
    {"revision": "2"},
    {"tokenizer": "other"},
    {"kv_dtype": "fp8"},
    {"block_size_tokens": 4},
]


def holder(holder_id: str, generation: Generation = GENERATION, **facts: Any) -> KnownHolder:
    return KnownHolder(id=holder_id, generation=generation, facts=HolderFacts(**facts), epoch=1, seq=0, last_seen_s=0.0)


def of_pod(pod: Pod, generation: Generation = GENERATION) -> KnownHolder:
    """The holder that a publisher writes for this pod, with another id."""
    rank = -1 if pod.dp_rank is None else pod.dp_rank
    return holder(f"published {pod.id}", generation, url=pod.url, rank=rank)


def known(*holders: KnownHolder, pods: tuple[Pod, ...], generation: Generation = GENERATION) -> Holders:
    """These holders, and these pods bound with `generation`."""
    all_of_them = Holders()
    for pod in pods:
        all_of_them.bind(pod, generation)
    for one in holders:
        all_of_them.put(one)
    return all_of_them


def prompt(generation: Generation = GENERATION) -> PromptPrefix:
    tokens = token_array((1, 2, 3, 4, 5))
    return PromptPrefix(generation, tokens, hash_blocks(tokens, 2, generation_seed(generation)))


A, B = make_pod("a"), make_pod("b")
STORE = holder("store", reach=ALL_PODS)


# --- who is a pod ---


def test_a_holder_with_a_pods_url_is_that_pod() -> None:
    """With any id; a holder with an unknown URL is no pod."""
    mine, other = of_pod(A), holder("a", url="http://elsewhere:8000")
    holders = known(mine, other, pods=(A, B))
    assert holders.by_pod([{mine.name: (3, 0, 0, 0), other.name: (9, 0, 0, 0)}]) == {"a": (3, 0, 0, 0)}
    assert (holders.publisher_of("a"), holders.publisher_of("b")) == (mine, None)


def test_ranks_of_one_url_are_separate_pods() -> None:
    """A pod without ranks is none of them."""
    ranks = tuple(make_pod(f"a@{rank}", url="http://a", dp_rank=rank) for rank in (0, 1))
    published = [of_pod(pod) for pod in (*ranks, make_pod("a", url="http://a"))]
    holders = known(*published, pods=ranks)
    runs: list[BlocksByTier] = [(1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]
    found = holders.by_pod([{one.name: run for one, run in zip(published, runs, strict=True)}])
    assert found == {"a@0": (1, 0, 0, 0), "a@1": (2, 0, 0, 0)}


@pytest.mark.parametrize("pod_first", [True, False])
def test_holders_and_pods_can_be_added_in_any_order(pod_first: bool) -> None:
    mine, holders = of_pod(A), Holders()
    if pod_first:
        holders.bind(A, GENERATION)
    holders.put(mine)
    holders.bind(A, GENERATION)
    assert holders.by_pod([{mine.name: (1, 0, 0, 0)}]) == {"a": (1, 0, 0, 0)}


def test_an_unbound_pod_has_no_blocks() -> None:
    """Its holder stays known, and the pod is found again when it returns."""
    mine, of_b = of_pod(A), of_pod(B)
    holders = known(mine, of_b, STORE, pods=(A, B))
    runs: list[tuple[str, BlocksByTier]] = [(one.name, (1, 0, 0, 0)) for one in (mine, of_b, STORE)]
    holders.unbind("a")
    assert holders.by_pod([dict(runs)]) == {"b": (1, 0, 0, 0)}
    assert (holders.get(mine.name), holders.publisher_of("a")) == (mine, None)
    holders.bind(A, GENERATION)
    assert holders.by_pod([dict(runs)]) == {"a": (1, 0, 0, 0), "b": (1, 0, 0, 0)}


def test_a_dropped_holder_is_unknown() -> None:
    """Dropping it again changes nothing."""
    mine = of_pod(A)
    holders = known(mine, STORE, pods=(A,))
    for one in (mine, STORE, STORE):
        holders.drop(one.name)
    assert holders.by_pod([{mine.name: (3, 0, 0, 0), STORE.name: (4, 0, 0, 0)}]) == {}
    assert (list(holders), holders.publisher_of("a")) == ([], None)


def test_a_holder_replaces_the_one_with_its_name() -> None:
    """It may have moved to another pod."""
    moved = holder(of_pod(A).id, url=B.url)
    holders = known(of_pod(A), moved, pods=(A, B))
    assert list(holders) == [moved]
    assert holders.by_pod([{moved.name: (1, 0, 0, 0)}]) == {"b": (1, 0, 0, 0)}


@pytest.mark.parametrize("other", OTHER_GENERATIONS)
def test_names_differ_by_generation(other: dict[str, Any]) -> None:
    """But not by adapter and salt, which are part of the hashes."""
    assert holder_name(replace(GENERATION, **other), "a") != holder_name(GENERATION, "a")
    assert holder_name(replace(GENERATION, adapter="sql", salt="tenant"), "a") == holder_name(GENERATION, "a")


# --- what a store is worth to a pod ---


def test_a_store_only_extends_a_pods_own_blocks() -> None:
    """Blocks that both have count as the pod's."""
    mine = of_pod(A)
    holders = known(mine, STORE, pods=(A, B))
    assert holders.by_pod([{mine.name: (2, 1, 0, 0), STORE.name: (0, 0, 1, 4)}]) == {
        "a": (2, 1, 0, 2),
        "b": (0, 0, 0, 5),
    }
    assert holders.by_pod([{STORE.name: (0, 0, 0, 3), mine.name: (2, 1, 0, 0)}]) == {
        "a": (2, 1, 0, 0),
        "b": (0, 0, 0, 3),
    }


def test_a_stores_blocks_add_to_a_pods_remote_blocks() -> None:
    """Engines may announce a remote tier themselves."""
    mine = of_pod(A)
    holders = known(mine, STORE, pods=(A,))
    assert holders.by_pod([{mine.name: (1, 0, 0, 2), STORE.name: (0, 0, 0, 4)}]) == {"a": (1, 0, 0, 3)}


def test_the_store_with_the_most_leading_blocks_counts() -> None:
    """In any order of the stores."""
    other = holder("another store", reach=ALL_PODS)
    holders = known(STORE, other, pods=(A,))
    runs: list[tuple[str, BlocksByTier]] = [(STORE.name, (0, 5, 0, 0)), (other.name, (0, 0, 3, 0))]
    assert holders.by_pod([dict(runs)]) == holders.by_pod([dict(reversed(runs))]) == {"a": (0, 0, 0, 5)}


@pytest.mark.parametrize(
    ("pod", "reached"),
    [
        (make_pod("a", host="node-1"), True),
        (make_pod("a", url="http://node-1:8000"), True),
        (make_pod("a", url="http://node-1:8000", host="node-2"), False),
        (make_pod("a", url="http://node-2:8000"), False),
    ],
)
def test_a_store_reaches_the_pods_on_its_host(pod: Pod, reached: bool) -> None:
    """By configured host, else by that of their URL."""
    shelf = holder("shelf", reach="node-1")
    found = known(shelf, pods=(pod,)).by_pod([{shelf.name: (0, 2, 0, 0)}])
    assert found == ({"a": (0, 0, 0, 2)} if reached else {})


def test_a_store_with_a_pods_url_is_not_that_pod() -> None:
    shelf = holder("shelf", url=A.url, reach=ALL_PODS)
    holders = known(shelf, pods=(A,))
    assert holders.by_pod([{shelf.name: (0, 3, 0, 0)}]) == {"a": (0, 0, 0, 3)}
    assert holders.publisher_of("a") is None


@pytest.mark.parametrize("other", OTHER_GENERATIONS)
def test_a_store_of_another_generation_is_not_readable(other: dict[str, Any]) -> None:
    shelf = holder("shelf", replace(GENERATION, **other), reach=ALL_PODS)
    assert known(shelf, pods=(A,)).by_pod([{shelf.name: (0, 0, 0, 3)}]) == {}


def test_a_publishers_generation_overrides_the_bound_one() -> None:
    """During a rollout each pod reads the store of its own weights."""
    mine, new_store = of_pod(A, NEXT), holder("store", NEXT, reach=ALL_PODS)
    holders = known(mine, STORE, new_store, pods=(A, B))
    assert holders.by_pod([{STORE.name: (0, 0, 0, 3), new_store.name: (0, 0, 0, 7)}]) == {
        "a": (0, 0, 0, 7),
        "b": (0, 0, 0, 3),
    }


BY_TIER = st.tuples(*[st.integers(0, 3)] * 4)


@given(own=BY_TIER, stores=st.lists(st.tuples(st.sampled_from([ALL_PODS, "a", "b"]), BY_TIER), max_size=4))
def test_a_pod_has_the_most_leading_blocks_within_its_reach(
    own: BlocksByTier, stores: list[tuple[str, BlocksByTier]]
) -> None:
    """And its own blocks count as they are."""
    mine = of_pod(A)
    shelves = [holder(f"store {number}", reach=reach) for number, (reach, _) in enumerate(stores)]
    holders = known(mine, *shelves, pods=(A,))
    runs = [(shelf.name, run) for shelf, (_, run) in zip(shelves, stores, strict=True)]
    gpu, cpu, disk, remote = holders.by_pod([dict([*runs, (mine.name, own)])])["a"]
    assert (gpu, cpu, disk) == own[:3] and remote >= own[3]
    assert gpu + cpu + disk + remote == max(sum(own), *[sum(run) for reach, run in stores if reach != "b"], 0)


# --- hashes ---


def hashes_by_revision(holders: Holders, asked: PromptPrefix) -> dict[Generation, Sequence[int]]:
    return dict(hashes_by_generation(asked, holders.generations))


def test_a_prompt_is_looked_up_under_its_own_hashes() -> None:
    """Once, with or without holders of its generation."""
    asked = prompt()
    assert hashes_by_revision(Holders(), asked) == {GENERATION: asked.hashes}
    holders = known(of_pod(A), STORE, pods=(A,))
    assert list(hashes_by_generation(asked, holders.generations)) == [(GENERATION, asked.hashes)]


@pytest.mark.parametrize("change", [{"revision": "2"}, {"kv_dtype": "fp8"}])
def test_pods_of_other_weights_are_found_under_their_own_hashes(change: dict[str, Any]) -> None:
    """The same tokens, seeded by the holder's generation."""
    other = replace(GENERATION, **change)
    found = hashes_by_revision(known(of_pod(A), of_pod(B, other), pods=(A, B)), prompt())
    assert found == {GENERATION: prompt().hashes, other: prompt(other).hashes}


def test_adapter_and_salt_apply_to_every_revision() -> None:
    asked = prompt(replace(GENERATION, adapter="sql", salt="tenant"))
    own_of_next = prompt(replace(NEXT, adapter="sql", salt="tenant")).hashes
    holders = known(of_pod(B, NEXT), pods=(B,))
    assert hashes_by_revision(holders, asked) == {GENERATION: asked.hashes, NEXT: own_of_next}


@pytest.mark.parametrize("change", [{"model": "other"}, {"tokenizer": "other"}, {"block_size_tokens": 4}])
def test_other_models_tokenizers_and_block_sizes_are_not_looked_up(change: dict[str, Any]) -> None:
    holders = known(of_pod(B, replace(GENERATION, **change)), pods=(B,))
    assert hashes_by_revision(holders, prompt()) == {GENERATION: prompt().hashes}


def test_a_revision_without_holders_is_not_looked_up() -> None:
    old = of_pod(B, NEXT)
    holders = known(old, pods=(B,))
    holders.drop(old.name)
    assert hashes_by_revision(holders, prompt()) == {GENERATION: prompt().hashes}
