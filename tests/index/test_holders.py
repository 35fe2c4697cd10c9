"""Which holder is which pod, and what a pod may read from a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.holders import ALL_PODS, HolderFacts, Holders, KnownHolder, holder_name
from router.types import BlocksByTier, Generation, Pod, PodSpeed, PromptPrefix

GENERATION = Generation(model="m", revision="1", tokenizer="t", block_size_tokens=2)
NEXT = replace(GENERATION, revision="2")
OTHER_GENERATIONS = [
    {"model": "other"},
    {"revision": "2"},
    {"tokenizer": "other"},
    {"kv_dtype": "fp8"},
    {"block_size_tokens": 4},
]


def make_pod(pod_id: str, **facts: Any) -> Pod:
    """A pod by id, on a host of that name."""
    usual: dict[str, Any] = {"url": f"http://{pod_id}:8000", "engine": "vllm", "speed": PodSpeed(1.0, 0.1, 0.0)}
    return Pod(id=pod_id, **(usual | facts))


def holder(holder_id: str, generation: Generation = GENERATION, **facts: Any) -> KnownHolder:
    return KnownHolder(id=holder_id, generation=generation, facts=HolderFacts(**facts), epoch=1, seq=0, last_seen_s=0.0)


def of_pod(pod: Pod, generation: Generation = GENERATION) -> KnownHolder:
    """What a publisher tells of this pod, under an id of its own."""
    rank = -1 if pod.dp_rank is None else pod.dp_rank
    return holder(f"published {pod.id}", generation, url=pod.url, rank=rank)


def known(*holders: KnownHolder, pods: tuple[Pod, ...], generation: Generation = GENERATION) -> Holders:
    """These holders, and these pods, which serve `generation` for all that is known here."""
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
    """Whatever it calls itself; one with another URL is nobody's."""
    mine, other = of_pod(A), holder("a", url="http://elsewhere:8000")
    holders = known(mine, other, pods=(A, B))
    assert holders.by_pod([{mine.name: (3, 0, 0, 0), other.name: (9, 0, 0, 0)}]) == {"a": (3, 0, 0, 0)}
    assert (holders.publisher_of("a"), holders.publisher_of("b")) == (mine, None)


def test_ranks_of_one_url_are_pods_of_their_own() -> None:
    """Each data-parallel rank has a cache; a pod without ranks is none of them."""
    ranks = tuple(make_pod(f"a@{rank}", url="http://a", dp_rank=rank) for rank in (0, 1))
    published = [of_pod(pod) for pod in (*ranks, make_pod("a", url="http://a"))]
    holders = known(*published, pods=ranks)
    runs: list[BlocksByTier] = [(1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]
    found = holders.by_pod([{one.name: run for one, run in zip(published, runs, strict=True)}])
    assert found == {"a@0": (1, 0, 0, 0), "a@1": (2, 0, 0, 0)}


@pytest.mark.parametrize("pod_first", [True, False])
def test_it_does_not_matter_who_comes_first(pod_first: bool) -> None:
    """Discovery and the index are read independently."""
    mine, holders = of_pod(A), Holders()
    if pod_first:
        holders.bind(A, GENERATION)
    holders.put(mine)
    holders.bind(A, GENERATION)
    assert holders.by_pod([{mine.name: (1, 0, 0, 0)}]) == {"a": (1, 0, 0, 0)}


def test_a_pod_that_left_holds_nothing_here() -> None:
    """Its holder stays known until its publisher says otherwise, and a pod that comes back is found again."""
    mine, of_b = of_pod(A), of_pod(B)
    holders = known(mine, of_b, STORE, pods=(A, B))
    runs: list[tuple[str, BlocksByTier]] = [(one.name, (1, 0, 0, 0)) for one in (mine, of_b, STORE)]
    holders.unbind("a")
    assert holders.by_pod([dict(runs)]) == {"b": (1, 0, 0, 0)}
    assert (holders.get(mine.name), holders.publisher_of("a")) == (mine, None)
    holders.bind(A, GENERATION)
    assert holders.by_pod([dict(runs)]) == {"a": (1, 0, 0, 0), "b": (1, 0, 0, 0)}


def test_a_holder_that_is_dropped_is_unknown() -> None:
    """Blocks that are still found under its name are nobody's; dropping it again changes nothing."""
    mine = of_pod(A)
    holders = known(mine, STORE, pods=(A,))
    for one in (mine, STORE, STORE):
        holders.drop(one.name)
    assert holders.by_pod([{mine.name: (3, 0, 0, 0), STORE.name: (4, 0, 0, 0)}]) == {}
    assert (list(holders), holders.publisher_of("a")) == ([], None)


def test_a_holder_is_put_in_place_of_the_one_of_its_name() -> None:
    """It may have moved to another pod meanwhile."""
    moved = holder(of_pod(A).id, url=B.url)
    holders = known(of_pod(A), moved, pods=(A, B))
    assert list(holders) == [moved]
    assert holders.by_pod([{moved.name: (1, 0, 0, 0)}]) == {"b": (1, 0, 0, 0)}


@pytest.mark.parametrize("other", OTHER_GENERATIONS)
def test_a_name_tells_generations_apart(other: dict[str, Any]) -> None:
    """Adapter and salt are in the hashes; a holder has blocks of all of them."""
    assert holder_name(replace(GENERATION, **other), "a") != holder_name(GENERATION, "a")
    assert holder_name(replace(GENERATION, adapter="sql", salt="tenant"), "a") == holder_name(GENERATION, "a")


# --- what a store is worth to a pod ---


def test_a_store_extends_a_pods_own_run_and_only_beyond_it() -> None:
    """What the pod has it need not fetch; what both have counts where the pod has it."""
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


def test_a_stores_blocks_add_to_those_that_a_pod_has_remotely() -> None:
    """Engines may announce a remote tier themselves."""
    mine = of_pod(A)
    holders = known(mine, STORE, pods=(A,))
    assert holders.by_pod([{mine.name: (1, 0, 0, 2), STORE.name: (0, 0, 0, 4)}]) == {"a": (1, 0, 0, 3)}


def test_of_several_stores_the_longest_run_counts() -> None:
    """In whatever order they are found."""
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
def test_a_store_of_a_host_reaches_the_pods_on_it(pod: Pod, reached: bool) -> None:
    """By their configured host, else by that of their URL."""
    shelf = holder("shelf", reach="node-1")
    found = known(shelf, pods=(pod,)).by_pod([{shelf.name: (0, 2, 0, 0)}])
    assert found == ({"a": (0, 0, 0, 2)} if reached else {})


def test_a_store_is_no_pod_even_at_a_pods_url() -> None:
    """It is read from, at the price of a store."""
    shelf = holder("shelf", url=A.url, reach=ALL_PODS)
    holders = known(shelf, pods=(A,))
    assert holders.by_pod([{shelf.name: (0, 3, 0, 0)}]) == {"a": (0, 0, 0, 3)}
    assert holders.publisher_of("a") is None


@pytest.mark.parametrize("other", OTHER_GENERATIONS)
def test_a_store_of_another_generation_is_not_readable(other: dict[str, Any]) -> None:
    """Its KV is not what the pod would compute."""
    shelf = holder("shelf", replace(GENERATION, **other), reach=ALL_PODS)
    assert known(shelf, pods=(A,)).by_pod([{shelf.name: (0, 0, 0, 3)}]) == {}


def test_what_a_pod_serves_its_publisher_knows_best() -> None:
    """While new weights roll out, each pod reads the store of its own; without a publisher, what was bound counts."""
    mine, new_store = of_pod(A, NEXT), holder("store", NEXT, reach=ALL_PODS)
    holders = known(mine, STORE, new_store, pods=(A, B))
    assert holders.by_pod([{STORE.name: (0, 0, 0, 3), new_store.name: (0, 0, 0, 7)}]) == {
        "a": (0, 0, 0, 7),
        "b": (0, 0, 0, 3),
    }


BY_TIER = st.tuples(*[st.integers(0, 3)] * 4)


@settings(max_examples=60)
@given(own=BY_TIER, stores=st.lists(st.tuples(st.sampled_from([ALL_PODS, "a", "b"]), BY_TIER), max_size=4))
def test_a_pods_run_is_the_longest_within_its_reach(own: BlocksByTier, stores: list[tuple[str, BlocksByTier]]) -> None:
    """And its own blocks count as they are, however much the stores have."""
    mine = of_pod(A)
    shelves = [holder(f"store {number}", reach=reach) for number, (reach, _) in enumerate(stores)]
    holders = known(mine, *shelves, pods=(A,))
    runs = [(shelf.name, run) for shelf, (_, run) in zip(shelves, stores, strict=True)]
    gpu, cpu, disk, remote = holders.by_pod([dict([*runs, (mine.name, own)])])["a"]
    assert (gpu, cpu, disk) == own[:3] and remote >= own[3]
    assert gpu + cpu + disk + remote == max(sum(own), *[sum(run) for reach, run in stores if reach != "b"], 0)


# --- hashes ---


def hashes_by_revision(holders: Holders, asked: PromptPrefix) -> dict[Generation, Sequence[int]]:
    return dict(holders.hashes(asked))


def test_a_prompt_is_looked_up_under_its_own_hashes() -> None:
    """Once, even if there are holders of its generation, or none at all."""
    asked = prompt()
    assert hashes_by_revision(Holders(), asked) == {GENERATION: asked.hashes}
    assert list(known(of_pod(A), STORE, pods=(A,)).hashes(asked)) == [(GENERATION, asked.hashes)]


@pytest.mark.parametrize("change", [{"revision": "2"}, {"kv_dtype": "fp8"}])
def test_pods_of_other_weights_are_found_under_their_own_hashes(change: dict[str, Any]) -> None:
    """The same tokens, seeded by the generation that the holder says it has."""
    other = replace(GENERATION, **change)
    found = hashes_by_revision(known(of_pod(A), of_pod(B, other), pods=(A, B)), prompt())
    assert found == {GENERATION: prompt().hashes, other: prompt(other).hashes}


def test_an_adapter_and_a_salt_hold_for_every_revision() -> None:
    """They are the request's; holders are named without them."""
    asked = prompt(replace(GENERATION, adapter="sql", salt="tenant"))
    own_of_next = prompt(replace(NEXT, adapter="sql", salt="tenant")).hashes
    holders = known(of_pod(B, NEXT), pods=(B,))
    assert hashes_by_revision(holders, asked) == {GENERATION: asked.hashes, NEXT: own_of_next}


@pytest.mark.parametrize("change", [{"model": "other"}, {"tokenizer": "other"}, {"block_size_tokens": 4}])
def test_where_the_same_tokens_are_other_blocks_nothing_is_looked_up(change: dict[str, Any]) -> None:
    """Another model, tokenizer or block size shares nothing with the prompt."""
    holders = known(of_pod(B, replace(GENERATION, **change)), pods=(B,))
    assert hashes_by_revision(holders, prompt()) == {GENERATION: prompt().hashes}


def test_a_revision_that_nobody_has_any_longer_is_not_looked_up() -> None:
    """Once its last holder was dropped."""
    old = of_pod(B, NEXT)
    holders = known(old, pods=(B,))
    holders.drop(old.name)
    assert hashes_by_revision(holders, prompt()) == {GENERATION: prompt().hashes}
