"""Standardised events are parsed, and invalid ones are rejected by field name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.holder_blocks import HolderBlocks
from router.publisher.standard_events import MalformedEvent, StandardEvent, parse_standard_event
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, Generation, Tier

ENVELOPE: dict[str, Any] = {
    "event_id": 42,
    "timestamp": 1739145600000,
    "model_name": "llama-3.1-8b",
    "block_size": 2,
    "additional_salt": None,
    "lora_name": None,
    "tenant_id": "default",
    "backend_id": "worker-0",
    "medium": "cpu",
    "dp_rank": 0,
}
STORED = ENVELOPE | {
    "event_type": "stored",
    "seq_hashes": [2**64 - 1, 12],
    "base_block_idx": 5,
    "parent_hash": 99,
    "token_ids": [1, 2, 3, 2**32 - 1],
}
REMOVED = ENVELOPE | {"event_type": "removed", "seq_hashes": [12], "base_block_idx": 7}
CLEARED = ENVELOPE | {"event_type": "cleared"}


def test_a_stored_event_has_its_blocks_and_its_parent() -> None:
    """With the whole envelope."""
    assert parse_standard_event(STORED) == StandardEvent(
        holder="worker-0/dp_rank=0/cpu",
        event=BlocksStored(
            block_hashes=(2**64 - 1, 12),
            parent_hash=99,
            tokens=(1, 2, 3, 2**32 - 1),
            block_size_tokens=2,
            tier=Tier.CPU,
        ),
        event_id=42,
        model="llama-3.1-8b",
        backend="worker-0",
    )


def test_removed_and_cleared_events() -> None:
    """`removed` with hashes and tier, `cleared` with neither."""
    assert parse_standard_event(REMOVED).event == BlocksRemoved(block_hashes=(12,), tier=Tier.CPU)
    assert parse_standard_event(CLEARED).event == BlocksCleared()


def test_hashes_without_tokens_are_placeholders() -> None:
    """They need neither a block size nor a parent."""
    event = parse_standard_event(STORED | {"token_ids": None, "parent_hash": None, "base_block_idx": None}).event
    assert isinstance(event, BlocksStored)
    assert (event.tokens, event.block_size_tokens) == ((), 0)


def test_adapter_and_salt_are_part_of_the_generation() -> None:
    event = parse_standard_event(
        STORED | {"lora_name": "sql", "additional_salt": "w8a8", "parent_hash": None, "base_block_idx": 0}
    ).event
    assert isinstance(event, BlocksStored)
    blocks = HolderBlocks(Generation(model="m", block_size_tokens=2))
    blocks.apply(event)
    root = generation_seed(Generation(model="m", block_size_tokens=2, adapter="sql", salt="w8a8"))
    expected = hash_blocks(token_array(event.tokens), 2, root).tolist()
    assert {tier: sorted(held) for tier, held in blocks.held().items()} == {Tier.CPU: sorted(expected)}


@pytest.mark.parametrize("name", ["backend_id", "tenant_id", "lora_name", "additional_salt", "medium"])
def test_every_dimension_of_the_stream_makes_another_holder(name: str) -> None:
    """`cleared` empties one stream, and event ids count within it."""
    assert parse_standard_event(CLEARED | {name: "other"}).holder != parse_standard_event(CLEARED).holder


def test_the_rank_makes_another_holder() -> None:
    """Each data-parallel rank has its own cache."""
    holders = {parse_standard_event(CLEARED | {"dp_rank": rank}).holder for rank in (None, 0, 1)}
    assert holders == {"worker-0/cpu", "worker-0/dp_rank=0/cpu", "worker-0/dp_rank=1/cpu"}


def test_an_unknown_medium_is_remote() -> None:
    """The RFC allows engines to add media."""
    assert parse_standard_event(REMOVED | {"medium": "3FS"}).event == BlocksRemoved(
        block_hashes=(12,), tier=Tier.REMOTE
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"event_type": "updated"}, "event_type"),
        ({"event_type": ["stored"]}, "event_type"),
        ({"event_id": None}, "event_id"),
        ({"event_id": -1}, "event_id"),
        ({"event_id": True}, "event_id"),
        ({"event_id": 10**5000}, "event_id"),
        ({"backend_id": ""}, "backend_id"),
        ({"backend_id": 7}, "backend_id"),
        ({"backend_id": "a\ud800"}, "backend_id"),
        ({"backend_id": "a\nb"}, "backend_id"),
        ({"model_name": {}}, "model_name"),
        ({"tenant_id": 1.5}, "tenant_id"),
        ({"lora_name": []}, "lora_name"),
        ({"additional_salt": 0}, "additional_salt"),
        ({"medium": ["gpu"]}, "medium"),
        ({"dp_rank": "0"}, "dp_rank"),
        ({"block_size": 2**32}, "block_size"),
        ({"seq_hashes": []}, "seq_hashes"),
        ({"seq_hashes": None}, "seq_hashes"),
        ({"seq_hashes": "12"}, "seq_hashes"),
        ({"seq_hashes": [1.0, 2]}, "seq_hashes"),
        ({"seq_hashes": [2**64, 2]}, "seq_hashes"),
        ({"parent_hash": "9"}, "parent_hash"),
        ({"parent_hash": None}, "parent_hash"),
        ({"parent_hash": None, "base_block_idx": None}, "parent_hash"),
        ({"token_ids": [1, 2, 3]}, "token_ids"),
        ({"token_ids": [1, 2, 3, 2**32]}, "token_ids"),
        ({"block_size": None}, "token_ids"),
        ({"block_size": 0}, "token_ids"),
    ],
)
def test_an_invalid_event_is_rejected_with_its_field(wrong: dict[str, Any], field: str) -> None:
    """The message starts with the field and stays short."""
    with pytest.raises(MalformedEvent) as refused:
        parse_standard_event(STORED | wrong)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")
    assert len(str(refused.value)) < 200


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*STORED, "other"]), _JSON, max_size=4), st.sets(st.sampled_from([*STORED])))
def test_any_json_is_an_event_or_raises_malformed_event(changed: dict[str, Any], missing: set[str]) -> None:
    fields = {name: value for name, value in (STORED | changed).items() if name not in missing}
    try:
        event = parse_standard_event(fields)
    except MalformedEvent:
        return
    assert event.holder
    assert 0 <= event.event_id < 2**64


@given(_JSON)
def test_json_that_is_no_object_is_malformed(anything: Any) -> None:
    """Lists, numbers, text, and an object without the fields."""
    with pytest.raises(MalformedEvent):
        parse_standard_event(anything)
