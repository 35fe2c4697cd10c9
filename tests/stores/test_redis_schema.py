"""The Redis schema: written values are read again, and invalid ones are rejected."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.index.cluster import EntryKind, LogEntry
from router.index.holders import HolderFacts
from router.index.layers import HitRule
from router.stores.redis_schema import (
    Keys,
    Unreadable,
    decode_entry,
    decode_generation,
    decode_row,
    encode_generation,
    pack_blocks,
    scope_of,
    unpack_blocks,
)
from router.types import AttentionKind, BlockChange, Generation, LayerType, Tier

GENERATION = Generation(model="m", revision="r", block_size_tokens=16)
FACTS = HolderFacts(url="http://pod:8000")
ROW = {
    b"epoch": b"7",
    b"seq": b"3",
    b"complete": b"1",
    b"owner": b"abc",
    b"beat": b"1500",
    **{b"n%d" % tier: b"%d" % tier for tier in Tier},
    b"facts": msgspec.json.encode(FACTS),
}
ENTRY = {
    b"k": b"change",
    b"h": b"pod",
    b"e": b"7",
    b"s": b"3",
    b"c": b"0",
    b"+0": pack_blocks([1, 2]),
    b"-2": b"\0" * 8,
}

DEEP = b'{"x":' + b"[" * 100_000
junk = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"-1", b"1e9", b"nan", b"\xff", b"{}", b"[]", b"null", b"9" * 400, b"9" * 5000, DEEP]),
)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_blocks_are_eight_little_endian_bytes_each(blocks: list[int]) -> None:
    packed = pack_blocks(blocks)
    assert packed == b"".join(block.to_bytes(8, "little") for block in blocks)
    assert list(unpack_blocks(packed)) == blocks


@pytest.mark.parametrize("length", [1, 7, 9])
def test_bytes_of_incomplete_blocks_are_rejected(length: int) -> None:
    with pytest.raises(Unreadable, match=f"{length} bytes"):
        unpack_blocks(b"x" * length)


def test_only_adapters_and_salts_share_a_scope() -> None:
    """They are part of the block hashes."""
    others = [{"model": "n"}, {"revision": "s"}, {"kv_dtype": "fp8"}, {"block_size_tokens": 32}]
    scopes = {scope_of(GENERATION), *(scope_of(replace(GENERATION, **other)) for other in others)}  # type: ignore[arg-type]
    assert len(scopes) == 1 + len(others)
    assert scope_of(replace(GENERATION, adapter="lora", salt="tenant")) == scope_of(GENERATION)


def test_a_generation_is_read_as_it_was_written() -> None:
    """Without adapter and salt."""
    written = encode_generation(replace(GENERATION, adapter="lora", salt="tenant"))
    assert decode_generation(written) == GENERATION
    assert written == encode_generation(GENERATION)


def test_all_keys_of_a_scope_share_one_hash_tag() -> None:
    """So that a script does not cross slots, in any namespace."""
    keys = Keys("site-a")
    scoped = [keys.holders("s"), keys.holder("s", "h"), keys.blocks("s", "h", 1, Tier.GPU), keys.log("s")]
    assert {key.partition("{")[2].partition("}")[0] for key in scoped} == {"s"}
    assert all(key.startswith("site-a:1:") for key in [*scoped, keys.scopes, keys.routers])


@pytest.mark.parametrize("namespace", ["", "a b", "a{b}", "*"])
def test_a_namespace_that_would_break_keys_is_rejected(namespace: str) -> None:
    """A brace would move the hash tag, a star would match in an ACL."""
    with pytest.raises(ConfigError, match="namespace"):
        Keys(namespace)


def test_a_row_is_decoded() -> None:
    """Its heartbeat in seconds."""
    row = decode_row(ROW)
    assert (row.epoch, row.seq, row.complete, row.owner, row.beat_s) == (7, 3, True, "abc", 1.5)
    assert (row.blocks, row.facts) == (tuple(Tier), FACTS)


def test_an_entry_lists_removals_before_additions() -> None:
    """A block that was removed and added within one entry is held."""
    entry = decode_entry(ENTRY | {b"-0": pack_blocks([1])})
    assert entry == LogEntry(
        kind=EntryKind.CHANGE,
        holder="pod",
        epoch=7,
        seq=3,
        complete=False,
        facts=None,
        changes=(
            BlockChange(Tier.GPU, False, unpack_blocks(pack_blocks([1]))),
            BlockChange(Tier.GPU, True, unpack_blocks(pack_blocks([1, 2]))),
            BlockChange(Tier.DISK, False, unpack_blocks(pack_blocks([0]))),
        ),
    )


def test_layers_have_fields_and_keys_of_their_own() -> None:
    """Versions that do not know them read full attention alone, as that of a holder without a rule."""
    layers = {b"+0.1": pack_blocks([2]), b"-3.3": pack_blocks([5]), b"+0.4": pack_blocks([6])}
    changes = [(each.tier, each.layer, each.held, list(each.blocks)) for each in decode_entry(ENTRY | layers).changes]
    assert changes == [
        (Tier.GPU, 0, True, [1, 2]),
        (Tier.GPU, 1, True, [2]),
        (Tier.DISK, 0, False, [0]),
        (Tier.REMOTE, 3, False, [5]),
    ]
    keys = Keys()
    assert keys.blocks("s", "h", 1, Tier.GPU, 1) == keys.blocks("s", "h", 1, Tier.GPU) + ".1"


def test_the_rule_of_a_holder_is_part_of_its_facts() -> None:
    """An older version writes none, and ignores it."""
    window = LayerType(AttentionKind.WINDOW, 16, 128)
    facts = HolderFacts(url="http://pod:8000", rule=HitRule.of([LayerType(AttentionKind.FULL, 16), window], groups=2))
    assert decode_row(ROW | {b"facts": msgspec.json.encode(facts)}).facts == facts
    assert decode_row(ROW | {b"facts": b'{"url":"http://pod:8000","rank":-1,"of a later version":{}}'}).facts == FACTS


@given(st.sampled_from(sorted(ROW)), st.none() | junk)
def test_a_corrupt_row_is_rejected(name: bytes, value: bytes | None) -> None:
    """Decoded, or `Unreadable`: no other error."""
    fields = {key: other for key, other in ROW.items() if key != name} | ({} if value is None else {name: value})
    try:
        decode_row(fields)
    except Unreadable:
        return
    assert value is not None


@given(st.sampled_from([*sorted(ENTRY), b"f", b"+3"]), st.none() | junk)
def test_a_corrupt_entry_is_rejected_as_a_whole(name: bytes, value: bytes | None) -> None:
    fields = {key: other for key, other in ENTRY.items() if key != name} | ({} if value is None else {name: value})
    try:
        decode_entry(fields)
    except Unreadable:
        return
    assert value is not None or name in (b"c", b"+0", b"-2", b"f", b"+3")


def test_an_entry_of_a_holder_with_too_long_a_name_is_rejected() -> None:
    """Its name becomes a label of metrics."""
    with pytest.raises(Unreadable):
        decode_entry(ENTRY | {b"h": b"x" * 513})


@pytest.mark.parametrize("broken", [{b"beat": b"9" * 400}, {b"facts": DEEP}, {b"owner": b"\xff"}])
def test_an_impossible_row_is_rejected(broken: dict[bytes, bytes]) -> None:
    """An infinite time, deeply nested facts, a name that is not text."""
    with pytest.raises(Unreadable):
        decode_row(ROW | broken)


@pytest.mark.parametrize("member", [DEEP, b'{"model":"\xff"}'], ids=["deep", "no text"])
def test_an_impossible_generation_is_rejected(member: bytes) -> None:
    """Deeply nested, or not text."""
    with pytest.raises(Unreadable):
        decode_generation(member)


@given(junk.filter(lambda member: b'"model"' not in member))
def test_a_corrupt_generation_is_rejected(member: bytes) -> None:
    """One with a model may be whole: all other fields have defaults."""
    with pytest.raises(Unreadable):
        decode_generation(member)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=4), max_size=3))
def test_unknown_fields_of_later_versions_are_ignored(extra: dict[str, object]) -> None:
    """Readers may be older than writers."""
    known = msgspec.json.decode(msgspec.json.encode(FACTS), type=dict[str, object])
    later = {f"later-{name}": value for name, value in extra.items()} | known
    assert decode_row(ROW | {b"facts": msgspec.json.encode(later), b"later": b"1"}).facts == FACTS
