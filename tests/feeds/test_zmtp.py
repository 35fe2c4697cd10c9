"""The ZMQ client: real ZMQ sockets, peers that break the protocol, and any bytes in any pieces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from router.feeds.zmtp import HANDSHAKE, LOST, MAX_FRAMES, MAX_LINKS, ZmqLink, connected, subscribe
from router.guards import Bound, OutOfBounds
from tests.kit.deadlines import DEADLINE_S

BOUND = Bound("message", 1000)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"
SUBSCRIBED = 64 + 27 + 3
"""Bytes that a SUB socket sends before messages arrive."""


class Written:
    """A writer that keeps what was written."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        pass


def link_of(*pieces: bytes, bound: Bound = BOUND) -> tuple[ZmqLink, Written]:
    """A link that receives these pieces, and then the end of the connection."""
    reader, written = asyncio.StreamReader(), Written()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return ZmqLink(reader, cast("asyncio.StreamWriter", written), bound), written


def encoded(message: Sequence[bytes], *, long: bool = False) -> bytes:
    """The frames of a message as ZMTP has them."""
    sent = b""
    for number, frame in enumerate(message, 1):
        more = number < len(message)
        is_long = long or len(frame) > 255
        sent += bytes([more | (2 if is_long else 0)]) + len(frame).to_bytes(8 if is_long else 1, "big") + frame
    return sent


async def all_of(link: ZmqLink) -> list[list[bytes]]:
    messages = []
    with suppress(*LOST):
        while True:
            messages.append(await link.receive())
    return messages


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=4)


@given(messages, st.lists(st.integers(0, 5000), max_size=8), st.booleans())
def test_messages_are_the_same_in_any_pieces(sent: list[list[bytes]], at: list[int], long: bool) -> None:
    """With short and long frames, and with commands between messages."""

    async def received() -> list[list[bytes]]:
        data = b"\x04\x05\x04NOPE".join([b"", *(encoded(message, long=long) for message in sent)])
        return await all_of(link_of(*cut(data, at))[0])

    assert asyncio.run(received()) == sent


@given(
    st.lists(st.sampled_from([b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x06", b"\xff", bytes(7), b"\x04PING"]))
)
def test_any_bytes_are_messages_a_lost_connection_or_out_of_bounds(data: list[bytes]) -> None:
    async def receive() -> None:
        with suppress(OutOfBounds):
            for message in await all_of(link_of(*data)[0]):
                assert len(message) <= MAX_FRAMES and sum(map(len, message)) <= BOUND.max_bytes

    asyncio.run(receive())


@pytest.mark.anyio
@pytest.mark.parametrize(
    "data",
    [b"\x01\x00" * 1000, encoded([b"x" * 400] * 3), b"\x02" + b"\xff" * 8, b"\x06\x00\x00\x00\x00\x01\x00\x00\x00"],
    ids=["frames", "bytes in frames", "a long frame", "a long command"],
)
async def test_a_message_is_bounded_before_it_is_complete(data: bytes) -> None:
    with pytest.raises(OutOfBounds, match="message: "):
        await link_of(data)[0].receive()


@pytest.mark.anyio
async def test_commands_without_end_yield_to_requests() -> None:
    turns = 0

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    link, written = link_of(b"\x04\x09\x04PING\0\0ab" * 100)
    assert await all_of(link) == []
    serving.cancel()
    assert turns >= 100 and written.sent == b"\x04\x07\x04PONGab" * 100


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\nx: " + b"y" * 100, "version 3"),
        (GREETING.replace(b"\x7f\x03", b"\x7f\x01"), "version 3"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "version 3"),
        (GREETING + b"\x04\x0f\x05ERROR\x08no entry", "no entry"),
        (GREETING + b"\x00\x01x", "refused"),
    ],
)
async def test_a_peer_of_another_kind_is_a_lost_connection(answer: bytes, error: str) -> None:
    with pytest.raises(LOST, match=error):
        await link_of(answer)[0].greet(b"SUB")


@pytest.mark.anyio
async def test_a_handshake_is_bounded() -> None:
    with pytest.raises(OutOfBounds, match="handshake"):
        await link_of(GREETING + b"\x06" + (HANDSHAKE.max_bytes + 1).to_bytes(8, "big"))[0].greet(b"SUB")


# --- over sockets ---


@asynccontextmanager
async def peer(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """The endpoint of a peer that the test writes byte for byte."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*LOST):
            await serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING + READY)
    await reader.readexactly(SUBSCRIBED)


@pytest.mark.net
@pytest.mark.anyio
async def test_a_peer_that_reads_nothing_holds_no_answers_to_its_pings() -> None:
    """The router stops reading, so the peer cannot send more."""
    most_bytes, sent_bytes = 64 << 20, 0

    async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(GREETING + READY)
        await reader.readexactly(SUBSCRIBED)
        pings = b"\x04\x17\x04PING\0\0" + b"x" * 16
        with suppress(TimeoutError):
            while sent_bytes < most_bytes:
                writer.write(pings * 10_000)
                sent_bytes += len(pings) * 10_000
                async with asyncio.timeout(1):
                    await writer.drain()
        ended.set()

    ended = asyncio.Event()
    async with peer(ping) as endpoint, connected(endpoint, b"SUB", BOUND) as link:
        receiving = asyncio.create_task(link.receive())
        await ended.wait()
        receiving.cancel()
    assert sent_bytes < most_bytes


@pytest.mark.net
@pytest.mark.anyio
async def test_a_publisher_with_heartbeats_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each PING is answered. It would disconnect a peer that answers none, after a time that is long here: a machine
    may stand still meanwhile."""
    answers = list[bytes]()
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.linger = 0
        pub.heartbeat_ivl, pub.heartbeat_timeout = 20, 1000 * round(DEADLINE_S)
        endpoint = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
        monitor = pub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        async with asyncio.timeout(DEADLINE_S), connected(endpoint, b"SUB", BOUND) as link:
            assert await pub.recv() == b"\x01"
            write = link._writer.write

            def answer(data: bytes) -> None:
                answers.append(data)
                write(data)

            monkeypatch.setattr(link._writer, "write", answer)
            receiving = asyncio.create_task(link.receive())
            while len(answers) < 5:
                await asyncio.sleep(0.01)
            assert set(answers) == {b"\x04\x05\x04PONG"} and not await monitor.poll(0)
            await pub.send_multipart([b"topic", b"payload"])
            assert await receiving == [b"topic", b"payload"]
        pub.disable_monitor()
        monitor.close(linger=0)


@pytest.mark.net
@pytest.mark.anyio
async def test_frames_of_any_size_arrive_from_real_sockets(tmp_path: Path) -> None:
    """Over TCP and in a file."""
    sent = [b"", b"x" * 255, b"y" * 256, bytes(300_000)]
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.linger = 0
        pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # each link's subscription, also before the end of the one before
        pub.bind(f"ipc://{tmp_path}/events")
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        for endpoint in (f"ipc://{tmp_path}/events", f"tcp://127.0.0.1:{port}"):
            async with asyncio.timeout(DEADLINE_S), connected(endpoint, b"SUB", Bound("message", 1 << 20)) as link:
                while await pub.recv() != b"\x01":
                    pass  # the end of the link before
                await pub.send_multipart(sent)
                assert await link.receive() == sent


@pytest.mark.net
@pytest.mark.anyio
async def test_a_bound_address_has_places_for_some_publishers() -> None:
    """Each is followed; a further one waits until there is a place."""
    with zmq.asyncio.Context() as context:
        pubs = [context.socket(zmq.XPUB) for _ in range(MAX_LINKS + 1)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        followed = asyncio.Queue[Any]()

        async def follow(link: ZmqLink) -> None:
            followed.put_nowait(link)
            await link.receive()

        running = asyncio.create_task(subscribe(f"tcp://*:{port}", BOUND, follow))
        try:
            async with asyncio.timeout(DEADLINE_S):
                for pub in pubs[:MAX_LINKS]:
                    pub.linger = 0
                    pub.connect(f"tcp://127.0.0.1:{port}")
                    await followed.get()
                pubs[MAX_LINKS].connect(f"tcp://127.0.0.1:{port}")
                assert not await pubs[MAX_LINKS].poll(300)
                pubs[0].close()
                assert await pubs[MAX_LINKS].recv() == b"\x01"
        finally:
            running.cancel()
            await asyncio.wait([running])
            for pub in pubs:
                pub.close(linger=0)
