"""Announced blocks of several pods, compared with a model of plain sets and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, product
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.events import PIECE_BLOCKS, split_events
from router.index.holder_blocks import SHARDS
from router.types import (
    BlocksByTier,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Generation,
    KvEvent,
    PodId,
    PromptPrefix,
    Tier,
)

GENERATION = Generation(model="m", block_size_tokens=2)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)


def prompt(tokens: tuple[int, ...] = TOKENS, generation: Generation = GENERATION) -> PromptPrefix:
    flat = token_array(tokens)
    return PromptPrefix(generation, flat, hash_blocks(flat, generation.block_size_tokens, generation_seed(generation)))


def stored(
    *hashes: int,
    parent: int | None = None,
    start: int = 0,
    size: int = 2,
    tier: Tier = Tier.GPU,
    group: int = 0,
    adapter: str = "",
    salt: str = "",
) -> BlocksStored:
    """The blocks of `TOKENS` from token `start` on, under the engine's own hashes."""
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=parent,
        tokens=TOKENS[start : start + size * len(hashes)],
        block_size_tokens=size,
        tier=tier,
        group=group,
        adapter=adapter,
        salt=salt,
    )


def removed(*hashes: int, tier: Tier = Tier.GPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=hashes, tier=tier, group=group)


def placeholder(*hashes: int, tier: Tier) -> BlocksStored:
    return BlocksStored(block_hashes=hashes, parent_hash=None, tokens=(), block_size_tokens=0, tier=tier)


def after(*events: KvEvent, generation: Generation = GENERATION) -> BlockMap:
    """BlockMap with one pod, "a", after these events."""
    blocks = BlockMap()
    blocks.add_holder("a", generation)
    for event in events:
        blocks.apply("a", event)
    return blocks


def held(blocks: BlockMap, asked: PromptPrefix | None = None) -> BlocksByTier:
    return blocks.match(asked or prompt()).get("a", (0, 0, 0, 0))


def test_stored_blocks_are_matched_up_to_the_first_missing_one() -> None:
    """For any engine hashes."""
    blocks = after(stored(71, 72))
    assert held(blocks) == (2, 0, 0, 0)
    assert held(blocks, prompt((1, 2, 9, 9))) == (1, 0, 0, 0)
    assert blocks.match(prompt((9, 9, 3, 4))) == {}


def test_blocks_continue_those_of_their_parent() -> None:
    """Engines announce a prompt in several events."""
    assert held(after(stored(71), stored(72, 73, parent=71, start=2))) == (3, 0, 0, 0)


@given(st.integers(1, 3 * PIECE_BLOCKS), st.integers(1, 3 * PIECE_BLOCKS))
def test_a_long_event_is_applied_in_short_pieces(blocks: int, gone: int) -> None:
    """The final state is the same."""
    tokens = tuple(range(2 * blocks))
    long = BlocksStored(block_hashes=tuple(range(blocks)), parent_hash=None, tokens=tokens, block_size_tokens=2)
    pieces = list(split_events([long, removed(*range(blocks - min(gone, blocks), blocks))]))
    assert max(sum(len(one.block_hashes) for one in some if not isinstance(one, BlocksCleared)) for some in pieces) < (
        2 * PIECE_BLOCKS
    )
    assert held(after(*chain.from_iterable(pieces)), prompt(tokens)) == (max(blocks - gone, 0), 0, 0, 0)


def test_a_forgotten_pod_frees_its_blocks_shard_by_shard() -> None:
    """They are not matched any more; each lookup frees one shard."""
    found = after(stored(71, 72, 73, 74))
    blocks = ref(found.cache_of("a").blocks)
    found.forget("a")
    for left in range(SHARDS, 0, -1):
        assert blocks() is not None, f"{left} shards were freed too early"
        assert held(found) == (0, 0, 0, 0)
    assert blocks() is None


def test_events_free_the_blocks_of_a_forgotten_pod() -> None:
    found = after(stored(71, 72, 73, 74))
    blocks = ref(found.cache_of("a").blocks)
    found.forget("a")
    for _ in range(SHARDS):
        found.apply("b", stored(71))
    assert blocks() is None


def test_an_orphan_is_counted_and_dropped() -> None:
    """A late replay lacks the parent; the orphan's children have no parent either."""
    blocks = after(stored(72, 73, parent=71, start=2), stored(74, parent=73, start=6), placeholder(75, tier=Tier.CPU))
    assert blocks.match(prompt()) == {}
    assert (blocks.cache_of("a").blocks.orphans, blocks.block_holders) == (4, 0)


def test_a_block_stays_until_its_last_copy_is_removed() -> None:
    """A repeated prompt stores its last block again: stored twice, removed twice."""
    blocks = after(stored(71), stored(71), removed(71))
    assert held(blocks) == (1, 0, 0, 0)
    blocks.apply("a", removed(71))
    assert held(blocks) == (0, 0, 0, 0)
    assert blocks.block_holders == 0


def test_removing_an_absent_block_changes_nothing() -> None:
    """Unknown hashes, other tiers, and attention groups that are not indexed."""
    blocks = after(stored(71), removed(99), removed(71, tier=Tier.CPU), removed(71, group=1))
    assert held(blocks) == (1, 0, 0, 0)


def test_groups_count_their_own_copies() -> None:
    """A hybrid model stores the same hash once per attention group."""
    blocks = after(stored(71), stored(71, group=1), removed(71, group=1))
    assert held(blocks) == (1, 0, 0, 0)
    blocks.apply("a", removed(71))
    assert held(blocks) == (0, 0, 0, 0)


def test_a_placeholder_adds_a_tier_to_known_blocks() -> None:
    """A block that was removed from the GPU still counts in its other tier."""
    blocks = after(stored(71, 72), placeholder(71, 72, tier=Tier.CPU), removed(72))
    assert held(blocks) == (1, 1, 0, 0)


def test_a_block_in_another_tier_can_still_be_a_parent() -> None:
    blocks = after(stored(71), placeholder(71, tier=Tier.CPU), removed(71), stored(72, parent=71, start=2))
    assert held(blocks) == (1, 1, 0, 0)


def test_engine_blocks_may_be_multiples_of_the_routers() -> None:
    """One engine block of eight tokens is four router blocks of two, added and removed together."""
    blocks = after(stored(71, size=4), stored(72, parent=71, start=4, size=4))
    assert held(blocks) == (4, 0, 0, 0)
    blocks.apply("a", removed(72))
    assert held(blocks) == (2, 0, 0, 0)


@pytest.mark.parametrize("size", [1, 3])
def test_engine_blocks_of_any_other_size_are_rejected_with_a_reason(size: int) -> None:
    blocks = after(stored(71, size=size))
    assert blocks.match(prompt()) == {}
    reason = blocks.cache_of("a").blocks.rejected_reason
    assert str(size) in reason and "2" in reason
    assert after(stored(71)).cache_of("a").blocks.rejected_reason == ""


def test_a_cleared_pod_is_empty_and_can_store_again() -> None:
    """As after a reset of its prefix cache."""
    blocks = after(stored(71, 72), BlocksCleared())
    assert (held(blocks), blocks.block_holders) == ((0, 0, 0, 0), 0)
    blocks.apply("a", stored(71))
    assert held(blocks) == (1, 0, 0, 0)


def test_a_new_epoch_keeps_nothing_of_the_previous_one() -> None:
    """Not even parents."""
    blocks = after(stored(71))
    blocks.add_holder("a", GENERATION)
    blocks.apply("a", stored(72, parent=71, start=2))
    assert blocks.match(prompt()) == {} and blocks.cache_of("a").blocks.orphans == 1


def test_events_of_unknown_pods_are_ignored() -> None:
    """They can arrive after a pod was removed."""
    blocks = after(stored(71))
    blocks.forget("a")
    blocks.apply("a", stored(71))
    assert blocks.match(prompt()) == {} and blocks.cache_of("a").blocks.rejected_reason == ""


@pytest.mark.parametrize(
    "other",
    [{"model": "other"}, {"revision": "2"}, {"tokenizer": "other"}, {"kv_dtype": "fp8"}],
)
def test_the_same_tokens_of_another_generation_never_match(other: dict[str, str]) -> None:
    """In either direction."""
    elsewhere = replace(GENERATION, **other)  # type: ignore[arg-type]
    assert after(stored(71)).match(prompt(generation=elsewhere)) == {}
    assert after(stored(71), generation=elsewhere).match(prompt()) == {}


def test_an_events_adapter_and_salt_are_part_of_its_generation() -> None:
    """Child blocks follow through their parent."""
    blocks = after(stored(71, adapter="lora", salt="tenant"), stored(72, parent=71, start=2))
    own = replace(GENERATION, adapter="lora", salt="tenant")
    assert held(blocks, prompt(generation=own)) == (2, 0, 0, 0)
    assert held(blocks) == (0, 0, 0, 0)


def test_a_hash_used_for_two_caches_keeps_its_first_blocks() -> None:
    """SGLang does not hash every namespace. Nothing may remain when both are removed."""
    blocks = after(stored(71, salt="one"), stored(71, salt="two"))
    assert held(blocks, prompt(generation=replace(GENERATION, salt="one"))) == (1, 0, 0, 0)
    assert held(blocks, prompt(generation=replace(GENERATION, salt="two"))) == (0, 0, 0, 0)
    for event in (removed(71), removed(71)):
        blocks.apply("a", event)
    assert held(blocks, prompt(generation=replace(GENERATION, salt="one"))) == (0, 0, 0, 0)


def test_repeated_hits_do_not_overflow_into_the_next_tiers_count() -> None:
    """With `kv_cache_report_mode=full`."""
    blocks = after(*[stored(71)] * 70_000)
    assert held(blocks) == (1, 0, 0, 0)
    blocks.apply("a", removed(71, tier=Tier.CPU))
    assert (held(blocks), blocks.block_holders) == ((1, 0, 0, 0), 1)


# --- against a model ---

Path = tuple[int, ...]
"""A chain of engine blocks, each named 0 or 1: block `i` of a holder is its whole chain up to there."""
SIZES: dict[PodId, int] = {"a": 2, "b": 2, "c": 4}
SALTS = ("", "tenant")
DEPTH = 4


def tokens_of(path: Path, size: int) -> tuple[int, ...]:
    """Tokens of a block: its name, repeated."""
    return tuple(token for name in path for token in (10 + name,) * size)


def engine_hash(salt: str, path: Path) -> int:
    return hash((salt, path)) & (2**64 - 1)


@dataclass
class NaiveHolder:
    """Copies of each block by tier and group; blocks are (salt, path)."""

    copies: Counter[tuple[str, Path, Tier]] = field(default_factory=Counter)
    groups: set[int] = field(default_factory=set)

    def known(self, salt: str, path: Path) -> bool:
        return any(self.copies[salt, path, tier] for tier in Tier)

    def store(self, step: Step) -> None:
        self.groups.add(step.group)
        first = len(step.path) - step.blocks
        if step.placeholder:
            if self.known(step.salt, step.path):
                self.copies[step.salt, step.path, step.tier] += 1
        elif first == 0 or self.known(step.salt, step.path[:first]):
            for end in range(first + 1, len(step.path) + 1):
                self.copies[step.salt, step.path[:end], step.tier] += 1

    def remove(self, step: Step) -> None:
        key = step.salt, step.path, step.tier
        if step.group in self.groups and self.copies[key]:
            self.copies[key] -= 1

    def run(self, salt: str, asked: Path) -> BlocksByTier:
        """In engine blocks."""
        counts = [0, 0, 0, 0]
        for end in range(1, len(asked) + 1):
            tiers = [tier for tier in Tier if self.copies[salt, asked[:end], tier]]
            if not tiers:
                break
            counts[min(tiers)] += 1
        return (counts[0], counts[1], counts[2], counts[3])


@dataclass(frozen=True)
class Step:
    """One event of one pod."""

    kind: str
    pod: PodId
    salt: str
    path: Path
    blocks: int
    """How many of the path's last blocks a store announces."""
    tier: Tier
    group: int
    placeholder: bool

    def event(self) -> KvEvent:
        if self.kind == "clear":
            return BlocksCleared()
        if self.kind == "remove":
            return removed(engine_hash(self.salt, self.path), tier=self.tier, group=self.group)
        first, size = len(self.path) - self.blocks, SIZES[self.pod]
        if self.placeholder:
            return replace(placeholder(engine_hash(self.salt, self.path), tier=self.tier), group=self.group)
        return BlocksStored(
            block_hashes=tuple(engine_hash(self.salt, self.path[:end]) for end in range(first + 1, len(self.path) + 1)),
            parent_hash=engine_hash(self.salt, self.path[:first]) if first else None,
            tokens=tokens_of(self.path[first:], size),
            block_size_tokens=size,
            tier=self.tier,
            group=self.group,
            salt=self.salt,
        )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    path = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH)))
    return Step(
        kind=draw(st.sampled_from(["store"] * 5 + ["remove"] * 3 + ["clear", "restart", "forget"])),
        pod=draw(st.sampled_from(sorted(SIZES))),
        salt=draw(st.sampled_from(SALTS)),
        path=path,
        blocks=draw(st.integers(1, len(path))),
        tier=draw(st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU])),
        group=draw(st.sampled_from([0, 0, 0, 1])),
        placeholder=draw(st.integers(0, 4)) == 0,
    )


def prompts_of() -> Iterator[tuple[str, Path, int]]:
    """All prompts of full depth: salt, path, and the engine block size of the path."""
    return product(SALTS, product((0, 1), repeat=DEPTH), sorted(set(SIZES.values())))


def naive_match(holders: dict[PodId, NaiveHolder], salt: str, path: Path, size: int) -> dict[PodId, BlocksByTier]:
    """In router blocks; pods with another block size are skipped."""
    each = size // GENERATION.block_size_tokens
    found = {pod: holder.run(salt, path) for pod, holder in holders.items() if SIZES[pod] == size}
    return {
        pod: (gpu * each, cpu * each, disk * each, remote * each)
        for pod, (gpu, cpu, disk, remote) in found.items()
        if any((gpu, cpu, disk, remote))
    }


def assert_equal(blocks: BlockMap, holders: dict[PodId, NaiveHolder]) -> None:
    for salt, path, size in prompts_of():
        asked = prompt(tokens_of(path, size), replace(GENERATION, salt=salt))
        found = {pod: run for pod, run in blocks.match(asked).items() if SIZES[pod] == size}
        assert found == naive_match(holders, salt, path, size)


def apply_step(step: Step, blocks: BlockMap, holders: dict[PodId, NaiveHolder]) -> None:
    """Apply one step to the map and to the model."""
    if step.kind == "forget":
        blocks.forget(step.pod)
        holders.pop(step.pod, None)
    elif step.kind == "restart":
        blocks.add_holder(step.pod, GENERATION)
        holders[step.pod] = NaiveHolder()
    else:
        blocks.apply(step.pod, step.event())
        holder = holders.get(step.pod)
        if holder is None:
            return
        if step.kind == "store":
            holder.store(step)
        elif step.kind == "remove":
            holder.remove(step)
        else:
            holders[step.pod] = NaiveHolder()


@given(st.lists(steps(), max_size=40))
def test_the_map_matches_as_sets_and_counts_do(happening: list[Step]) -> None:
    """Any order of stores, removals, clears, restarts and departures: several pods, sizes, salts, tiers, groups."""
    blocks, holders = BlockMap(), dict[PodId, NaiveHolder]()
    for pod in SIZES:
        blocks.add_holder(pod, GENERATION)
        holders[pod] = NaiveHolder()
    for step in happening:
        apply_step(step, blocks, holders)
    assert_equal(blocks, holders)
    for pod in SIZES:
        blocks.forget(pod)
    assert blocks.block_holders == 0


@given(st.lists(steps().map(lambda step: replace(step, kind="store", pod="a")), min_size=1, max_size=20))
def test_more_stored_blocks_never_shorten_a_match(stores: list[Step]) -> None:
    blocks = BlockMap()
    blocks.add_holder("a", GENERATION)
    asked = [
        prompt(tokens_of(path, 2), replace(GENERATION, salt=salt)) for salt, path, size in prompts_of() if size == 2
    ]
    before = [0] * len(asked)
    for step in stores:
        blocks.apply("a", step.event())
        now = [sum(held(blocks, one)) for one in asked]
        assert all(after >= earlier for after, earlier in zip(now, before, strict=True))
        before = now
