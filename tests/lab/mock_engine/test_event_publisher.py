"""KV event batches on the wire, read with plain decoders and ZMQ sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.mock_engine.event_publisher import END_OF_REPLAY, KvPublisher, encode_batch
from loadtest.mock_engine.faults import Fault, FaultBoard, FaultKind
from loadtest.mock_engine.mock_config import EventEncoding, KvEventConfig
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

DEADLINE_S = 30.0
STORED = BlocksStored(
    block_hashes=(2**64 - 1, 5),
    parent_hash=None,
    tokens=(1, 2, 3, 4),
    block_size_tokens=2,
    adapter="lora",
    salt="salt",
)
EVENTS: list[KvEvent] = [STORED, BlocksRemoved(block_hashes=(5,)), BlocksCleared()]


def test_events_are_maps_with_a_type() -> None:
    """The format since vLLM 0.24. Extra keys have the adapter in each block, the salt in the first."""
    at_s, events, rank = msgspec.msgpack.decode(encode_batch(EVENTS, "map", 12.5))
    assert (at_s, rank) == (12.5, 0)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, 5],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": "lora",
            "extra_keys": [["lora", "salt"], ["lora"]],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


def test_events_are_tagged_arrays_in_the_older_format() -> None:
    """The same fields in their declared order."""
    events = msgspec.msgpack.decode(encode_batch(EVENTS, "array", 12.5))[1]
    extra_keys = [["lora", "salt"], ["lora"]]
    assert events == [
        [
            "BlockStored",
            [2**64 - 1, 5],
            None,
            [1, 2, 3, 4],
            2,
            None,
            "GPU",
            "lora",
            extra_keys,
            0,
            "full_attention",
            None,
        ],
        ["BlockRemoved", [5], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_blocks_without_extras_have_null_extra_keys() -> None:
    """One null per block."""
    plain = BlocksStored(block_hashes=(1, 2), parent_hash=3, tokens=(1, 2), block_size_tokens=1)
    event = msgspec.msgpack.decode(encode_batch([plain], "map", 0.0))[1][0]
    assert (event["extra_keys"], event["parent_block_hash"], event["lora_name"]) == ([None, None], 3, None)


@asynccontextmanager
async def publishing(faults: FaultBoard | None = None, **config: Any) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(KvEventConfig(**config), "127.0.0.1", faults or FaultBoard())
    try:
        yield publisher
    finally:
        publisher.close()


@asynccontextmanager
async def connected(kind: int, endpoint: str | None) -> AsyncIterator[zmq.asyncio.Socket]:
    assert endpoint is not None
    with zmq.asyncio.Context() as context, context.socket(kind) as client:
        client.linger = 0
        client.connect(endpoint)
        async with asyncio.timeout(DEADLINE_S):
            yield client


async def replayed(publisher: KvPublisher, start: int = 0) -> list[list[bytes]]:
    """All frames of one replay, the end marker last."""
    async with connected(zmq.DEALER, publisher.replay_endpoint) as client:
        await client.send_multipart([b"", start.to_bytes(8, "big")])
        frames = [await client.recv_multipart()]
        while frames[-1][-2] != END_OF_REPLAY:
            frames.append(await client.recv_multipart())
        return frames


def sequences(frames: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frame[-2], "big", signed=True) for frame in frames]


@pytest.mark.net
@pytest.mark.anyio
async def test_a_subscriber_gets_topic_sequence_and_batch() -> None:
    """Three frames; the sequence continues for late subscribers."""
    async with publishing() as publisher, connected(zmq.SUB, publisher.endpoint) as client:
        client.subscribe("")
        while not await client.poll(10):
            publisher.publish(EVENTS)
        topic, first, payload = await client.recv_multipart()
        assert topic == b"" and msgspec.msgpack.decode(payload)[1][2] == {"type": "AllBlocksCleared"}
        _, second, _ = [*await client.recv_multipart()] if await client.poll(0) else (b"", b"", b"")
        publisher.publish(EVENTS)
        while not second:
            _, second, _ = await client.recv_multipart()
        assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(("encoding", "frame_count"), [("map", 4), ("array", 3)])
async def test_a_replay_returns_the_buffered_batches_and_an_end_marker(
    encoding: EventEncoding, frame_count: int
) -> None:
    """From the requested sequence on; with a topic frame since vLLM 0.26, without it in the older format."""
    async with publishing(encoding=encoding) as publisher:
        for _ in range(4):
            publisher.publish(EVENTS)
        frames = await replayed(publisher, start=1)
        assert sequences(frames) == [1, 2, 3, -1]
        assert {len(frame) for frame in frames} == {frame_count} and frames[-1][-1] == b""
        assert frames[0][-1] == encode_batch(EVENTS, encoding, msgspec.msgpack.decode(frames[0][-1])[0])


@pytest.mark.net
@pytest.mark.anyio
async def test_only_the_last_batches_are_buffered() -> None:
    """A replay from 0 may start above 0."""
    async with publishing(buffer_steps=2) as publisher:
        for _ in range(5):
            publisher.publish(EVENTS)
        assert sequences(await replayed(publisher)) == [3, 4, -1]


@pytest.mark.net
@pytest.mark.anyio
async def test_a_malformed_replay_request_is_ignored() -> None:
    """The next valid one is."""
    async with publishing() as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as client:
        await client.send_multipart([(0).to_bytes(8, "big")])
        await client.send_multipart([b"", (0).to_bytes(8, "big")])
        assert sequences([await client.recv_multipart()]) == [-1]
        assert not await client.poll(0)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(("replayable", "kept"), [(True, [0, 1, 2]), (False, [2])])
async def test_lost_batches_leave_a_gap_in_the_sequence(replayable: bool, kept: list[int]) -> None:
    """The next batch shows the gap; the fault decides whether a replay fills it."""
    faults = FaultBoard()
    async with publishing(faults, buffer_steps=3) as publisher, connected(zmq.SUB, publisher.endpoint) as client:
        client.subscribe("")
        published = 0
        while not await client.poll(10):
            publisher.publish(EVENTS)
            published += 1
        faults.arm(Fault(kind=FaultKind.LOSE_EVENTS, count=2, replayable=replayable))
        for _ in range(3):
            publisher.publish(EVENTS)
        received: set[int] = set()
        while published + 2 not in received:
            received.add(int.from_bytes((await client.recv_multipart())[1], "big"))
        assert not received & {published, published + 1}
        replay = sequences(await replayed(publisher, start=published))
        assert [at - published for at in replay[:-1]] == kept


@pytest.mark.net
@pytest.mark.anyio
async def test_batches_after_the_end_are_dropped() -> None:
    """The last step of an engine may end after its publisher."""
    async with publishing() as publisher:
        pass
    publisher.publish(EVENTS)


@pytest.mark.net
@pytest.mark.anyio
async def test_a_closed_publisher_leaves_its_ports_free_at_once() -> None:
    """The next epoch binds the same ports and starts at 0."""
    async with publishing() as publisher:
        publisher.publish(EVENTS)
        source = publisher.source
    port = int(source["endpoint"].rpartition(":")[2])
    replay_port = int(source["replay_endpoint"].rpartition(":")[2])
    async with publishing(port=port, replay_port=replay_port) as second:
        assert second.source == source and sequences(await replayed(second)) == [-1]


@pytest.mark.net
@pytest.mark.anyio
async def test_a_publisher_that_cannot_bind_leaves_nothing_behind() -> None:
    """Neither its first port nor the one in use."""
    async with publishing() as first:
        taken = int(first.endpoint.rpartition(":")[2])
        with pytest.raises(zmq.ZMQError, match="in use"):
            KvPublisher(KvEventConfig(replay_port=taken), "127.0.0.1", FaultBoard())
    async with publishing(port=taken):
        pass
    gc.collect()
