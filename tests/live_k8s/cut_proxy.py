"""A TCP proxy, whose connections can be cut, refused, or made silent: between routers and the API server, or as a plain
balancer between clients and routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

Address = tuple[str, int]


class CutProxy:
    """`choose` returns the target of a new connection, None to refuse it. `refuse`: end new connections at once."""

    def __init__(self, choose: Callable[[], Address | None]) -> None:
        self._choose = choose
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._muted: set[asyncio.StreamWriter] = set()
        self.refuse = False

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0: a free one."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """End all connections at once, with a reset. Returns how many there were."""
        for writer in self._open:
            writer.transport.abort()
        return len(self._open)

    def mute(self) -> int:
        """Pass nothing more from the server on the connections of now, which stay open. Returns how many there are."""
        self._muted |= self._open
        return len(self._muted)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = None if self.refuse else self._choose()
        if target is None:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*target)
        except OSError:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            passing = [asyncio.create_task(self._pass(*way)) for way in ((reader, back), (there, writer))]
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in passing:
                task.cancel()
        finally:
            self._open.discard(writer)
            self._muted.discard(writer)
            writer.close()
            back.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(65536):
                if target not in self._muted:
                    target.write(piece)
                    await target.drain()
