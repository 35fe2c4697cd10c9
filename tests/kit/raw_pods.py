"""Pods that write any bytes on sockets, connection by connection: valid HTTP or not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

from tests.kit.deadlines import DEADLINE_S

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Call:
    """The pod's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        """The next whole request. Raises `IncompleteReadError` when the router has hung up."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        return head + await self.reader.readexactly(length)

    async def answer(self, *pieces: bytes) -> None:
        """Send each piece on its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def hung_up(self) -> bool:
        """Wait until the router closes."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        return True


Script = Callable[[Call], Awaitable[object]]


class RawPod:
    """Runs one script for each connection, repeats the last one, and counts connections."""

    def __init__(self, scripts: tuple[Script, ...]) -> None:
        self._scripts = scripts
        self.connections = 0
        self.port = 0
        self.ended = asyncio.Semaphore(0)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await script(Call(reader, writer))
        finally:
            self.ended.release()
            writer.close()

    async def wait_for_ends(self, number: int = 1) -> None:
        """Wait until this number of scripts has ended."""
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(number):
                await self.ended.acquire()


def answering(*pieces: bytes) -> Script:
    """Responds to every request with these pieces."""

    async def script(call: Call) -> None:
        while True:
            await call.request()
            await call.answer(*pieces)

    return script


def answering_once(*pieces: bytes) -> Script:
    """Responds to one request with these pieces and closes."""

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(*pieces)

    return script


async def silent(call: Call) -> None:
    """Reads the request and waits until the router closes the connection."""
    await call.request()
    await call.hung_up()


async def resetting(call: Call) -> None:
    await call.request()
    call.reset()
