"""KV event messages of every engine type and release, decoded to values."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.guards import OutOfBounds
from router.hashing import hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.events import UndecodableBatch, parse_frames
from router.types import (
    AttentionKind,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Generation,
    KvEvent,
    LayerType,
    Tier,
)
from tests.index.decoding import decode_batch

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
AS_VALUE = BlocksStored(block_hashes=(11, 12), parent_hash=None, tokens=token_array((1, 2, 3, 4)), block_size_tokens=2)


def decode(*events: Any) -> tuple[KvEvent, ...]:
    return decode_batch(msgspec.msgpack.encode([1.5, events, 3]))


def event(**changes: Any) -> KvEvent:
    """The event of a batch of one."""
    (event,) = decode(STORED | changes)
    return event


def stored(**changes: Any) -> BlocksStored:
    value = event(**changes)
    assert isinstance(value, BlocksStored)
    return value


def test_events_can_be_maps() -> None:
    """vLLM since 0.24, and SGLang."""
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU", "group_idx": 1}
    batch = decode(removed, STORED, {"type": "AllBlocksCleared"})
    expected = BlocksRemoved(block_hashes=(11,), tier=Tier.CPU, group=1)
    assert batch == (expected, AS_VALUE, BlocksCleared())


def test_events_can_be_tagged_arrays() -> None:
    """vLLM up to 0.23, with fields in declared order."""
    values = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "CPU", "lora", [["lora"], None], 1, None, None]
    batch = decode(values, ["BlockRemoved", [11], "GPU", 1], ["AllBlocksCleared"])
    one = BlocksStored(
        block_hashes=(11, 12),
        parent_hash=10,
        tokens=token_array((1, 2, 3, 4)),
        block_size_tokens=2,
        tier=Tier.CPU,
        group=1,
        adapter="lora",
    )
    assert batch == (one, BlocksRemoved(block_hashes=(11,), group=1), BlocksCleared())


def test_older_releases_send_shorter_arrays() -> None:
    """Missing fields have their default."""
    batch = decode(["BlockStored", [11, 12], None, [1, 2, 3, 4], 2], ["BlockRemoved", [11]])
    assert batch == (AS_VALUE, BlocksRemoved(block_hashes=(11,)))


def test_a_batch_can_be_a_map() -> None:
    """As in one commit of vLLM's main branch; the rank may be missing."""
    batch = {"ts": 1.5, "events": [STORED], "data_parallel_rank": 2}
    assert decode_batch(msgspec.msgpack.encode(batch)) == (AS_VALUE,)
    assert decode_batch(msgspec.msgpack.encode([1.5, [STORED]])) == (AS_VALUE,)


@pytest.mark.parametrize(
    "same", [2**64 - 3, -3, b"\xff" * 7 + b"\xfd", b"digest of sha256 or " + b"\xff" * 7 + b"\xfd"]
)
def test_all_hash_formats_map_to_64_bits(same: int | bytes) -> None:
    """Unsigned, signed, or a raw digest, of which the last eight bytes count."""
    assert stored(block_hashes=[same, 1], parent_block_hash=same).block_hashes == (2**64 - 3, 1)
    assert stored(parent_block_hash=same).parent_hash == 2**64 - 3


def test_the_first_token_of_a_bigram_counts() -> None:
    """EAGLE in SGLang publishes each token with its successor."""
    assert stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]).tokens == token_array((1, 2, 3, 4))


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("cpu", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.REMOTE),
        ("a shelf in Paris", Tier.REMOTE),
    ],
)
def test_each_medium_maps_to_a_tier(medium: str | None, tier: Tier) -> None:
    """In any publisher's spelling; unknown media are remote."""
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}
    assert stored(medium=medium).tier is tier
    assert decode(removed) == (BlocksRemoved(block_hashes=(1,), tier=tier),)


def test_remote_locality_overrides_the_medium() -> None:
    assert stored(medium="CPU", locality="REMOTE").tier is Tier.REMOTE
    assert stored(medium="CPU", locality="LOCAL").tier is Tier.CPU


@pytest.mark.parametrize(
    ("changes", "adapter", "salt"),
    [
        ({"extra_keys": [["tenant"], None]}, "", "tenant"),
        ({"extra_keys": [[["cache_salt", "tenant"]], None]}, "", "tenant"),
        ({"extra_keys": [["lora", "tenant"], ["lora"]], "lora_name": "lora"}, "lora", "tenant"),
        ({"extra_keys": [["lora"], ["lora"]], "lora_name": "lora"}, "lora", ""),
        ({"extra_keys": [[["an-image", 3]], None]}, "", ""),
        ({"extra_keys": []}, "", ""),
        ({"cache_salt": "tenant"}, "", "tenant"),
        ({"lora_id": 7}, "lora_id 7", ""),
        ({"lora_id": 7, "lora_name": "lora"}, "lora", ""),
    ],
)
def test_adapter_and_salt_are_decoded(changes: dict[str, Any], adapter: str, salt: str) -> None:
    """The salt is in the first block's extra keys, bare or tagged; old releases only number their adapters."""
    value = stored(**changes)
    assert (value.adapter, value.salt) == (adapter, salt)


def test_a_placeholder_has_no_tokens() -> None:
    """Offload tiers announce only the hash of a known block."""
    assert stored(token_ids=[], block_size=0, medium="CPU").tokens == token_array()


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_attention_to_the_whole_prefix_is_indexed(kind: str | None) -> None:
    """Including DeepSeek's latent attention."""
    assert stored(kv_cache_spec_kind=kind) == AS_VALUE


@pytest.mark.parametrize(
    "event",
    [
        STORED | {"kv_cache_spec_kind": "cross_attention"},
        STORED | {"kv_cache_spec_kind": "chunked_local_attention"},
        STORED | {"kv_cache_spec_kind": "sliding_window", "block_hashes": [], "extra_keys": None},
        STORED | {"token_ids": [1, 2, 3]},
        {"type": "BlockMigrated", "block_hashes": [1]},
        {"event_type": "stored"},
        ["BlockMigrated", [1]],
    ],
)
def test_events_that_cannot_be_indexed_are_skipped(event: Any) -> None:
    """Other attention, spans with holes, and unknown event types; the rest of the batch is decoded."""
    assert decode(event, STORED) == (AS_VALUE,)


WINDOW = STORED | {
    "block_hashes": [12],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 3,
}


def test_blocks_of_a_window_are_named_by_hash_alone() -> None:
    """Full attention in the same batch says what they are."""
    layers = LayerType(AttentionKind.WINDOW, block_tokens=2, span_tokens=3)
    assert decode(WINDOW, STORED) == (BlocksStored(block_hashes=(12,), group=1, layers=layers), AS_VALUE)


def test_unknown_fields_are_ignored() -> None:
    assert event(session_id="s", ownership=None) == AS_VALUE


def test_tokens_behind_a_block_are_read_where_its_hash_includes_them() -> None:
    """vLLM 0.33 with EAGLE or MTP (read, not run): some tokens for each hash."""
    assert event(lookahead_token_ids=[[3], [5]]) == replace(AS_VALUE, lookahead_tokens=((3,), (5,)))
    assert event(lookahead_token_ids=[[*range(20)]] * 2) == replace(AS_VALUE, lookahead_tokens=(tuple(range(8)),) * 2)
    assert event(lookahead_token_ids=[[], []]) == event(lookahead_token_ids=None) == AS_VALUE


@pytest.mark.parametrize("ahead", [[[3]], [[3], [4], [5]], [[3], []], [[3], [4, 5]]])
def test_an_event_with_too_few_or_uneven_tokens_behind_its_blocks_is_not_indexed(ahead: list[list[int]]) -> None:
    assert decode(STORED | {"lookahead_token_ids": ahead}, {"type": "AllBlocksCleared"}) == (BlocksCleared(),)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([1.5]), msgspec.msgpack.encode({"ts": 1})),
    ],
)
def test_an_invalid_batch_is_undecodable(payload: bytes) -> None:
    with pytest.raises(UndecodableBatch):
        decode_batch(payload)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_hashes": 1},
        {"block_hashes": [1.5]},
        {"token_ids": [2**32, 1, 1, 1]},
        {"token_ids": [-1, 1, 1, 1]},
        {"token_ids": [1.0, 1, 1, 1]},
        {"block_size": float("inf")},
        {"lora_name": ["lora"]},
        {"group_idx": [0]},
        {"medium": 5},
        {"cache_salt": {}},
    ],
)
def test_fields_of_the_wrong_type_are_undecodable(changes: dict[str, Any]) -> None:
    with pytest.raises(UndecodableBatch):
        decode(STORED | changes)


def test_more_extra_keys_than_blocks_can_have_are_too_many() -> None:
    with pytest.raises(OutOfBounds):
        decode(STORED | {"extra_keys": [["x"] * 20_000]})


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
broken_events = st.dictionaries(st.sampled_from([name for name in STORED if name != "type"]), junk, max_size=3).map(
    lambda changes: STORED | changes
)


@given(st.lists(broken_events | junk, max_size=3) | junk, st.binary(max_size=3))
def test_any_bytes_decode_or_raise_one_of_two_errors(events: Any, noise: bytes) -> None:
    blocks = BlockMap()
    blocks.add_holder("pod", Generation(model="m", block_size_tokens=2))
    for payload in (msgspec.msgpack.encode([0.0, events, None]), msgspec.msgpack.encode(events), noise):
        try:
            batch = decode_batch(payload)
        except (UndecodableBatch, OutOfBounds):
            continue
        for value in batch:
            blocks.apply("pod", value)


SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("before", [[b"topic"], [b""], [b"", b"topic"]])
def test_the_last_two_frames_are_number_and_payload(before: list[bytes]) -> None:
    """Live, replayed, and replayed since vLLM 0.26; the end of a replay is not a message."""
    assert parse_frames([*before, SEVEN, b"payload"]) == (7, b"payload")
    assert parse_frames([*before, bytes(8), b"first"]) == (0, b"first")
    assert parse_frames([*before, END, b""]) is None


@pytest.mark.parametrize("frames", [[], [b"payload"], [b"topic", b"", b"payload"], [b"seven", b"payload"]])
def test_frames_without_a_number_are_undecodable(frames: list[bytes]) -> None:
    """A number has eight bytes."""
    with pytest.raises(UndecodableBatch):
        parse_frames(frames)


TEXT_AND_PICTURE = {"block_hashes": [11, 12, 13], "token_ids": [1, 2, 3, 9, 9, 9, 9, 9, 9, 9, 9, 4], "block_size": 4}


def with_picture(identifier: Any, **changes: Any) -> list[int]:
    """The tokens of blocks in which a picture begins, goes on and ends."""
    keys = [[[identifier, 3]], [[identifier, -1]], [[identifier, -5]]]
    return list(stored(**(TEXT_AND_PICTURE | {"extra_keys": keys} | changes)).tokens)


def test_blocks_with_different_pictures_have_different_hashes() -> None:
    """Also from blocks of text with the same tokens. Only the token changes where the picture begins, so that the
    router's blocks may have another size."""
    text = list(stored(**TEXT_AND_PICTURE).tokens)
    one, other, uuid = with_picture("5df60a7c"), with_picture("2dcdb651"), with_picture("sha256:abc")
    assert one == with_picture("5df60a7c")
    assert one[:3] + one[4:] == other[:3] + other[4:] == text[:3] + text[4:]
    for size in (2, 4):
        hashes = [hash_blocks(token_array(tokens), size, 0) for tokens in (text, one, other, uuid)]
        assert [len({found[block] for found in hashes}) for block in range(12 // size)][3 // size :] == [4] * (
            12 // size - 3 // size
        )


def test_a_picture_without_its_place_changes_its_blocks() -> None:
    """As in vLLM 0.18; twice the same is not none. The generation has the names of adapter and salt."""
    text = list(stored(**TEXT_AND_PICTURE).tokens)
    keys = [["lora", "tenant"], ["lora", "5df60a7c"], ["lora"]]
    found = stored(**TEXT_AND_PICTURE, extra_keys=keys, lora_name="lora")
    assert (found.salt, list(found.tokens[:4]), list(found.tokens[8:])) == ("tenant", text[:4], text[8:])
    twice = stored(**TEXT_AND_PICTURE, extra_keys=[None, ["5df60a7c", "5df60a7c"], None])
    assert len({tuple(tokens[4:8]) for tokens in (text, found.tokens, twice.tokens)}) == 3


@pytest.mark.parametrize(
    "key", [[], [[]], [None], ["x", 10**9], ["x", -(10**9)], ["x", "y"], [["x"], 1], b"x", 7, {}, 1.5]
)
def test_keys_of_another_form_are_folded_or_refused(key: Any) -> None:
    """They never end the reading of events with another error."""
    event = STORED | TEXT_AND_PICTURE | {"extra_keys": [[key], None, [key, key, key]]}
    assert len(decode(event)) == 1


@pytest.mark.parametrize("keys", [7, [7], {"a": 1}, "abc", [[["x", 2]]] * 99])
def test_extra_keys_of_another_type_are_refused_or_skipped(keys: Any) -> None:
    with contextlib.suppress(UndecodableBatch):
        decode(STORED | TEXT_AND_PICTURE | {"extra_keys": keys})
