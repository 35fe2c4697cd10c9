"""Announced and predicted blocks combined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec
import pytest

from loadtest.simulator.router_view import HashStore
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.hit_probe import CacheHabits
from router.index.holders import HolderFacts
from router.index.layers import HitRule
from router.stores.prefix_store import LocalStore, ReplicaStore
from router.types import (
    AttentionKind,
    BlockChange,
    BlocksRemoved,
    BlocksStored,
    Generation,
    LayerType,
    PrefixMatch,
    PromptPrefix,
    Tier,
)
from tests.kit.scenes import make_pod

GENERATION = Generation(model="m", revision="1", tokenizer="t", kv_dtype="auto", block_size_tokens=2)
TOKENS = (1, 2, 3, 4, 5, 6)


POD = make_pod()


def prompt(generation: Generation = GENERATION) -> PromptPrefix:
    tokens = token_array(TOKENS)
    return PromptPrefix(generation, tokens, hash_blocks(tokens, 2, generation_seed(generation)))


def stored(blocks: int, tier: Tier = Tier.GPU) -> BlocksStored:
    return BlocksStored(
        block_hashes=tuple(range(blocks)),
        parent_hash=None,
        tokens=TOKENS[: 2 * blocks],
        block_size_tokens=2,
        tier=tier,
    )


@pytest.fixture
def store() -> LocalStore:
    """A store with one pod, "a"."""
    store = LocalStore()
    store.add_holder(POD, GENERATION)
    return store


def test_local_store_is_a_prefix_store() -> None:
    store = LocalStore()
    assert store.match(prompt(), 0.0) == PrefixMatch()


def test_announced_blocks_are_matched_in_their_tiers(store: LocalStore) -> None:
    """Until they are removed."""
    store.apply("a", [stored(2), stored(3, Tier.CPU)])
    assert store.match(prompt(), 1e9) == PrefixMatch({"a": (2, 1, 0, 0)})
    assert store.block_holders == 5


@pytest.mark.parametrize(("announced", "matched"), [(1, 3), (3, 3)])
def test_the_longer_of_announced_and_predicted_counts(store: LocalStore, announced: int, matched: int) -> None:
    """A dispatch counts before the engine announces it, but is not an announced block."""
    store.apply("a", [stored(announced)])
    store.confirm(store.predict("a", prompt(), ttl_s=2.0, capacity_blocks=None), 0.0)
    assert store.match(prompt(), 1.0).held_blocks("a") == matched
    assert store.match(prompt(), 2.0).held_blocks("a") == announced
    assert store.cache_of("a").full_and_hit(prompt()) == (announced, announced)


@pytest.mark.parametrize("order", ["computed first", "announced first"])
def test_a_prompt_that_was_announced_ends_with_its_eviction(store: LocalStore, order: str) -> None:
    """However soon that is. Its first chunk alone does not end the prediction of the rest."""
    prediction = store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None)
    store.apply("a", [stored(2)])
    assert store.match(prompt(), 0.0).held_blocks("a") == 3
    if order == "computed first":
        store.confirm(prediction, 0.0)
    last = BlocksStored(block_hashes=(2,), parent_hash=1, tokens=TOKENS[4:], block_size_tokens=2)
    store.apply("a", [last, BlocksRemoved(block_hashes=(2,))])
    if order == "announced first":
        store.confirm(prediction, 0.0)
    assert store.match(prompt(), 0.1).held_blocks("a") == 2


def test_a_prompt_that_hit_completely_ends_with_its_eviction(store: LocalStore) -> None:
    """The pod announces nothing for it. Evicted before it was computed, its blocks will be there again."""
    store.apply("a", [stored(3)])
    computed, waits = (store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None) for _ in range(2))
    store.confirm(computed, 0.0)
    store.apply("a", [BlocksRemoved(block_hashes=(2, 1))])
    assert store.match(prompt(), 0.1).held_blocks("a") == 3
    store.withdraw(waits)
    assert store.match(prompt(), 0.1).held_blocks("a") == 1


def test_a_drafter_shortens_hits_and_not_what_was_announced(store: LocalStore) -> None:
    """The self-test counts what was announced."""
    store.apply("a", [stored(3)])
    store.learn("a", CacheHabits(drops_block=True))
    assert store.match(prompt(), 0.0).held_blocks("a") == 1
    store.predict("a", prompt(), ttl_s=2.0, capacity_blocks=None)
    assert store.match(prompt(), 0.0).held_blocks("a") == 1
    assert store.cache_of("a").full_and_hit(prompt()) == (3, 1)


def test_pods_without_events_are_matched_by_prediction(store: LocalStore) -> None:
    """Up to their capacity."""
    store.confirm(store.predict("silent", prompt(), ttl_s=600.0, capacity_blocks=2), 0.0)
    assert store.match(prompt(), 1.0) == PrefixMatch({"silent": (2, 0, 0, 0)})


WINDOW = LayerType(AttentionKind.WINDOW, 2, span_tokens=4)
"""A hit needs two blocks."""
END = BlocksStored(block_hashes=(0, 1), group=1, layers=WINDOW)
"""What the window keeps of the prompt."""


def with_window(store: LocalStore, blocks: int) -> None:
    """Full attention of "a" has this number of blocks of the prompt, a window has none of them."""
    window = BlocksStored(block_hashes=(99,), group=1, layers=WINDOW)
    other = BlocksStored(block_hashes=(99,), tokens=(98, 99), block_size_tokens=2)
    store.apply("a", [window, other, stored(blocks)])


def of_tokens(*tokens: int) -> PromptPrefix:
    array = token_array(tokens)
    return msgspec.structs.replace(prompt(), tokens=array, hashes=hash_blocks(array, 2, generation_seed(GENERATION)))


def test_a_pod_with_windows_keeps_the_end_of_a_prompt_that_it_computes(store: LocalStore) -> None:
    """It counts from the dispatch until the pod's events have had time to arrive; its other blocks never do."""
    with_window(store, 0)
    prediction = store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None)
    assert store.match(prompt(), 1.0).held_blocks("a") == 2
    assert store.match(of_tokens(*TOKENS, 7, 8), 1.0).held_blocks("a") == 2
    assert store.match(of_tokens(*TOKENS[:4]), 1.0).held_blocks("a") == 0
    store.confirm(prediction, 1.0)
    assert store.match(prompt(), 3.9).held_blocks("a") == 2
    assert store.match(prompt(), 4.1).held_blocks("a") == 0
    assert len(store.predicted.checkpoints) == 0


@pytest.mark.parametrize("announced", [True, False])
def test_the_second_of_a_shared_prefix_keeps_its_end(store: LocalStore, announced: bool) -> None:
    """Full attention has it from the first, which is announced or being computed: the third hits it."""
    with_window(store, 2 if announced else 0)
    if not announced:
        store.predict("a", of_tokens(*TOKENS, 7, 8), ttl_s=30.0, capacity_blocks=None)
    second, third = of_tokens(*TOKENS[:4], 21, 22, 23, 24, 25), of_tokens(*TOKENS[:4], 31, 32)
    assert store.match(second, 0.0).held_blocks("a") == 0
    store.predict("a", second, ttl_s=30.0, capacity_blocks=None)
    assert store.match(third, 0.0).held_blocks("a") == 2


def test_a_prompt_that_was_not_computed_keeps_nothing(store: LocalStore) -> None:
    with_window(store, 0)
    computed, failed = (store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None) for _ in range(2))
    store.confirm(computed, 0.0)
    store.withdraw(failed)
    assert store.match(prompt(), 1.0).held_blocks("a") == 2
    store.match(prompt(), 4.0)
    late = store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None)
    store.forget("a")
    store.withdraw(late)
    assert len(store.predicted.checkpoints) == 0


@pytest.mark.parametrize("order", ["confirmed last", "withdrawn last"])
def test_a_checkpoint_of_several_prompts_is_dropped_with_the_last(store: LocalStore, order: str) -> None:
    with_window(store, 0)
    one, other = (store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None) for _ in range(2))
    store.confirm(one, 0.0)
    assert store.match(prompt(), 10.0).held_blocks("a") == 2
    if order == "confirmed last":
        store.confirm(other, 10.0)
    else:
        store.withdraw(other)
    assert store.match(prompt(), 20.0).held_blocks("a") == 0
    assert len(store.predicted.checkpoints) == 0


@pytest.mark.parametrize("order", ["computed first", "announced first"])
@pytest.mark.parametrize(("evicted", "hit"), [(0, 0), (1, 1)])
def test_a_checkpoint_that_was_announced_ends_with_its_eviction(
    store: LocalStore, order: str, evicted: int, hit: int
) -> None:
    """However soon that is. At the beginning of a prompt, a hit needs fewer blocks."""
    with_window(store, 0)
    prediction = store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None)
    if order == "computed first":
        store.confirm(prediction, 1.0)
    store.apply("a", [END, stored(3)])
    if order == "announced first":
        store.confirm(prediction, 1.0)
    assert store.match(prompt(), 1.1).held_blocks("a") == 2
    store.apply("a", [BlocksRemoved(block_hashes=(evicted,), group=1)])
    assert store.match(prompt(), 1.2).held_blocks("a") == hit


RULE = HitRule.of([LayerType(AttentionKind.FULL, 2), WINDOW], groups=2)


def simulated(rule: HitRule | None = RULE) -> tuple[LocalStore, Callable[[BlockChange], None]]:
    """A simulated router's store, and how it gets changes."""
    store = HashStore("m", ["a"], rule)
    return store, partial(store.apply_blocks, "a")


def replicated(rule: HitRule | None = RULE) -> tuple[LocalStore, Callable[[BlockChange], None]]:
    """A store that reads Redis, and how it gets changes."""
    store = ReplicaStore(ClusterIndex(holder_ttl_s=60), max_age_s=60)
    store.add_holder(POD, GENERATION)
    store.mark_current(0.0)
    numbers = count()

    def write(*changes: BlockChange) -> None:
        seq = next(numbers)
        entry = LogEntry(
            kind=EntryKind.CHANGE if seq else EntryKind.EMPTY,
            holder="a",
            epoch=1,
            seq=seq,
            facts=HolderFacts(url=POD.url, rule=rule),
            changes=changes,
        )
        assert store.apply_entry(GENERATION, entry, 0.0)

    write()
    return store, write


@pytest.mark.parametrize("new", [simulated, replicated])
def test_so_do_blocks_that_are_not_announced_by_the_pod_itself(
    new: Callable[..., tuple[LocalStore, Callable[[BlockChange], None]]],
) -> None:
    store, apply = new(None)
    store.confirm(store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None), 1.0)
    apply(BlockChange(Tier.GPU, True, prompt().hashes))
    apply(BlockChange(Tier.GPU, False, prompt().hashes[1:]))
    assert store.match(prompt(), 1.1).held_blocks("a") == 1


@pytest.mark.parametrize("new", [simulated, replicated])
def test_so_does_one_that_is_not_announced_by_the_pod_itself(
    new: Callable[[], tuple[LocalStore, Callable[[BlockChange], None]]],
) -> None:
    store, apply = new()
    store.confirm(store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None), 1.0)
    assert store.match(prompt(), 1.1).held_blocks("a") == 2
    apply(BlockChange(Tier.GPU, True, prompt().hashes))
    apply(BlockChange(Tier.GPU, True, prompt().hashes[:2], 1))
    assert store.match(prompt(), 1.1).held_blocks("a") == 2
    apply(BlockChange(Tier.GPU, False, prompt().hashes[:1], 1))
    assert store.match(prompt(), 1.2).held_blocks("a") == 0


def test_a_prompt_keeps_nothing_more_where_it_hits(store: LocalStore) -> None:
    """The pod announces nothing, and evicts the checkpoint that it had before."""
    with_window(store, 3)
    store.apply("a", [END])
    store.confirm(store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None), 1.0)
    store.apply("a", [BlocksRemoved(block_hashes=(0,), group=1)])
    assert store.match(prompt(), 1.1).held_blocks("a") == 0


def test_a_window_that_lost_its_first_block_is_announced_again(store: LocalStore) -> None:
    """A window frees its first blocks while the answer grows. A prompt that is computed again is kept twice."""
    with_window(store, 0)
    store.apply("a", [END, stored(3), BlocksRemoved(block_hashes=(0,), group=1)])
    store.confirm(store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None), 1.0)
    assert store.match(prompt(), 1.1).held_blocks("a") == 2
    store.apply("a", [END, stored(3), BlocksRemoved(block_hashes=(0,), group=1)])
    assert store.match(prompt(), 1.2).held_blocks("a") == 0


def test_a_checkpoint_is_kept_again_by_a_later_prompt(store: LocalStore) -> None:
    """The end of the first one's time does not end it."""
    with_window(store, 0)
    store.confirm(store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None), 0.0)
    store.apply("a", [END, stored(3), BlocksRemoved(block_hashes=(0,), group=1)])
    late = store.predict("a", prompt(), ttl_s=30.0, capacity_blocks=None)
    assert store.match(prompt(), 10.0).held_blocks("a") == 2
    store.withdraw(late)
    assert store.match(prompt(), 10.0).held_blocks("a") == 0


@pytest.mark.parametrize("evicted", [True, False])
def test_a_computed_prefix_is_shared_until_it_is_evicted(store: LocalStore, evicted: bool) -> None:
    """The second prompt keeps the end of what it shares with the first, unless full attention has evicted that."""
    with_window(store, 0)
    first, second = of_tokens(*TOKENS, 7, 8), of_tokens(*TOKENS[:4], 21, 22, 23, 24, 25)
    store.confirm(store.predict("a", first, ttl_s=30.0, capacity_blocks=None), 0.0)
    if evicted:
        tokens = (*TOKENS, 7, 8)
        store.apply("a", [BlocksStored(block_hashes=(0, 1, 2, 3), tokens=tokens, block_size_tokens=2)])
        store.apply("a", [BlocksRemoved(block_hashes=(3, 2, 1, 0))])
    store.predict("a", second, ttl_s=30.0, capacity_blocks=None)
    assert store.match(of_tokens(*TOKENS[:4], 31, 32), 0.1).held_blocks("a") == (0 if evicted else 2)


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_removed_or_restarted_pod_has_no_blocks(store: LocalStore, forgotten: bool) -> None:
    """Neither announced nor predicted."""
    store.apply("a", [stored(3)])
    store.confirm(store.predict("a", prompt(), ttl_s=2.0, capacity_blocks=None), 0.0)
    if forgotten:
        store.forget("a")
    else:
        store.add_holder(POD, GENERATION)
    assert store.match(prompt(), 1.0) == PrefixMatch()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"revision": "2"},
        {"tokenizer": "other"},
        {"kv_dtype": "fp8"},
        {"adapter": "lora"},
        {"salt": "tenant"},
    ],
)
def test_other_generations_do_not_match(store: LocalStore, other: dict[str, str]) -> None:
    """The same tokens under another model, revision, tokenizer, KV type, adapter or salt are other blocks."""
    store.apply("a", [stored(3)])
    store.confirm(store.predict("a", prompt(), ttl_s=2.0, capacity_blocks=None), 0.0)
    elsewhere = replace(GENERATION, **other)  # type: ignore[arg-type]
    assert store.match(prompt(elsewhere), 1.0) == PrefixMatch()


def test_a_wrong_block_size_is_reported(store: LocalStore) -> None:
    assert store.cache_of("a").blocks.rejected_reason == ""
    store.apply("a", [replace(stored(2), block_size_tokens=3, block_hashes=(1,), tokens=(1, 2, 3))])
    assert "3" in store.cache_of("a").blocks.rejected_reason


# --- pods that do not announce which blocks they have ---


def test_a_pod_of_windows_alone_is_predicted_until_full_attention_is_announced(store: LocalStore) -> None:
    """The events of windows do not say which blocks they name."""
    window = BlocksStored(block_hashes=(1,), group=0, layers=LayerType(AttentionKind.WINDOW, 2, span_tokens=4))
    store.apply("a", [window])
    assert store.unnamed == {"a"}
    store.confirm(store.predict("a", prompt(), ttl_s=1200.0, capacity_blocks=99), 0.0)
    assert store.match(prompt(), 1000.0).held_blocks("a") == 3
    store.apply("a", [replace(stored(1), group=1)])
    assert not store.unnamed
    assert store.match(prompt(), 1000.0).held_blocks("a") == 0
