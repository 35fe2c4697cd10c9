"""The coordinator compared with what LMCache servers report, with lost, repeated and late batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.publisher.lmcache import SERVER_TIMEOUT_S, Coordinator, UnknownServer
from router.types import BlocksRemoved, BlocksStored, Generation, KvEvent, Tier
from tests.kit.sinks import IndexSink

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent / "goldens" / "lmcache_events.jsonl").read_text("ascii").splitlines()
]
"""Bodies of `POST /events` that an lmcache 0.5.6 server sent, with chunks of 64 tokens and an L2 of files, while two
vLLM 0.32.0 ran: one that copied its KV itself, then one whose KV the server copied. Three prompts, the third with the
first 128 tokens of the second; then memory was cleared. Model path and server id are replaced."""

MODEL = "models/tiny-llama"
SECOND = [(k * 31 + 7) % 120000 for k in range(256)]
THIRD = SECOND[:128] + [(k * 37 + 9) % 120000 for k in range(256)]
GENERATION = Generation(model="tiny", block_size_tokens=16)
SERVER = {"ip": "10.0.0.7", "http_port": 8080, "instance_id": "cache-0"}


def coordinator() -> tuple[Coordinator, IndexSink]:
    index = IndexSink(GENERATION)
    return Coordinator(MODEL, index), index


def report(
    seq: int, event: str = "store", numbers: tuple[int, ...] = (1,), *, incarnation: int = 100, **fields: Any
) -> dict[str, Any]:
    """One batch about chunks 1, 2, ..., each the first chunk of its own prompt."""
    entries = [
        {
            "key": {"chunk_hash_hex": f"{number:064x}", "model_name": MODEL, "kv_rank": 0x01000100},
            "token_ids": [number] * 16 if event == "store" else [],
            "token_offset": 0 if event == "store" else -1,
        }
        for number in numbers
    ]
    what = {"instance_id": "cache-0", "incarnation": incarnation, "seq": seq, "event_type": event, "entries": entries}
    return {"batches": [{**what, "tier": "l1", "backend": "dram", "ts": 1.0, **fields}]}


def blocks(*tokens: list[int]) -> set[int]:
    root = generation_seed(GENERATION)
    return {block for prompt in tokens for block in hash_blocks(token_array(prompt), 16, root)}


def chunk(number: int) -> set[int]:
    return blocks([number] * 16)


# --- as recorded ---


def test_a_real_servers_report_yields_the_blocks_of_its_prompts() -> None:
    """Both prompts whose tokens the server saw, in memory and in its files."""
    plays, index = coordinator()
    for body in RECORDED[:-1]:
        plays.events(body, 0.0)
    assert index.held("cache-0", Tier.CPU) == blocks(SECOND, THIRD)
    assert index.held("cache-0/fs", Tier.DISK) == blocks(SECOND, THIRD)
    assert index.complete == {"cache-0": True, "cache-0/fs": True}


def test_chunks_without_tokens_are_announced_by_hash() -> None:
    """The first prompt's four chunks: the engine copied them itself."""
    plays, index = coordinator()
    for body in RECORDED:
        plays.events(body, 0.0)
    assert index.holders["cache-0"].orphans == index.holders["cache-0/fs"].orphans == 4


def test_clearing_a_servers_memory_deletes_each_of_its_chunks() -> None:
    """The chunks in its files stay."""
    plays, index = coordinator()
    for body in RECORDED:
        plays.events(body, 0.0)
    assert index.held("cache-0", Tier.CPU) == set()
    assert index.held("cache-0/fs", Tier.DISK) == blocks(SECOND, THIRD)


def test_a_repeated_report_is_counted_and_changes_nothing() -> None:
    """A server repeats a report after a timeout."""
    plays, index = coordinator()
    counts = [plays.events(body, 0.0) for body in (*RECORDED, *RECORDED)]
    half = len(RECORDED)
    assert sum(count["applied"] for count in counts[:half]) == sum(count["duplicates"] for count in counts[half:]) == 12
    assert all(count["applied"] == count["stale"] == 0 for count in counts[half:])
    assert index.held("cache-0", Tier.CPU) == set()


# --- numbering ---


def test_a_gap_marks_all_tiers_of_the_server_incomplete() -> None:
    """Known chunks stay."""
    plays, index = coordinator()
    plays.events(report(1), 0.0)
    plays.events(report(2, tier="l2", backend="fs"), 0.0)
    assert plays.events(report(4, numbers=(2,)), 0.0) == {"applied": 1, "duplicates": 0, "stale": 0}
    assert index.complete == {"cache-0": False, "cache-0/fs": False}
    assert index.held("cache-0", Tier.CPU) == chunk(1) | chunk(2)


def test_a_server_that_started_earlier_is_incomplete() -> None:
    """Its earlier batches are lost."""
    plays, index = coordinator()
    plays.events(report(7), 0.0)
    assert index.complete == {"cache-0": False}


def test_a_new_incarnation_is_complete_with_empty_memory() -> None:
    """Chunks in its files stay; late batches of the previous incarnation are stale."""
    plays, index = coordinator()
    plays.events(report(1), 0.0)
    plays.events(report(3, tier="l2", backend="fs"), 0.0)
    plays.events(report(1, numbers=(2,), incarnation=101), 0.0)
    assert index.held("cache-0", Tier.CPU) == chunk(2)
    assert index.held("cache-0/fs", Tier.DISK) == chunk(1)
    assert index.complete == {"cache-0": True, "cache-0/fs": False}
    assert plays.events(report(4, numbers=(3,)), 0.0) == {"applied": 0, "duplicates": 0, "stale": 1}
    assert index.held("cache-0", Tier.CPU) == chunk(2)


_STORED = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(1, 4)), max_size=20)


@given(_STORED)
def test_a_server_holds_what_its_last_incarnation_reported(
    batches: list[tuple[int, int, bool, int]],
) -> None:
    """For any order of batches, with stale and repeated ones."""
    plays, index = coordinator()
    at, held, gap = (0, 0), set[int](), False
    for incarnation, seq, stores, number in batches:
        plays.events(report(seq, "store" if stores else "delete", (number,), incarnation=incarnation), 0.0)
        if (incarnation, seq) <= at:
            continue
        if incarnation > at[0]:
            at, held, gap = (incarnation, 0), set(), False
        gap = gap or seq != at[1] + 1
        at = incarnation, seq
        held = held | {number} if stores else held - {number}
        assert index.held("cache-0", Tier.CPU) == {block for number in held for block in chunk(number)}
        assert index.complete["cache-0"] is not gap


# --- holders ---


@pytest.mark.parametrize(
    ("where", "holder", "tier"),
    [
        ({}, "cache-0", Tier.CPU),
        ({"backend": "devdax"}, "cache-0", Tier.CPU),
        ({"backend": "gds"}, "cache-0", Tier.DISK),
        ({"tier": "l2", "backend": "fs"}, "cache-0/fs", Tier.DISK),
        ({"tier": "l2", "backend": "resp"}, "cache-0/resp", Tier.REMOTE),
        ({"tier": "l2", "backend": "s3", "shared": True}, "shared/s3", Tier.REMOTE),
        ({"tier": "l2", "backend": "fs", "shared": True}, "shared/fs", Tier.REMOTE),
    ],
)
def test_each_tier_of_a_server_and_each_shared_pool_is_a_holder(where: dict[str, Any], holder: str, tier: Tier) -> None:
    """Memory is cpu, the server's own disks are disk, everything else is remote."""
    plays, index = coordinator()
    plays.events(report(1, **where), 0.0)
    assert index.lives == [holder]
    assert index.held(holder, tier) == chunk(1)


def test_a_shared_pool_accepts_reports_from_all_servers() -> None:
    """And stays when a server is removed."""
    plays, index = coordinator()
    shared: dict[str, Any] = {"tier": "l2", "backend": "s3", "shared": True}
    plays.events(report(1, numbers=(1, 2), **shared), 0.0)
    plays.events(report(1, "delete", **shared, instance_id="cache-1"), 0.0)
    plays.deregister("cache-0")
    assert index.held("shared/s3", Tier.REMOTE) == chunk(2)


def test_a_shared_pool_is_incomplete_once_any_of_its_servers_is() -> None:
    plays, index = coordinator()
    shared: dict[str, Any] = {"tier": "l2", "backend": "s3", "shared": True}
    plays.events(report(1, **shared), 0.0)
    assert index.complete == {"shared/s3": True}
    plays.events(report(5, numbers=(2,), **shared, instance_id="cache-1"), 0.0)
    assert index.complete == {"shared/s3": False}


def test_chunks_of_other_models_and_groups_are_ignored() -> None:
    plays, index = coordinator()
    body = report(1, numbers=(1, 2, 3))
    first, second, _ = (entry["key"] for entry in body["batches"][0]["entries"])
    first["model_name"], second["object_group_id"] = "models/other", 1
    plays.events(body, 0.0)
    assert index.held("cache-0", Tier.CPU) == chunk(3)


# --- membership ---


def test_a_deregistered_server_is_removed_with_its_holders() -> None:
    """Until then it is listed and its host is known."""
    plays, index = coordinator()
    assert plays.register(SERVER, 0.0) == {"instance_id": "cache-0", "re_registered": False}
    assert plays.register(SERVER, 1.0) == {"instance_id": "cache-0", "re_registered": True}
    assert plays.heartbeat("cache-0", 2.0) == {"instance_id": "cache-0"}
    assert plays.instances() == {"instances": [SERVER]}
    plays.events(report(1), 2.0)
    plays.events(report(2, tier="l2", backend="fs"), 2.0)
    assert plays.host_of("cache-0/fs") == "10.0.0.7"
    plays.deregister("cache-0")
    plays.deregister("cache-0")
    assert (index.holders, plays.instances(), plays.host_of("cache-0")) == ({}, {"instances": []}, "")


def test_a_server_without_a_name_is_named_by_its_address() -> None:
    """The same name when it registers again."""
    plays, _ = coordinator()
    answers = [plays.register({**SERVER, "instance_id": " "}, 0.0) for _ in range(2)]
    assert answers == [{"instance_id": "mp-10.0.0.7:8080", "re_registered": again} for again in (False, True)]


def test_an_unregistered_server_can_report_but_not_send_heartbeats() -> None:
    """As after a restart of the publisher."""
    plays, index = coordinator()
    plays.events(report(1), 0.0)
    with pytest.raises(UnknownServer):
        plays.heartbeat("cache-0", 0.0)
    plays.register(SERVER, 0.0)
    plays.heartbeat("cache-0", 0.0)
    assert index.held("cache-0", Tier.CPU) == chunk(1)


def test_a_server_without_messages_expires() -> None:
    """Heartbeats and reports both count; a server that returns starts empty."""
    plays, index = coordinator()
    plays.register(SERVER, 0.0)
    plays.events(report(1), 10.0)
    plays.expire(10.0 + SERVER_TIMEOUT_S)
    assert "cache-0" in index.holders
    plays.heartbeat("cache-0", 20.0)
    plays.expire(20.0 + SERVER_TIMEOUT_S + 0.1)
    assert index.holders == {}
    plays.events(report(2, numbers=(2,)), 60.0)
    assert index.held("cache-0", Tier.CPU) == chunk(2)
    assert index.complete == {"cache-0": False}


# --- nonsense ---


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"seq": 0}, "$.batches[1].seq"),
        ({"seq": "1"}, "$.batches[1].seq"),
        ({"instance_id": ""}, "$.batches[1].instance_id"),
        ({"instance_id": "a/b"}, "$.batches[1].instance_id"),
        (
            {"entries": [{"key": {"chunk_hash_hex": "xy", "model_name": "m", "kv_rank": 0}}]},
            "$.batches[1].entries[0].key.chunk_hash_hex",
        ),
        (
            {"entries": [{"key": {"chunk_hash_hex": "ab" * 8, "model_name": "m", "kv_rank": 0}, "token_ids": [-1]}]},
            "$.batches[1].entries[0].token_ids[0]",
        ),
    ],
)
def test_an_invalid_report_is_rejected_as_a_whole_with_the_path(wrong: dict[str, Any], path: str) -> None:
    plays, index = coordinator()
    good, bad = report(1)["batches"][0], report(2)["batches"][0] | wrong
    with pytest.raises(msgspec.ValidationError, match=re.escape(path)):
        plays.events({"batches": [good, bad]}, 0.0)
    assert index.holders == {}


def test_unknown_event_types_and_tiers_are_ignored() -> None:
    """They still count for the numbering."""
    plays, index = coordinator()
    plays.events(report(1, "compress"), 0.0)
    plays.events(report(2, tier="l3"), 0.0)
    plays.events(report(3, numbers=(2,)), 0.0)
    assert index.held("cache-0", Tier.CPU) == chunk(2)
    assert index.complete == {"cache-0": True}


def test_every_event_can_be_applied_to_an_index() -> None:
    """With all its tokens or none."""
    seen = list[KvEvent]()

    class Listener(IndexSink):
        def apply(self, pod: str, events: tuple[KvEvent, ...]) -> None:
            seen.extend(events)

    plays = Coordinator(MODEL, Listener(GENERATION))
    for body in RECORDED:
        plays.events(body, 0.0)
    assert len([event for event in seen if isinstance(event, BlocksRemoved)]) == 12
    sizes = [(len(event.tokens), event.block_size_tokens) for event in seen if isinstance(event, BlocksStored)]
    assert sorted(sizes) == [(0, 0)] * 8 + [(64, 64)] * 16
