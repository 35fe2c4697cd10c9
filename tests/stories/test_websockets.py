"""A websocket stays on one pod, and ends on both sides when one of them ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from router.config.edge_schema import Edge
from router.config.schema import Limits
from router.frontends.http import websockets
from tests.stories.conftest import Deploy, Deployment
from tests.stories.mock_realtime import MockRealtime, frame

pytestmark = [pytest.mark.net, pytest.mark.anyio]

TEXT, CLOSE = 1, 8
MASK = b"mask"
LONG = bytes(range(256)) * 8192
"""More than all buffers of the router take."""


@dataclass
class Socket:
    """A client's websocket. `head`: of the response."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes = b""

    def send(self, opcode: int, payload: bytes) -> None:
        """One message, masked as clients must."""
        whole = frame(opcode, payload)
        header = bytearray(whole[: len(whole) - len(payload)])
        header[1] |= 128
        mask = (MASK * (len(payload) // 4 + 1))[: len(payload)]
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(payload), "big")
        self.writer.write(bytes(header) + MASK + masked)

    async def receive(self, opcode: int, length: int) -> bytes:
        """The next message, which has this length."""
        expected = frame(opcode, bytes(length))
        header = await self.reader.readexactly(len(expected) - length)
        assert header == expected[: len(header)]
        return await self.reader.readexactly(length)


@asynccontextmanager
async def connected(deployment: Deployment, target: str = "/v1/realtime", *headers: str) -> AsyncIterator[Socket]:
    url = urlsplit(deployment.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    lines = [
        *(f"GET {target} HTTP/1.1", f"Host: {url.netloc}", "Connection: Upgrade", "Upgrade: websocket"),
        *("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", *headers),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    try:
        yield Socket(reader, writer, await reader.readuntil(b"\r\n\r\n"))
    finally:
        writer.close()


def _in_flight(deployment: Deployment) -> int:
    return sum(each.requests for each in deployment.program.pods.ledger.inflight().values())


async def test_messages_pass_in_both_directions(deploy: Deploy) -> None:
    """The handshake is the pod's; a close by the client reaches the pod, and its answer the client."""
    async with deploy(pods=1) as deployment, connected(deployment) as socket:
        assert socket.head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in socket.head  # RFC 6455, 1.3
        assert b"x-warmroute-pod: " in socket.head
        for message in (b"hello", b"", LONG):
            socket.send(TEXT, message)
            assert await socket.receive(TEXT, len(message)) == message
        assert _in_flight(deployment) == 1
        fleet, before_s = deployment.program.fleet, time.monotonic()
        pod = fleet.snapshot.pods[0].pod.id
        socket.send(TEXT, b"last")
        assert await socket.receive(TEXT, 4) == b"last"
        assert fleet.received_at_s(pod) > before_s
        socket.send(CLOSE, b"\x03\xe8")
        assert await socket.receive(CLOSE, 2) == b"\x03\xe8"
        assert await socket.reader.read() == b""
        await deployment.until(lambda: _in_flight(deployment) == 0)


async def test_a_message_behind_the_head_is_not_lost(deploy: Deploy) -> None:
    """A client may send it before it has the response."""
    async with deploy(pods=1) as deployment:
        url = urlsplit(deployment.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        socket = Socket(reader, writer)
        head = (
            f"GET /v1/realtime?model=demo HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket"
        )
        writer.write(f"{head}\r\nSec-WebSocket-Key: x\r\n\r\n".encode())
        socket.send(TEXT, b"early")
        await reader.readuntil(b"\r\n\r\n")
        assert await socket.receive(TEXT, 5) == b"early"
        writer.close()


async def test_websockets_are_spread_by_load(deploy: Deploy) -> None:
    """Each counts as a request in flight for its whole life."""
    async with deploy(pods=2) as deployment, connected(deployment) as one, connected(deployment) as two:
        pods = {line for socket in (one, two) for line in socket.head.split(b"\r\n") if b"x-warmroute-pod" in line}
        assert len(pods) == 2


async def test_the_end_of_the_pod_ends_the_client(deploy: Deploy) -> None:
    """And nothing stays booked."""
    async with deploy(pods=1) as deployment, connected(deployment) as socket:
        socket.send(TEXT, b"x")
        await socket.receive(TEXT, 1)
        await deployment.engines[0].stop()
        assert await socket.reader.read() == b""
        await deployment.until(lambda: _in_flight(deployment) == 0)


async def test_the_end_of_the_client_ends_the_pods_side(deploy: Deploy) -> None:
    """Also without a close message."""
    async with deploy(pods=1) as deployment:
        async with connected(deployment) as socket:
            socket.writer.transport.abort()
        await deployment.until(lambda: _in_flight(deployment) == 0)


async def test_a_client_that_does_not_read_stops_the_pod(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's buffers stay bounded, and the connection is still closed."""
    monkeypatch.setattr(websockets, "CLOSE_S", 0.05)
    async with deploy(pods=1) as deployment, connected(deployment) as socket:
        socket.send(TEXT, LONG * 4)
        await asyncio.wait_for(socket.writer.drain(), 20)
        socket.writer.transport.abort()
        await deployment.until(lambda: _in_flight(deployment) == 0)


async def test_a_second_pod_is_tried_if_the_first_cannot_be_reached(deploy: Deploy) -> None:
    """Before the breaker ejects it."""
    async with deploy(pods=2, probes={"health_interval_s": 30.0}) as deployment:
        await deployment.engines[0].stop()
        for _ in range(3):
            async with connected(deployment) as socket:
                assert socket.head.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/v1/realtime?model=nobody", (), 404),
        ("/v1/realtime", ("Origin: https://evil.example",), 403),
        ("/v1/realtime", ("Origin: https://good.example",), 101),
        ("/v1/realtime", ("Host: second",), 400),
        ("/v1/other", (), 404),
        ("/v1/chat/completions", (), 405),
    ],
)
async def test_which_websockets_are_refused(deploy: Deploy, target: str, headers: tuple[str, ...], status: int) -> None:
    """With an error of the API; other paths are served as if the client had not asked."""
    edge = Edge(cors_origins=("https://good.example",))
    async with deploy(pods=1, edge=edge) as deployment, connected(deployment, target, *headers) as socket:
        assert int(socket.head.split(b" ")[1]) == status


@pytest.mark.parametrize("limits", [Limits(write_timeout_s=0.2), Limits(slow_read_timeout_s=0.2)])
async def test_a_client_that_never_reads_is_disconnected(deploy: Deploy, limits: Limits) -> None:
    """After the same times as the client of a stream. Nothing stays booked: no slot, no connection to the pod."""
    async with deploy(pods=1, limits=limits) as deployment, connected(deployment) as socket:
        socket.writer.transport.pause_reading()  # type: ignore[attr-defined]
        socket.send(TEXT, LONG * 4)
        await deployment.until(lambda: _in_flight(deployment) == 0)
        edge = deployment.program._edge
        await deployment.until(lambda: edge.in_flight.used == 0)
        with pytest.raises(OSError):  # reset, or a broken pipe
            while True:
                socket.writer.write(bytes(1 << 16))
                await socket.writer.drain()


@pytest.mark.parametrize("resets", [True, False])
async def test_a_client_that_leaves_before_the_pod_answers_holds_nothing(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    """It would count until the pod is late."""
    monkeypatch.setattr(MockRealtime, "_open", lambda self, head: None)
    async with deploy(pods=1) as deployment:
        url, edge = urlsplit(deployment.url), deployment.program._edge
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"GET /v1/realtime HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(f"{head}Sec-WebSocket-Key: x\r\n\r\n".encode())
        await deployment.until(lambda: _in_flight(deployment) == 1)
        if resets:
            writer.transport.abort()
        else:
            writer.close()
        await deployment.until(lambda: _in_flight(deployment) == 0 and edge.in_flight.used == 0)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
async def test_a_pod_cannot_hide_headers_in_others(deploy: Deploy, monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    """A client may take a lone CR or LF for the end of a line."""
    head = b"HTTP/1.1 101 Switching Protocols\r\nx-engine: a" + end + b"set-cookie: of=pod\r\n\r\n"
    monkeypatch.setattr(MockRealtime, "_open", lambda self, _: self.transport.write(head))
    async with deploy(pods=1) as deployment, connected(deployment) as socket:
        assert b"x-engine: a\r\n" in socket.head
        assert b"set-cookie" not in socket.head


async def test_a_pod_that_answers_with_thousands_of_headers_is_refused(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be read in one turn of the event loop."""
    head = b"HTTP/1.1 101 Switching Protocols\r\n" + b"a:\r\n" * 10_000 + b"\r\n"
    monkeypatch.setattr(MockRealtime, "_open", lambda self, _: self.transport.write(head))
    async with deploy(pods=1) as deployment, connected(deployment) as socket:
        assert socket.head.startswith(b"HTTP/1.1 502")
