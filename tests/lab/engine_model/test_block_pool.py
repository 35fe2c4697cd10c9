"""The block pool: matches, eviction and KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine_model.block_pool import BlockPool, PodBlockTable, chain_seed
from router.hashing import token_array
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

BLOCK = 4


def table_of(tokens: Iterable[int], adapter: str = "", salt: str = "") -> PodBlockTable:
    return PodBlockTable(token_array(tokens), adapter, salt)


def run(cache: BlockPool, table: PodBlockTable) -> int:
    """Admit and compute a whole table; returns its cached tokens."""
    found = cache.match(table)
    cached_tokens = len(found) * cache.block_size_tokens
    assert cache.admit(table, found, len(table.tokens) - cached_tokens)
    cache.commit(table, len(table.tokens))
    return cached_tokens


def serve(cache: BlockPool, tokens: Iterable[int], adapter: str = "", salt: str = "") -> int:
    """Run a table and release it."""
    table = table_of(tokens, adapter, salt)
    cached_tokens = run(cache, table)
    cache.release(table)
    return cached_tokens


def replay(index: Counter[int], events: Iterable[KvEvent]) -> None:
    """Apply events as a subscriber that sees only the events."""
    for event in events:
        if isinstance(event, BlocksStored):
            index.update(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            index.subtract(event.block_hashes)
        else:
            index.clear()


def test_a_released_prompt_is_matched_up_to_the_first_difference() -> None:
    """Blocks stay matchable after their request; the first unequal block ends the match."""
    cache = BlockPool(16, BLOCK)
    assert serve(cache, range(12)) == 0
    assert serve(cache, [*range(8), 99, 99, 99, 99, 99]) == 8


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    """A hit is capped at floor((n - 1) / B) blocks."""
    cache = BlockPool(16, BLOCK)
    serve(cache, range(12))
    assert serve(cache, range(12)) == 8
    assert serve(cache, range(13)) == 12


def test_a_fully_cached_prompt_stores_its_last_block_twice_and_removes_it_twice() -> None:
    """The recomputed block is a second physical copy, with its own events."""
    cache = BlockPool(4, BLOCK)
    serve(cache, range(8))
    serve(cache, range(8))
    first, second = cache.take_events()
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert second.block_hashes == first.block_hashes[1:] and second.parent_hash == first.block_hashes[0]
    assert cache.copies == {first.block_hashes[0]: 1, first.block_hashes[1]: 2}
    serve(cache, range(100, 116))
    removed = [h for event in cache.take_events() if isinstance(event, BlocksRemoved) for h in event.block_hashes]
    assert Counter(removed) == {first.block_hashes[0]: 1, first.block_hashes[1]: 2}


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    """So shared prefixes live longest."""
    cache = BlockPool(4, BLOCK)
    serve(cache, range(16))
    serve(cache, range(100, 108))
    assert len(cache.match(table_of(range(17)))) == 2


def test_a_hit_renews_a_prefix() -> None:
    """The block used last is evicted last."""
    cache = BlockPool(4, BLOCK)
    serve(cache, range(8))
    serve(cache, range(50, 58))
    serve(cache, range(5))
    serve(cache, range(200, 208))
    assert len(cache.match(table_of(range(9)))) == 1


def test_blocks_are_reused_in_the_order_in_which_they_were_freed() -> None:
    """Matchable or not, as in vLLM: a partial block freed later is reused after a cached block freed earlier."""
    cache = BlockPool(3, BLOCK)
    serve(cache, range(4))
    serve(cache, range(50, 56))  # one full block, and one partial block
    cache.take_events()
    for prompt, removed in ((range(100, 104), 1), (range(104, 108), 0), (range(108, 112), 1)):
        serve(cache, prompt)
        assert sum(isinstance(event, BlocksRemoved) for event in cache.take_events()) == removed


def test_removals_precede_the_store_that_needed_their_memory() -> None:
    """A subscriber that applies events in order never counts more blocks than the pool has."""
    cache = BlockPool(2, BLOCK)
    serve(cache, range(8))
    cache.take_events()
    serve(cache, range(100, 108))
    kinds = [type(event) for event in cache.take_events()]
    assert kinds == [BlocksRemoved, BlocksRemoved, BlocksStored]


def test_stored_blocks_carry_their_tokens_and_their_parent() -> None:
    """Each event continues the chain of the one before."""
    cache = BlockPool(8, BLOCK)
    table = table_of(range(9))
    assert cache.admit(table, [], 9)
    cache.commit(table, 5)
    cache.commit(table, 9)
    first, second = cache.take_events()
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert (first.tokens, first.parent_hash) == ((0, 1, 2, 3), None)
    assert (second.tokens, second.parent_hash) == ((4, 5, 6, 7), first.block_hashes[0])


def test_generated_tokens_fill_matchable_blocks() -> None:
    """A table that grows token by token stores the same blocks as a prompt of the same tokens."""
    cache = BlockPool(8, BLOCK)
    table = table_of(range(3))
    assert cache.admit(table, [], 3)
    cache.commit(table, 3)
    for token in range(3, 9):
        table.tokens.append(token)
        assert cache.grow(table, token + 1)
        cache.commit(table, token + 1)
    assert len(cache.match(table_of(range(9)))) == 2


def test_salt_and_adapter_separate_prompts() -> None:
    """Equal tokens with another salt or adapter are other blocks, and the event carries both."""
    cache = BlockPool(16, BLOCK)
    for adapter, salt in (("", ""), ("a", ""), ("", "a")):
        assert serve(cache, range(9), adapter, salt) == 0
        assert serve(cache, range(9), adapter, salt) == 8
    assert chain_seed("ab", "c") != chain_seed("a", "bc")


def test_only_the_first_block_carries_the_salt() -> None:
    """As vLLM's extra keys do; every event carries the adapter."""
    cache = BlockPool(16, BLOCK)
    table = table_of(range(8), "lora", "salt")
    assert cache.admit(table, [], 8)
    cache.commit(table, 4)
    cache.commit(table, 8)
    events = [(event.adapter, event.salt) for event in cache.take_events() if isinstance(event, BlocksStored)]
    assert events == [("lora", "salt"), ("lora", "")]


def test_a_cache_in_use_is_not_cleared() -> None:
    """Clearing is all or nothing, with an event only when it happened."""
    cache = BlockPool(4, BLOCK)
    table = table_of(range(4))
    run(cache, table)
    cache.take_events()
    assert not cache.clear() and cache.take_events() == () and len(cache.copies) == 1
    cache.release(table)
    assert cache.clear() and cache.take_events() == (BlocksCleared(),) and cache.copies == {}


def test_admission_without_room_changes_nothing() -> None:
    """A found block that is free cannot also provide memory for the rest."""
    cache = BlockPool(3, BLOCK)
    serve(cache, range(8))
    cache.take_events()
    table = table_of(range(20))
    assert not cache.admit(table, cache.match(table), 12)
    assert (cache.free_blocks, table.blocks, cache.take_events()) == (3, [], ())


def test_growth_without_room_changes_nothing() -> None:
    """The caller preempts a request."""
    cache = BlockPool(2, BLOCK)
    table = table_of(range(8))
    assert cache.admit(table, [], 4)
    assert not cache.grow(table, 12)
    assert (cache.free_blocks, len(table.blocks), cache.usage) == (1, 1, 0.5)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(st.sampled_from(["serve", "open", "close", "clear"]), PROMPTS), max_size=30))
def test_replayed_events_match_the_cache_and_no_block_is_lost(script: list[tuple[str, list[int]]]) -> None:
    """For any script: free + used == pool, the naive index equals the cache, and hits equal a naive model's."""
    cache, index, known = BlockPool(6, 2), Counter[int](), set[tuple[int, ...]]()
    hash_of: dict[int, tuple[int, ...]] = {}
    open_tables: list[PodBlockTable] = []
    for action, tokens in script:
        if action in ("serve", "open"):
            table = table_of(tokens)
            naive = 0
            while naive < (len(tokens) - 1) // 2 and tuple(tokens[: 2 * naive + 2]) in known:
                naive += 1
            found = cache.match(table)
            assert len(found) == naive
            if cache.admit(table, found, len(tokens) - 2 * naive):
                cache.commit(table, len(tokens))
                hash_of |= {h: tuple(tokens[: 2 * i + 2]) for i, h in enumerate(table.hashes)}
                open_tables.append(table)
        if action in ("serve", "close") and open_tables:
            cache.release(open_tables.pop())
        if action == "clear":
            assert cache.clear() is not bool(open_tables)
        replay(index, cache.take_events())
        assert +index == Counter(cache.copies) and min(index.values(), default=0) >= 0
        assert cache.free_blocks + cache.used_blocks == cache.num_blocks
        known = {hash_of[h] for h in +index}
    for table in open_tables:
        cache.release(table)
    assert cache.free_blocks == cache.num_blocks


def test_leading_blocks_end_at_the_first_that_is_missing() -> None:
    """Even if later blocks are cached."""
    cache = BlockPool(8, BLOCK)
    serve(cache, range(12))
    table = table_of(range(12))
    table.hash_up_to(3, BLOCK)
    first, second, third = table.hashes
    assert [cache.leading_blocks(hashes) for hashes in ([first, second, third], [first, 7, third], [])] == [3, 1, 0]
