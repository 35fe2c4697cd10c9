"""One engine's events, some over loopback sockets, and the state of all streams."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from loadtest.mock_engine.event_publisher import KvPublisher, encode_batch
from loadtest.mock_engine.faults import FaultBoard
from loadtest.mock_engine.mock_config import EventEncoding, KvEventConfig
from router.engines.adapter import KvEventSource
from router.feeds import kv_zmq
from router.feeds.kv_zmq import END_OF_REPLAY, KvFeed, KvStreams
from router.feeds.supervise import loop_time_s
from router.feeds.zmtp import binds
from router.fleet.fleet import Fleet
from router.guards import Bound, OutOfBounds
from router.index import events as events_module
from router.index.events import EVENTS, MESSAGE, PIECE_BLOCKS
from router.observe.fast_metrics import Registry
from router.observe.metrics import KvStreamMetrics
from router.stores.prefix_store import LocalStore
from router.types import BlocksRemoved, BlocksStored, Generation, KvEvent, PodId
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import make_pod
from tests.kit.sinks import RecordingSink

pytestmark = pytest.mark.anyio

PATIENT_MS, IDLE_MS = 30_000, 250
"""How long a feed waits for a reply: the shorter time only where none comes, for a machine may stand still longer."""
POD = PodId("pod")
NOWHERE = KvEventSource("tcp://127.0.0.1:1")


def event(number: int) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=(number,))


def message(number: int, payload: bytes | None = None, *, at_s: float = 0.0) -> list[bytes]:
    """A message as a subscriber receives it: topic, sequence, batch."""
    batch = encode_batch([event(number)], "map", at_s) if payload is None else payload
    return [b"", number.to_bytes(8, "big", signed=True), batch]


async def calls_of(*messages: list[bytes]) -> tuple[RecordingSink, KvFeed]:
    """The sink's calls for these live messages, without a replay."""
    sink = RecordingSink()
    feed = KvFeed(POD, NOWHERE, sink)
    for frames in messages:
        await feed.receive(frames)
    return sink, feed


# --- one message at a time ---


@given(st.lists(st.integers(0, 6), max_size=12))
def test_messages_are_applied_once_and_in_order_by_life(numbers: list[int]) -> None:
    """What is missing marks the stream incomplete; known blocks stay. A lower number is a restart, after which nothing
    of before holds. The last number again is the same message, unless it is the first: engines may send one in a life.
    """
    lives, following, complete = [list[int]()], 0, True
    for number in numbers:
        if number == following - 1 and number:
            continue
        if number < following:
            lives.append([])
            following, complete = 0, True
        complete = complete and number == following
        lives[-1].append(number)
        following = number + 1
    sink, _ = asyncio.run(calls_of(*map(message, numbers)))
    assert sink.lives == lives and (sink.complete is not False) is complete


async def test_a_long_message_yields_to_requests() -> None:
    """Between its pieces."""
    turns, sink = 0, RecordingSink()

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    long = BlocksRemoved(block_hashes=tuple(range(4 * PIECE_BLOCKS)))
    await KvFeed(POD, NOWHERE, sink).receive(message(0, encode_batch([long], "map", 0.0)))
    serving.cancel()
    assert turns >= 3 and sink.lives == [[0, PIECE_BLOCKS, 2 * PIECE_BLOCKS, 3 * PIECE_BLOCKS]]


async def test_a_long_event_counts_as_one() -> None:
    """However many pieces it has."""
    long = BlocksRemoved(block_hashes=tuple(range(4 * PIECE_BLOCKS)))
    sink, _ = await calls_of(message(0), message(1, encode_batch([long, event(1)], "map", 0.0)))
    assert sink.events == 3


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03"])
async def test_an_undecodable_message_is_counted_and_skipped(payload: bytes) -> None:
    """The stream is incomplete afterwards."""
    sink, feed = await calls_of(message(0), message(1, payload), message(2))
    assert (sink.lives, sink.complete, feed.undecodable) == ([[0, 2]], False, 1)


@pytest.mark.parametrize("frames", [[], [b"alone"], [b"topic", b"short", b"payload"]])
async def test_frames_without_a_number_are_counted_and_skipped(frames: list[bytes]) -> None:
    """The sequence continues."""
    sink, feed = await calls_of(message(0), frames, message(1))
    assert (sink.lives, sink.complete, feed.undecodable) == ([[0, 1]], False, 1)


async def test_after_a_restart_undecodable_messages_no_longer_count() -> None:
    """The stream is complete again."""
    sink, _ = await calls_of(message(0), message(1, b""), message(0))
    assert sink.lives == [[0], [0]] and sink.complete is True


def test_wildcard_endpoints_are_bound() -> None:
    """The engine connects to them."""
    assert binds("tcp://*:5557") and binds("tcp://[::]:5557")
    assert not binds("tcp://10.0.0.7:5557") and not binds("tcp://[::1]:5557")


# --- over sockets ---


@asynccontextmanager
async def following(source: KvEventSource, idle_ms: int = PATIENT_MS) -> AsyncIterator[RecordingSink]:
    """A running feed, which must stop as soon as it is cancelled."""
    sink = RecordingSink()
    running = asyncio.create_task(KvFeed(POD, source, sink, replay_idle_ms=idle_ms).run())
    try:
        yield sink
    finally:
        running.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([running])
        assert running.cancelled()


@asynccontextmanager
async def publishing(**config: Any) -> AsyncIterator[KvPublisher]:
    """An engine that publishes as vLLM does."""
    publisher = KvPublisher(KvEventConfig(**config), "127.0.0.1", FaultBoard())
    try:
        yield publisher
    finally:
        publisher.close()


def source_of(publisher: KvPublisher) -> KvEventSource:
    return KvEventSource(publisher.endpoint, publisher.replay_endpoint)


async def publish_until_received(publisher: KvPublisher, sink: RecordingSink, first: int) -> int:
    """Publish numbered events from `first` on until one arrives; returns the next number."""
    before = sink.lives[-1][:]
    number = first
    async with asyncio.timeout(DEADLINE_S):
        while sink.lives[-1] == before:
            publisher.publish([event(number)])
            number += 1
            await asyncio.sleep(0.001)
    return number


@pytest.mark.net
@pytest.mark.parametrize("encoding", ["map", "array"])
async def test_a_late_subscriber_replays_and_then_follows(encoding: EventEncoding) -> None:
    """With and without a topic frame; each message once."""
    async with publishing(encoding=encoding) as publisher:
        for number in range(5):
            publisher.publish([event(number)])
        async with following(source_of(publisher)) as sink:
            await sink.until(lambda sink: sink.complete is True)
            assert sink.lives == [[0, 1, 2, 3, 4]]
            end = await publish_until_received(publisher, sink, 5)
            await sink.until(lambda sink: sink.lives == [list(range(end))])
            assert sink.complete is True


@pytest.mark.net
async def test_a_truncated_replay_is_incomplete() -> None:
    """The replayed blocks count."""
    async with publishing(buffer_steps=2) as publisher:
        for number in range(5):
            publisher.publish([event(number)])
        async with following(source_of(publisher)) as sink:
            await sink.until(lambda sink: sink.complete is False)
            assert sink.lives == [[3, 4]]


@pytest.mark.net
async def test_a_restarted_engine_is_followed() -> None:
    """On the same ports, with numbers from 0: ZMQ reconnects, the replay catches up."""
    async with publishing() as first:
        source = source_of(first)
        async with following(source) as sink:
            await publish_until_received(first, sink, 0)
            first.close()
            async with publishing(port=port(source.endpoint), replay_port=port(source.replay_endpoint)) as second:
                end = 0
                async with asyncio.timeout(DEADLINE_S):
                    while len(sink.lives) == 1:
                        second.publish([event(end)])
                        end += 1
                        await asyncio.sleep(0.001)
                await sink.until(lambda sink: sink.lives[1] == list(range(end)))
                assert sink.complete is True


def port(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2])


class Engine:
    """An engine whose sockets are controlled by the test."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.pub = context.socket(zmq.XPUB)
        self.router = context.socket(zmq.ROUTER)
        at = "tcp://127.0.0.1"
        self.source = KvEventSource(
            f"{at}:{self.pub.bind_to_random_port(at)}", f"{at}:{self.router.bind_to_random_port(at)}"
        )
        self._asker = b""

    async def subscribed(self) -> None:
        """Returns once published messages arrive."""
        assert await self.pub.recv() == b"\x01"

    async def asked_from(self) -> int:
        self._asker, empty, start = await self.router.recv_multipart()
        assert empty == b""
        return int.from_bytes(start, "big")

    async def answer(self, *numbers: int, end: bool = True, at_s: float = 0.0) -> None:
        replies = [message(number, at_s=at_s) for number in numbers]
        for frames in [*replies, [b"", END_OF_REPLAY, b""]][: None if end else -1]:
            await self.router.send_multipart([self._asker, b"", *frames])

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            await self.pub.send_multipart(message(number))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """An engine, with a deadline."""
    with zmq.asyncio.Context() as context:
        engine = Engine(context)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield engine
        finally:
            engine.pub.close(linger=0)
            engine.router.close(linger=0)


@pytest.mark.net
@pytest.mark.parametrize("replies", [(1, 2, 3, 4, 5), (1, 4, 5), (4, 5), (1,)])
async def test_a_gap_is_filled_from_the_engines_replay(engine: Engine, replies: tuple[int, ...]) -> None:
    """Missing messages are applied first; messages that the engine no longer has are lost."""
    async with following(engine.source) as sink:
        await engine.subscribed()
        assert await engine.asked_from() == 0
        await engine.answer(0, 1)
        await engine.publish(5, 6)
        assert await engine.asked_from() == 1
        await engine.answer(*replies)
        numbers = sorted({0, 1, *replies, 5, 6})
        await sink.until(lambda sink: sink.lives == [numbers] and sink.complete is (2 in replies))


@pytest.mark.net
async def test_messages_delivered_by_a_replay_are_not_a_restart(engine: Engine) -> None:
    """They waited in the socket."""
    async with following(engine.source) as sink:
        await engine.subscribed()
        assert await engine.asked_from() == 0
        await engine.publish(0, 1, 2)
        await engine.answer(0, 1, 2, 3)
        await engine.publish(3, 4)
        await sink.until(lambda sink: 4 in sink.lives[-1])
        assert sink.lives == [[0, 1, 2, 3, 4]] and sink.complete is True


@pytest.mark.net
async def test_messages_received_while_a_gap_is_filled_are_not_a_restart(engine: Engine) -> None:
    async with following(engine.source) as sink:
        await engine.subscribed()
        await engine.asked_from()
        await engine.answer(0)
        await engine.publish(1, 3, 4, 5)
        assert await engine.asked_from() == 1
        await engine.answer(1, 2, 3, 4, 5)
        await engine.publish(6)
        await sink.until(lambda sink: 6 in sink.lives[-1])
        assert sink.lives == [[0, 1, 2, 3, 4, 5, 6]] and sink.complete is True


@pytest.mark.net
@pytest.mark.parametrize(("replies", "end"), [((0, 1, 4), True), ((0, 1), False)])
async def test_lost_replies_are_requested_again(
    engine: Engine, replies: tuple[int, ...], end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROUTER sockets drop messages to a slow reader, including the terminator, for which alone this one waits for a
    moment only."""
    patient_s = [DEADLINE_S] * (1 + len(replies))
    waits_s = chain(patient_s, [] if end else [IDLE_MS / 1000], repeat(DEADLINE_S))
    monkeypatch.setattr(kv_zmq, "loop_time_s", lambda: loop_time_s() + next(waits_s))
    async with following(engine.source, 0) as sink:
        assert await engine.asked_from() == 0
        await engine.answer(*replies, end=end)
        assert await engine.asked_from() == 1
        await engine.answer(1, 2, 3, 4)
        await sink.until(lambda sink: sink.complete is True)
        assert sink.lives == [[0, 1, 2, 3, 4]]


@pytest.mark.net
async def test_a_restart_is_detected_without_its_first_messages(engine: Engine) -> None:
    """Its numbers continue after the old ones, but the last known message differs."""
    async with following(engine.source) as sink:
        await engine.subscribed()
        await engine.asked_from()
        await engine.answer(0, 1)
        await engine.publish(3)
        assert await engine.asked_from() == 1
        await engine.answer(1, 2, 3, at_s=1.0)
        assert await engine.asked_from() == 0
        await engine.answer(0, 1, 2, 3, at_s=1.0)
        await sink.until(lambda sink: sink.lives == [[0, 1], [0, 1, 2, 3]] and sink.complete is True)


@pytest.mark.net
async def test_without_an_answer_to_the_replay_live_messages_are_followed(engine: Engine) -> None:
    """After a timeout."""
    async with following(engine.source, IDLE_MS) as sink:
        await engine.subscribed()
        await engine.asked_from()
        await engine.publish(0, 1)
        await sink.until(lambda sink: sink.lives == [[0, 1]])
        assert sink.complete is True


@pytest.mark.net
async def test_engines_can_connect_to_the_router() -> None:
    """If the engine's endpoint is the router's, the router binds it and frees the port afterwards."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as pub:
        pub.linger = 0
        free = await bindable()
        pub.connect(f"tcp://127.0.0.1:{free}")
        async with following(KvEventSource(f"tcp://*:{free}")) as sink, asyncio.timeout(DEADLINE_S):
            while sink.lives == [[]]:
                await pub.send_multipart(message(0))
                await asyncio.sleep(0.001)
            assert sink.lives[0] == [0]
        assert await bindable(free) == free


async def bindable(port: int = 0) -> int:
    """Wait until `port` can be bound; 0 for any. ZMQ releases ports in its own thread."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with socket.socket() as probe:
                try:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("0.0.0.0", port))
                    return int(probe.getsockname()[1])
                except OSError:
                    await asyncio.sleep(0.001)


def test_events_are_counted_as_the_engine_announced_them() -> None:
    """Not the pieces in which they are applied."""
    metrics = KvStreamMetrics(Registry())
    streams = KvStreams(Fleet(), LocalStore(), metrics)
    for blocks in ((1, 2), (3, 4)):
        streams.apply("a", (BlocksRemoved(block_hashes=blocks),))
    streams.fleet.sync([make_pod("a")])
    streams.applied("a", 1)
    assert streams.fleet.received_at_s("a") > 0.0
    assert metrics.events.labels("a").value == 1.0


def test_each_gap_of_a_stream_is_counted_once() -> None:
    """However often the stream is reported as incomplete."""
    metrics = KvStreamMetrics(Registry())
    streams = KvStreams(Fleet(), LocalStore(), metrics)
    for complete in (True, False, False, True, False):
        streams.stream_state("a", complete=complete)
    assert metrics.gaps.labels("a").value == 2.0


async def test_a_pod_that_leaves_is_followed_no_more() -> None:
    streams, before = KvStreams(Fleet(), LocalStore(), KvStreamMetrics(Registry())), asyncio.all_tasks()
    streams.follow(make_pod("a"), Generation(model="m"), KvEventSource("tcp://127.0.0.1:1"))
    [following_it] = asyncio.all_tasks() - before
    assert streams.follows("a")
    streams.leave("a")
    await asyncio.wait([following_it], timeout=DEADLINE_S)
    assert following_it.cancelled() and not streams.follows("a")


# --- pods that send too much ---


def raw(events: object) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


@pytest.mark.parametrize("kind", ["BlockRemoved", "of an unknown type"])
async def test_a_message_with_many_events_is_decoded_in_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: each turn of the event loop decodes as many as are applied in half a millisecond."""
    turn, decoded = 0, Counter[int]()
    read = events_module._event

    def count(fields: dict[str, object]) -> KvEvent | None:
        decoded[turn] += 1
        return read(fields)

    async def serve() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(events_module, "_event", count)
    serving = asyncio.create_task(serve())
    await KvFeed(POD, NOWHERE, RecordingSink()).receive(message(0, raw([[kind, [number]] for number in range(20_000)])))
    serving.cancel()
    assert decoded.total() == 20_000 and max(decoded.values()) <= 2 * PIECE_BLOCKS


@pytest.mark.parametrize(
    "payload",
    [
        raw([["BlockRemoved", [1]]] * (EVENTS.max_items + 1)),
        raw([["BlockRemoved", list(range(20_000))]]),
        raw([["BlockRemoved", [1], "x" * 500_000]]),
        raw(["x" * MESSAGE.max_bytes]),
        msgspec.msgpack.encode([1.0] * 1000),
    ],
    ids=["events", "blocks", "one event", "bytes", "fields"],
)
async def test_more_than_is_read_of_a_pod_is_out_of_bounds(payload: bytes) -> None:
    """None of it is applied."""
    sink = RecordingSink()
    with pytest.raises(OutOfBounds):
        await KvFeed(POD, NOWHERE, sink).receive(message(0, payload))
    assert sink.lives == [[]]


async def test_a_group_that_no_model_has_is_undecodable() -> None:
    """The groups of a pod are kept."""
    _, feed = await calls_of(message(0, raw([{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1 << 40}])))
    assert feed.undecodable == 1


def streams_of(**facts: Any) -> tuple[KvStreams, LocalStore]:
    """The streams of one pod, and their store."""
    store = LocalStore()
    streams = KvStreams(Fleet(), store, KvStreamMetrics(Registry()))
    pod = make_pod(POD, **facts)
    streams.follow(pod, Generation(model="m", block_size_tokens=1), None)
    return streams, store


def stored(first: int, count: int) -> tuple[KvEvent, ...]:
    numbers = range(first, first + count)
    return (BlocksStored(block_hashes=tuple(numbers), tokens=numbers, block_size_tokens=1),)


def test_a_pod_cannot_announce_more_blocks_than_it_can_have() -> None:
    """As many times its own capacity as other tiers may have."""
    streams, store = streams_of(capacity_tokens=16_000, block_size_tokens=1)
    with pytest.raises(OutOfBounds, match="KV blocks"):
        for first in range(0, 300_000, 1000):
            streams.apply(POD, stored(first, 1000))
    assert 256_000 <= store.size_blocks(POD) <= 257_000


def test_many_names_of_the_same_blocks_count_too() -> None:
    """Each is kept."""
    streams, store = streams_of(capacity_tokens=16, block_size_tokens=16)
    with pytest.raises(OutOfBounds):
        for first in range(0, 100_000, 1000):
            names = tuple(range(first, first + 1000))
            streams.apply(POD, (BlocksStored(block_hashes=names, tokens=[7] * 1000, block_size_tokens=1),))
    assert store.size_blocks(POD) <= 67_000


@pytest.mark.net
async def test_a_pod_that_sends_too_much_is_reported_and_loses_its_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; it is followed again after a pause."""
    monkeypatch.setattr(kv_zmq, "EXCESS_PAUSE_S", 0.01)
    reported, store = asyncio.Queue[tuple[str, str]](), LocalStore()
    streams = KvStreams(
        Fleet(), store, KvStreamMetrics(Registry()), lambda pod, why, _: reported.put_nowait((pod, why))
    )
    pod = make_pod(POD)
    streams.follow(pod, Generation(model="m", block_size_tokens=1), KvEventSource(engine.source.endpoint))
    await engine.subscribed()
    streams.apply(POD, stored(0, 10))
    await engine.pub.send_multipart(message(0, raw(["x" * MESSAGE.max_bytes])))
    name, reason = await reported.get()
    assert name == POD and "KV event message" in reason
    assert (store.size_blocks(POD), streams.state_of(POD)) == (0, "incomplete")
    assert await engine.pub.recv() == b"\x00"
    await engine.subscribed()
    await streams.stop()


@pytest.mark.net
async def test_a_message_of_many_frames_is_out_of_bounds(engine: Engine) -> None:
    feed = KvFeed(POD, KvEventSource(engine.source.endpoint), RecordingSink())
    running = asyncio.create_task(feed.run())
    await engine.subscribed()
    await engine.pub.send_multipart([b""] * 1000)
    with pytest.raises(OutOfBounds):
        await running


@pytest.mark.net
async def test_a_message_that_never_ends_is_out_of_bounds() -> None:
    """Its publisher is disconnected, and nothing of it is held."""
    most_bytes, sent_bytes = 64 << 20, 0
    ended = asyncio.Event()

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
        await reader.readexactly(64)
        writer.write(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB")
        await reader.readuntil(b"SUB")
        frames = (b"\x01\xff" + bytes(255)) * 1000
        with suppress(ConnectionError):
            while sent_bytes < most_bytes:
                writer.write(frames)
                await writer.drain()
                sent_bytes += len(frames)
        ended.set()
        writer.transport.abort()

    server = await asyncio.start_server(publish, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    running = asyncio.create_task(KvFeed(POD, KvEventSource(f"tcp://127.0.0.1:{port}"), RecordingSink()).run())
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    server.close()
    running.cancel()
    await asyncio.wait([running])
    assert sent_bytes < most_bytes and not running.cancelled()


@pytest.mark.net
async def test_a_replay_is_read_up_to_its_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its messages are applied, and the rest is asked for. One that never ends is out of bounds."""
    monkeypatch.setattr(kv_zmq, "REPLAY", Bound("replay", 1000, 4))
    monkeypatch.setattr(kv_zmq, "MAX_REPLAYS", 3)
    sink = RecordingSink()
    running = asyncio.create_task(KvFeed(POD, engine.source, sink, replay_idle_ms=PATIENT_MS).run())
    await engine.subscribed()
    for first in (0, 3, 6):
        assert await engine.asked_from() == first
        await engine.answer(*range(first, first + 40), end=False)
    with pytest.raises(OutOfBounds, match="replay"):
        await running
    assert sink.lives == [list(range(10))]
