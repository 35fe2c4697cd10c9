"""Which chunks are complete, and which chunk each one continues."""

from __future__ import annotations

import struct
from itertools import permutations

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from router.publisher.lmcache_chunks import ChunkTable, Entry, Key
from router.types import BlocksRemoved, BlocksStored, KvEvent, Tier

ROOT = blake3(bytes(12)).digest()
"""What LMCache's first chunk of a prompt continues: `TokenHasher.none_hash`."""

CHUNK_TOKENS = 4


def chain(*prompts: int) -> list[Entry]:
    """The chunks of one prompt, each of `CHUNK_TOKENS` times one token."""
    entries, digest = list[Entry](), ROOT
    for place, token in enumerate(prompts):
        tokens = [token] * CHUNK_TOKENS
        digest = blake3(digest + struct.pack(f">{CHUNK_TOKENS}I", *tokens)).digest()
        entries.append(Entry(key(digest.hex()), tokens, place * CHUNK_TOKENS))
    return entries


def key(digest: str, *, rank: int = 0, ranks: int = 1, salt: str = "") -> Key:
    return Key(digest, "m", ranks << 24 | rank << 16 | ranks << 8 | rank, cache_salt=salt)


def hash_only(entry: Entry) -> int:
    return int(entry.key.chunk_hash_hex[-16:], 16)


def stored(event: KvEvent | None) -> BlocksStored:
    assert isinstance(event, BlocksStored)
    return event


def test_a_chunk_continues_the_chunk_whose_digest_yields_its_own() -> None:
    """Other chunks may end at the same offset."""
    shelf = ChunkTable(Tier.CPU)
    first, left, right = chain(1), chain(1, 2, 3), chain(1, 4, 5)
    assert stored(shelf.store(first[0])).parent_hash is None
    for entry, parent in ((left[1], first[0]), (right[1], first[0]), (left[2], left[1]), (right[2], right[1])):
        event = stored(shelf.store(entry))
        assert event.parent_hash == hash_only(parent)
        assert event == BlocksStored(
            block_hashes=(hash_only(entry),),
            parent_hash=hash_only(parent),
            tokens=tuple(entry.token_ids),
            block_size_tokens=CHUNK_TOKENS,
            tier=Tier.CPU,
        )


def test_a_chunk_without_known_parent_is_announced_by_hash() -> None:
    """The parent is missing or hashed differently, or the tokens or the offset are unknown."""
    shelf = ChunkTable(Tier.DISK)
    shelf.store(chain(7, 8)[0])
    orphan, other = chain(1, 2)[1], chain(7, 8)[1]
    unplaced = Entry(other.key, other.token_ids, -1)
    foreign = Entry(key("ab" * 32), other.token_ids, CHUNK_TOKENS)
    for entry in (orphan, unplaced, foreign, Entry(key("cd" * 32))):
        assert shelf.store(entry) == BlocksStored(
            block_hashes=(hash_only(entry),), parent_hash=None, tokens=(), block_size_tokens=0, tier=Tier.DISK
        )


def test_a_chunk_is_complete_only_with_the_objects_of_all_ranks() -> None:
    """In any order of ranks; any of them may carry the tokens."""
    entry = chain(1)[0]
    shares = [
        Entry(key(entry.key.chunk_hash_hex, rank=rank, ranks=3), entry.token_ids if rank else [], 0 if rank else -1)
        for rank in range(3)
    ]
    for order in permutations(shares):
        shelf = ChunkTable(Tier.CPU)
        events = [shelf.store(share) for share in order]
        assert events[:2] == [None, None]
        assert stored(events[2]).tokens == tuple(entry.token_ids)
        assert [shelf.store(share) for share in order] == [None, None, None]
        assert [shelf.delete(share.key) for share in order] == [
            BlocksRemoved(block_hashes=(hash_only(entry),), tier=Tier.CPU),
            None,
            None,
        ]


def test_salts_and_layouts_are_separate() -> None:
    """LMCache hashes neither the salt nor the number of ranks."""
    shelf = ChunkTable(Tier.CPU)
    first, second = chain(1, 2)
    assert stored(shelf.store(first)).salt == ""
    salted = Entry(key(second.key.chunk_hash_hex, salt="a"), second.token_ids, second.token_offset)
    assert stored(shelf.store(salted)).tokens == ()
    salted_first = Entry(key(first.key.chunk_hash_hex, salt="a"), first.token_ids, 0)
    event = stored(shelf.store(salted_first))
    assert event.salt == "a"
    assert event.block_hashes != (hash_only(first),)
    assert shelf.store(Entry(key(first.key.chunk_hash_hex, ranks=2), first.token_ids, 0)) is None


def test_use_of_a_chunk_yields_no_event() -> None:
    """It only changes the order in which parents are tried."""
    shelf = ChunkTable(Tier.CPU)
    openings = [chain(number)[0] for number in range(1, 5)]
    for entry in openings:
        shelf.store(entry)
    for used in (openings[0].key, openings[0].key, key("ef" * 32)):
        shelf.touch(used)
    for number, opening in enumerate(openings, start=1):
        assert stored(shelf.store(chain(number, 9)[1])).parent_hash == hash_only(opening)


def test_a_deleted_chunk_is_not_a_parent() -> None:
    """Until it is stored again."""
    shelf = ChunkTable(Tier.CPU)
    first, second = chain(1, 2)
    shelf.store(first)
    shelf.delete(first.key)
    assert stored(shelf.store(second)).tokens == ()
    shelf.delete(second.key)
    shelf.store(first)
    assert stored(shelf.store(second)).parent_hash == hash_only(first)


_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1)), max_size=30)


@given(_STEPS)
def test_the_events_add_up_to_the_complete_chunks(
    steps: list[tuple[bool, int, int]],
) -> None:
    """With repeated stores and deletes of absent objects."""
    shelf, there, held = ChunkTable(Tier.CPU), set[tuple[int, int]](), set[int]()
    chunks = chain(1, 2, 3)
    for store, number, rank in steps:
        share = key(chunks[number].key.chunk_hash_hex, rank=rank, ranks=2)
        entry = Entry(share, chunks[number].token_ids, chunks[number].token_offset)
        event = shelf.store(entry) if store else shelf.delete(share)
        there = there | {(number, rank)} if store else there - {(number, rank)}
        if isinstance(event, BlocksStored):
            assert not held & set(event.block_hashes)
            held |= set(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            assert held >= set(event.block_hashes)
            held -= set(event.block_hashes)
        assert held == {hash_only(chunks[n]) for n in range(3) if {(n, 0), (n, 1)} <= there}
