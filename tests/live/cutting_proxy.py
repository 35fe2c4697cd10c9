"""TCP proxies in front of engines that cut streams or lose requests where a test says, as a network, a dying node or a
busy process would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

PIECE_BYTES = 64 * 1024


@dataclass
class Cuts:
    """`after`: numbers of events behind which the next streams are cut, one stream each. `lost`: how requests begin
    that reach no engine."""

    after: list[int] = field(default_factory=list)
    lost: tuple[bytes, ...] = ()


class CuttingProxy:
    """Forwards connections to the engine at `port`."""

    def __init__(self, port: int, cuts: Cuts) -> None:
        self._port, self._cuts = port, cuts
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        both = [asyncio.ensure_future(self._forward(reader, back)), asyncio.ensure_future(self._return(there, writer))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await one
        for side in (writer, back):
            side.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            if not piece.startswith(self._cuts.lost):
                writer.write(piece)
                await writer.drain()

    async def _return(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        events = 0
        while piece := await reader.read(PIECE_BYTES):
            if b"HTTP/1.1 " in piece:
                events = 0
            found = piece.count(b"data: ")
            if self._cuts.after and found and events + found > self._cuts.after[0]:
                self._cuts.after.pop(0)
                writer.write(piece[: len(piece) // 2])  # within an event
                await writer.drain()
                return
            events += found
            writer.write(piece)
            await writer.drain()


@contextmanager
def proxied(*ports: int) -> Iterator[tuple[list[CuttingProxy], Cuts]]:
    """A proxy for each port, in a thread of their own, and what they cut."""
    cuts, started = Cuts(), threading.Event()
    proxies = [CuttingProxy(port, cuts) for port in ports]
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        servers = [await proxy.start() for proxy in proxies]
        started.set()
        await stop.wait()
        for server in servers:
            server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxies, cuts
    finally:
        stops[0]()
        thread.join(10)
