"""What reaches a client that no pod has sent in this very form?

A whole answer that is here already, and a decode pod's answer, whose first piece has been read and whose usage is put
right. Both are read as a pod's own is. This file never asks a pod for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.engines.handoff.usage import UsageCorrection
from router.proxy.connection import Ready, Sink
from router.proxy.headers import HeaderList
from router.proxy.relay import AnyReply, is_stream, pour_read
from router.types import PodId


@dataclass(slots=True)
class WholeReply:
    """An answer that has been read to its end."""

    pod: PodId
    status: int
    headers: HeaderList
    body: bytes

    async def read(self) -> bytes:
        """All of it, once."""
        body, self.body = self.body, b""
        return body

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """The same."""
        await pour_read(self, sink, ready)

    def close(self) -> None:
        """Nothing is open."""


class DecodeReply:
    """The decode pod's answer from `first` on, which tells the client of `cached_tokens` where it tells of any."""

    def __init__(self, reply: AnyReply, first: bytes, cached_tokens: int | None, closed: Callable[[], object]) -> None:
        self._reply = reply
        self._first: bytes | None = first
        self._correction = UsageCorrection(cached_tokens, is_stream(reply.headers))
        self._closed = closed
        self.pod = reply.pod
        self.status = reply.status
        self.headers = [(name, value) for name, value in reply.headers if name != b"content-length"]

    async def read(self) -> bytes:
        """The next piece that may go on; b"" at the end."""
        while piece := await self._next():
            if corrected := self._correction.feed(piece):
                return corrected
        return self._correction.end()

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """The rest, corrected."""
        await pour_read(self, sink, ready)

    async def _next(self) -> bytes:
        first, self._first = self._first, None
        return await self._reply.read() if first is None else first

    def close(self) -> None:
        """Whatever else belongs to it is let go, too."""
        self._reply.close()
        self._closed()
