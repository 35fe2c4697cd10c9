"""Receives messages of ZMQ sockets: the client of ZMTP 3.0 (https://rfc.zeromq.org/spec/23), over asyncio.

A message is bounded in bytes and frames while it arrives. libzmq bounds the bytes of a frame and the number of complete
messages, but holds a message that never ends without limit. Only what KV events need: socket types SUB and DEALER,
without security.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

from router.addresses import HostPort, read_address
from router.fleet.retry_pause import retry_pause_s
from router.guards import Bound, OutOfBounds

MAX_FRAMES = 8
HANDSHAKE = Bound("handshake of a ZMQ socket", 4096)
HANDSHAKE_S, FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 0.1, 2.0
MAX_LINKS = 8
"""Publishers that may be connected to an address that the router binds."""
LOST = (OSError, EOFError)
"""Errors of a connection that ended, was refused, or whose peer speaks another protocol."""

Follow: TypeAlias = Callable[["ZmqLink"], Awaitable[None]]
Report: TypeAlias = Callable[[str], None]
"""Called with why there is no connection, and with "" once there is one."""

_GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(64, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4


class ZmqLink:
    """One connection. Messages that are not received yet wait at the peer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bound: Bound) -> None:
        self._reader, self._writer, self._bound = reader, writer, bound

    async def greet(self, kind: bytes) -> None:
        """Agree with the peer that this is a socket of `kind`. A SUB socket subscribes to everything."""
        async with asyncio.timeout(HANDSHAKE_S):
            self._writer.write(_GREETING)
            greeting = await self._reader.readexactly(len(_GREETING))
            if greeting[:1] + greeting[9:10] != b"\xff\x7f" or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
                raise ConnectionError("no ZMQ socket of version 3 without security")
            self._write(_COMMAND, b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)
            flags, ready = await self._frame(HANDSHAKE)
            if not flags & _COMMAND or not ready.startswith(b"\x05READY"):
                raise ConnectionError(f"a ZMQ socket refused the connection: {ready[:100]!r}")
            if kind == b"SUB":
                self.send(b"\x01")

    def send(self, *frames: bytes) -> None:
        for number, frame in enumerate(frames, 1):
            self._write(_MORE if number < len(frames) else 0, frame)

    def _write(self, flags: int, frame: bytes) -> None:
        """A short frame."""
        self._writer.write(bytes((flags, len(frame))) + frame)

    async def receive(self) -> list[bytes]:
        """The frames of the next message. Raises `OutOfBounds`, and `LOST` at the end of the connection."""
        frames: list[bytes] = []
        size_bytes = 0
        await asyncio.sleep(0)  # yield: receiving a backlog never blocks
        while True:
            flags, frame = await self._frame(self._bound, size_bytes)
            if flags & _COMMAND:
                if frame.startswith(b"\x04PING"):
                    self._write(_COMMAND, b"\x04PONG" + frame[7:23])
                    await self._writer.drain()
                await asyncio.sleep(0)  # yield: there may be any number of them
                continue
            if len(frames) == MAX_FRAMES:
                raise OutOfBounds(f"{self._bound.what}: more than {MAX_FRAMES} frames")
            frames.append(frame)
            size_bytes += len(frame)
            if not flags & _MORE:
                return frames

    async def _frame(self, bound: Bound, before_bytes: int = 0) -> tuple[int, bytes]:
        """Flags and content of the next frame of a message or command."""
        flags, length = await self._reader.readexactly(2)
        if flags & _LONG:
            length = int.from_bytes(bytes((length,)) + await self._reader.readexactly(7), "big")
        bound.check_size(before_bytes + length)
        return flags, await self._reader.readexactly(length)


@asynccontextmanager
async def connected(endpoint: str, kind: bytes, bound: Bound) -> AsyncIterator[ZmqLink]:
    """A link to a socket at `tcp://host:port` or `ipc://path`. Raises `LOST`."""
    scheme, _, address = endpoint.partition("://")
    async with asyncio.timeout(HANDSHAKE_S):
        if scheme == "ipc":
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            reader, writer = await asyncio.open_connection(*read_address(address))
    async with _linked(reader, writer, kind, bound) as link:
        yield link


@asynccontextmanager
async def _linked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes, bound: Bound
) -> AsyncIterator[ZmqLink]:
    try:
        link = ZmqLink(reader, writer, bound)
        await link.greet(kind)
        yield link
    finally:
        writer.transport.abort()


def binds(endpoint: str) -> bool:
    """Whether the endpoint has a wildcard address: bind it instead of connecting to it."""
    return endpoint.startswith("tcp://") and ("*" in endpoint or _listened(endpoint)[0] == "::")


def _listened(endpoint: str) -> HostPort:
    """The address to bind; `*` is all of IPv4."""
    return read_address(endpoint.removeprefix("tcp://").replace("*", "0.0.0.0"))


async def subscribe(endpoint: str, bound: Bound, follow: Follow, report: Report = lambda _: None) -> None:
    """Run `follow` with each connection to a publisher. Raises `OutOfBounds`, alone or in a group."""
    if binds(endpoint):
        await _accept(endpoint, bound, follow)
    failures = 0
    while True:
        try:
            async with connected(endpoint, b"SUB", bound) as link:
                failures = 0
                report("")
                await follow(link)
        except LOST as error:
            if failures:  # the first one may be between two publishers
                report(getattr(error, "strerror", None) or str(error) or "no response")
        failures += 1
        await asyncio.sleep(retry_pause_s(failures, FIRST_PAUSE_S, MAX_PAUSE_S))


async def _accept(endpoint: str, bound: Bound, follow: Follow) -> None:
    """The same with publishers that connect to an address of this host."""
    places = asyncio.Semaphore(MAX_LINKS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if places.locked():
            writer.transport.abort()
            return
        with suppress(*LOST):
            async with places, _linked(reader, writer, b"SUB", bound) as link:
                await follow(link)

    async with asyncio.TaskGroup() as group:
        ends = _listened(endpoint)
        server = await asyncio.start_server(lambda *pair: group.create_task(serve(*pair)), *ends)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
