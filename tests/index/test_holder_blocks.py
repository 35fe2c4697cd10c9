"""One holder's events as changes of its blocks, compared with sets and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.holder_blocks import SHARDS, Blocks, HashResolver, HolderBlocks
from router.types import BlockChange, BlockHash, BlocksRemoved, BlocksStored, Generation, Tier

GENERATION = Generation(model="m", block_size_tokens=2)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)
ONE, TWO, THREE, FOUR = hash_blocks(token_array(TOKENS), 2, generation_seed(GENERATION))
GPU, CPU = Tier.GPU, Tier.CPU


def stored(*hashes: int, parent: int | None = None, start: int = 0, size: int = 2, tier: Tier = GPU) -> BlocksStored:
    """The blocks of `TOKENS` from token `start` on, under the engine's own hashes."""
    tokens = TOKENS[start : start + size * len(hashes)]
    return BlocksStored(block_hashes=hashes, parent_hash=parent, tokens=tokens, block_size_tokens=size, tier=tier)


def hash_only(*hashes: int, tier: Tier = GPU) -> BlocksStored:
    """The paths of all blocks of the step, in order."""
    return BlocksStored(block_hashes=hashes, parent_hash=None, tokens=(), block_size_tokens=0, tier=tier)


def removed(*hashes: int, tier: Tier = GPU) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=hashes, tier=tier)


def applied(
    *events: BlocksStored | BlocksRemoved, resolve_hash: HashResolver | None = None
) -> tuple[HolderBlocks, list[list[BlockChange]]]:
    """A holder after these events, and the changes of each."""
    holder = HolderBlocks(GENERATION, resolve_hash)
    return holder, [holder.apply(event) for event in events]


def adds(*blocks: BlockHash, tier: Tier = GPU) -> list[BlockChange]:
    return [BlockChange(tier, True, list(blocks))]


def removes(*blocks: BlockHash, tier: Tier = GPU) -> list[BlockChange]:
    return [BlockChange(tier, False, list(blocks))]


# --- changes ---


def test_several_copies_yield_one_change() -> None:
    """With the first stored and the last removed copy; absent blocks cannot be removed."""
    _, changes = applied(stored(71), stored(71), removed(71), removed(71), removed(71))
    assert changes == [adds(ONE), [], [], removes(ONE), []]


def test_copies_are_counted_by_tier() -> None:
    """A block that was removed from one tier stays in the other."""
    holder, changes = applied(
        stored(71), stored(71, tier=CPU), stored(71, tier=CPU), removed(71), removed(71, tier=CPU), removed(71)
    )
    assert changes == [adds(ONE), adds(ONE, tier=CPU), [], removes(ONE), [], []]
    assert holder.held() == {CPU: [ONE]}


def test_a_full_counter_does_not_overflow_into_the_next_tier() -> None:
    holder, _ = applied(*[stored(71)] * (1 << 16))
    assert holder.apply(removed(71, tier=CPU)) == []


def test_only_new_blocks_of_an_event_are_changes() -> None:
    _, changes = applied(stored(71), stored(71, 72, 73), removed(72, 99, 71))
    assert changes == [adds(ONE), adds(TWO, THREE), removes(TWO)]


def test_a_block_with_two_engine_hashes_is_removed_with_the_last() -> None:
    """Engines may hash more than separates blocks here."""
    holder, changes = applied(stored(71), stored(81), stored(91), removed(81), removed(71), removed(91))
    assert changes == [adds(ONE), [], [], [], [], removes(ONE)]
    assert holder.held() == {}


def test_aliases_in_one_event_are_one_change() -> None:
    """A change lists each block once."""
    _, changes = applied(stored(71), stored(81), removed(71, 81))
    assert changes[-1] == removes(ONE)


def test_aliases_are_counted_by_tier() -> None:
    """Two hashes in two tiers are not aliases."""
    _, changes = applied(stored(71), stored(81, tier=CPU), removed(71), removed(81, tier=CPU))
    assert changes == [adds(ONE), adds(ONE, tier=CPU), removes(ONE), removes(ONE, tier=CPU)]


def test_an_engine_block_adds_and_removes_all_its_router_blocks() -> None:
    """Router blocks that another engine block shares stay."""
    _, changes = applied(stored(71, size=4), stored(81), stored(72, parent=71, start=4, size=4), removed(71, 72))
    assert changes == [adds(ONE, TWO), [], adds(THREE, FOUR), removes(TWO, THREE, FOUR)]


def test_a_hash_resolves_while_any_copy_exists() -> None:
    holder, _ = applied(stored(71, size=4), stored(71, size=4, tier=CPU), removed(71))
    assert (holder.blocks_of(71), holder.blocks_of(72)) == ((ONE, TWO), None)
    holder.apply(removed(71, tier=CPU))
    assert holder.blocks_of(71) is None


@pytest.mark.parametrize("orphan", [stored(72, 73, parent=71, start=2), hash_only(72, 73, tier=CPU)])
def test_orphans_are_counted_and_dropped(orphan: BlocksStored) -> None:
    """An unknown parent, and hashes without tokens."""
    holder, changes = applied(orphan)
    assert (changes, holder.orphans, holder.held()) == ([[]], 2, {})


# --- resolve_hash ---


def test_a_store_resolves_hashes_that_others_have_announced() -> None:
    """The resolved blocks can be parents."""
    holder, changes = applied(
        hash_only(71, 72, tier=CPU), stored(73, parent=72, start=4), resolve_hash={71: (ONE,), 72: (TWO,)}.get
    )
    assert changes == [adds(ONE, TWO, tier=CPU), adds(THREE)]
    assert holder.orphans == 0


def test_known_hashes_are_not_resolved_again() -> None:
    """Another holder may use the same hash for other blocks."""
    _, changes = applied(stored(71), hash_only(71, tier=CPU), resolve_hash={71: (FOUR,)}.get)
    assert changes == [adds(ONE), adds(ONE, tier=CPU)]


def test_an_unresolved_hash_is_added_by_a_later_retry() -> None:
    """Once; other unresolved hashes stay."""
    others: dict[int, Blocks] = {}
    holder, changes = applied(hash_only(71, 72, tier=CPU), resolve_hash=others.get)
    assert (changes, holder.retry(), holder.orphans) == ([[]], [], 0)
    others[72] = (TWO,)
    assert [holder.retry(), holder.retry()] == [adds(TWO, tier=CPU), []]
    others[71] = (ONE,)
    assert [holder.retry(), holder.retry()] == [adds(ONE, tier=CPU), []]


def test_a_removed_unresolved_hash_is_not_added() -> None:
    """In the tier it was removed from; it stays unresolved in others."""
    others: dict[int, Blocks] = {}
    holder, _ = applied(hash_only(71), hash_only(71, tier=CPU), removed(71), resolve_hash=others.get)
    others[71] = (ONE,)
    assert holder.retry() == adds(ONE, tier=CPU)
    assert holder.held() == {CPU: [ONE]}


def test_without_a_resolver_nothing_is_retried() -> None:
    holder, _ = applied(hash_only(71, tier=CPU), stored(71))
    assert holder.retry() == []


# --- against a model ---

Path = tuple[int, ...]
"""A chain of engine blocks, each hash_only 0 or 1. An engine block is two of the router's."""
ENGINE_BLOCK_TOKENS = 4


def engine_hash(alias: int, path: Path) -> int:
    """Two aliases of a path stand for the same block."""
    return alias * 1000 + int("1" + "".join(map(str, path)), 2)


def tokens_of(path: Path) -> list[int]:
    return [10 + name for name in path for _ in range(ENGINE_BLOCK_TOKENS)]


def blocks_of(path: Path) -> Blocks:
    """The router blocks of the path's last engine block."""
    return tuple(hash_blocks(token_array(tokens_of(path)), 2, generation_seed(GENERATION))[-2:])


@dataclass(frozen=True)
class Step:
    """One event for one engine hash."""

    kind: str
    alias: int
    path: Path
    blocks: int
    """How many of the path's last blocks a store announces."""
    tier: Tier

    def named(self) -> list[Path]:
        """The paths of all blocks of the step, in order."""
        first = len(self.path) - self.blocks if self.kind == "store" else len(self.path) - 1
        return [self.path[:end] for end in range(first + 1, len(self.path) + 1)]

    def event(self) -> BlocksStored | BlocksRemoved:
        hashes = tuple(engine_hash(self.alias, path) for path in self.named())
        if self.kind == "remove":
            return removed(*hashes, tier=self.tier)
        if self.kind == "name":
            return hash_only(*hashes, tier=self.tier)
        above = self.named()[0][:-1]
        return BlocksStored(
            block_hashes=hashes,
            parent_hash=engine_hash(self.alias, above) if above else None,
            tokens=tokens_of(self.path)[len(above) * ENGINE_BLOCK_TOKENS :],
            block_size_tokens=ENGINE_BLOCK_TOKENS,
            tier=self.tier,
        )


Copy = tuple[int, Path, Tier]


@dataclass
class NaiveHolder:
    """Copies of each block, unresolved hashes, and what the resolver returns."""

    copies: Counter[Copy] = field(default_factory=Counter)
    waiting: set[Copy] = field(default_factory=set)
    resolve_hash: dict[int, Blocks] = field(default_factory=dict)

    def knows(self, alias: int, path: Path) -> bool:
        return any(self.copies[alias, path, tier] for tier in Tier)

    def name(self, copies: Iterable[Copy]) -> None:
        for alias, path, tier in copies:
            if self.knows(alias, path) or engine_hash(alias, path) in self.resolve_hash:
                self.copies[alias, path, tier] += 1
            else:
                self.waiting.add((alias, path, tier))

    def take(self, step: Step) -> None:
        copies = [(step.alias, path, step.tier) for path in step.named()]
        above = step.named()[0][:-1]
        if step.kind == "name":
            self.name(copies)
        elif step.kind == "store" and (not above or self.knows(step.alias, above)):
            self.copies.update(copies)
        elif step.kind == "remove":
            self.waiting.difference_update(copies)
            self.copies -= Counter(copies)

    def retry(self) -> None:
        waiting, self.waiting = self.waiting, set()
        self.name(waiting)

    def held(self) -> set[tuple[BlockHash, Tier]]:
        return {(block, tier) for (_, path, tier), count in self.copies.items() if count for block in blocks_of(path)}


@st.composite
def steps(draw: st.DrawFn) -> Step:
    path = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)))
    return Step(
        kind=draw(st.sampled_from(["store"] * 4 + ["name"] * 3 + ["remove"] * 4 + ["learn", "retry"])),
        alias=draw(st.integers(0, 1)),
        path=path,
        blocks=draw(st.integers(1, len(path))),
        tier=draw(st.sampled_from([GPU, GPU, CPU])),
    )


@given(st.lists(steps(), max_size=40))
def test_the_sum_of_all_changes_is_what_is_held(happening: list[Step]) -> None:
    """After each step the sum of the changes, `held` and a model of copies agree."""
    naive, summed = NaiveHolder(), set[tuple[BlockHash, Tier]]()
    holder = HolderBlocks(GENERATION, lambda engine: naive.resolve_hash.get(engine))
    for step in happening:
        changes: list[BlockChange] = []
        if step.kind == "learn":
            naive.resolve_hash[engine_hash(step.alias, step.path)] = blocks_of(step.path)
        elif step.kind == "retry":
            changes = holder.retry()
            naive.retry()
        else:
            changes = holder.apply(step.event())
            naive.take(step)
        for change in changes:
            blocks = {(block, change.tier) for block in change.blocks}
            assert len(blocks) == len(change.blocks) > 0
            assert summed.isdisjoint(blocks) if change.held else summed >= blocks
            summed ^= blocks
        held = {(block, tier) for tier, blocks in holder.held().items() for block in blocks}
        assert summed == held == naive.held()


def test_a_single_gpu_copy_needs_no_counter() -> None:
    """Most blocks have one copy; there are hundreds of thousands."""
    holder, _ = applied(stored(71, 72, 73), stored(71), stored(72, tier=CPU), removed(71), removed(72, tier=CPU))
    assert not any(holder._copies)
    assert sorted(holder.held()[GPU]) == sorted((ONE, TWO, THREE))


def test_a_holder_is_freed_one_shard_at_a_time() -> None:
    """A shard of each large mapping."""
    holder, _ = applied(stored(71), stored(71))
    for left in reversed(range(SHARDS)):
        assert holder.free_next_shard() is (left == 0)
        assert {len(shards) for shards in vars(holder).values() if isinstance(shards, list)} == {left}


@pytest.mark.parametrize("engine_hashes", [range(20_000), range(0, 20_000 << 12, 1 << 12)])
def test_no_dict_has_more_than_a_fiftieth_of_the_blocks(engine_hashes: range) -> None:
    """A dict that grows moves all its entries at once. Engines may number their blocks in any pattern."""
    tokens = token_array(range(2 * len(engine_hashes)))
    holder = HolderBlocks(GENERATION)
    holder.apply(BlocksStored(block_hashes=tuple(engine_hashes), parent_hash=None, tokens=tokens, block_size_tokens=2))
    assert len(holder.held()[GPU]) == len(engine_hashes)
    assert max(len(found) for found in dicts_in(vars(holder))) < len(engine_hashes) / 50


def dicts_in(value: object) -> Iterator[dict[object, object]]:
    """The value, if it is a dict, and all dicts inside it."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        yield from dicts_in(one)


@pytest.mark.parametrize("adapter, salt", [("sql", ""), ("", "tenant"), ("sql", "tenant")])
def test_adapter_and_salt_seed_the_first_block(adapter: str, salt: str) -> None:
    _, changes = applied(replace(stored(71), adapter=adapter, salt=salt))
    own = replace(GENERATION, adapter=adapter, salt=salt)
    assert changes == [adds(*hash_blocks(token_array(TOKENS[:2]), 2, generation_seed(own)))]


# --- adapters ---


def of_adapter(*hashes: int, tokens: int = 4, tier: Tier = GPU, adapter: str = "sql") -> BlocksStored:
    return BlocksStored(block_hashes=hashes, tokens=TOKENS[:tokens], block_size_tokens=2, tier=tier, adapter=adapter)


def test_other_weights_under_the_name_of_an_adapter_drop_its_blocks() -> None:
    """The engine's hashes have the path of the weights, its events only the name. Others keep their blocks."""
    other = of_adapter(9, tokens=2, adapter="chat")
    holder, _ = applied(stored(1), other, of_adapter(71, 72, 73, tokens=6), of_adapter(71, tier=CPU, tokens=2))
    before = {tier: set(blocks) for tier, blocks in holder.held().items()}
    changes = holder.apply(of_adapter(81, tokens=2))
    assert [(change.tier, change.held, len(change.blocks)) for change in changes] == [
        (GPU, False, 3),
        (CPU, False, 1),
        (GPU, True, 1),
    ]
    assert set(holder.held()[GPU]) < before[GPU] and ONE in holder.held()[GPU]
    assert len(holder.held()[GPU]) == 3
    assert holder.apply(removed(72)) == [], "it was dropped"
    assert holder.apply(of_adapter(81, 82)) == adds(*(holder.blocks_of(82) or ())), "the new weights' blocks stay"


def test_the_same_weights_loaded_again_keep_their_blocks() -> None:
    holder, _ = applied(of_adapter(71, 72))
    assert holder.apply(of_adapter(71, 72, 73, tokens=6)) == adds(*(holder.blocks_of(73) or ()))
    assert len(holder.held()[GPU]) == 3


def test_prompts_of_an_adapter_that_part_within_an_engines_block_are_no_other_weights() -> None:
    """Seen on vLLM with blocks of 32 tokens: the end of an answer, then the next prompt, which begins like it."""
    first = replace(of_adapter(71, 72, tokens=8), block_size_tokens=4)
    holder, _ = applied(first)
    second = replace(first, block_hashes=(73,), parent_hash=71, tokens=(*TOKENS[4:6], 98, 99))
    changes = holder.apply(second)
    assert changes == adds(*(holder.blocks_of(73) or ())[1:]), "the first half is there already"
    assert holder.blocks_of(72) is not None and len(holder.held()[GPU]) == 5


def test_nothing_is_remembered_of_an_adapters_removed_blocks() -> None:
    holder, _ = applied(of_adapter(71, 72), removed(71, 72))
    assert holder._adapters == {} and holder.size_blocks == 0
