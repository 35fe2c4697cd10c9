"""A proxy between a client and its base URL that forwards bytes as they are, and records each exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

PIECE_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024


@dataclass(slots=True)
class Exchange:
    """A request, and its response as its client reads it: without the framing of HTTP."""

    asked: str = ""
    asked_body: bytes = b""
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class RecordingProxy:
    """Serves one exchange at a time on each connection: no client pipelines requests."""

    def __init__(self, target_url: str) -> None:
        target = urlsplit(target_url)
        self._target = target.hostname, target.port
        self.exchanges: list[Exchange] = []
        self.url = ""
        self.connections: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        if task := asyncio.current_task():
            self.connections.add(task)
        try:
            back, there = await asyncio.open_connection(*self._target)
            while await self._exchange(reader, writer, back, there):
                pass
        except (OSError, h11.RemoteProtocolError):
            pass  # what was not complete shows in the record
        finally:
            for side in filter(None, (writer, there)):
                with suppress(OSError):
                    side.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> bool:
        """Whether there was one."""
        exchange, client, pod = Exchange(), h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)

        def asked(event: h11.Event) -> None:
            if isinstance(event, h11.Request):
                self.exchanges.append(exchange)
                exchange.asked = f"{event.method.decode()} {event.target.decode()}"
                pod.send(h11.Request(method=event.method, target=event.target, headers=[("host", "pod")]))
                pod.send(h11.EndOfMessage())
            elif isinstance(event, h11.Data):
                exchange.asked_body += bytes(event.data)

        def answered(event: h11.Event) -> None:
            if isinstance(event, h11.Response):
                exchange.status = event.status_code
                exchange.headers = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
            elif isinstance(event, h11.Data):
                exchange.body += bytes(event.data)

        return await _pass(reader, there, client, asked) and await _pass(back, writer, pod, answered)


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    parser: h11.Connection,
    take: Callable[[h11.Event], None],
) -> bool:
    """Forward one message. False if the connection ends before it does."""
    while True:
        piece = await reader.read(PIECE_BYTES)
        writer.write(piece)
        await writer.drain()
        parser.receive_data(piece)
        while isinstance(event := parser.next_event(), h11.Event):
            if isinstance(event, h11.ConnectionClosed):
                return False
            take(event)
            if isinstance(event, h11.EndOfMessage):
                return True
        if not piece:
            return False


@asynccontextmanager
async def recording(target_url: str) -> AsyncIterator[RecordingProxy]:
    """A proxy in front of `target_url` on a port of its own."""
    proxy = RecordingProxy(target_url)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy.connections:
            task.cancel()
        await asyncio.gather(*proxy.connections, return_exceptions=True)
