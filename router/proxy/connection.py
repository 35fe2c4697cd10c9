"""How does one answer come from a pod?

One kept-alive HTTP/1.1 connection: a protocol class around `httptools`, so that a request costs one write and a piece
of body one callback, and closing is immediate (engines stop generating when the socket closes). This file knows nothing
of pools, and never sends anything twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import httptools

from router.errors import StaleConnection, UpstreamBroken
from router.proxy.headers import HeaderList

Sink: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of body; False: no more for now."""
Ready: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when the sink takes pieces again."""

READ_PAUSE_BYTES = 256 * 1024
"""Unread body held for one request before the pod is told to wait."""
MAX_HEAD_BYTES = 256 * 1024
"""Of one answer: no engine needs more."""
_STATUSES = range(100, 600)


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """Deadlines of one exchange."""

    connect_s: float
    first_byte_s: float
    idle_s: float


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Parser callbacks fill it, `head` and `read` drain it.

    Deadlines cost next to nothing: one timer a connection looks whether somebody has waited for too long, no later
    than the shortest of them can be over, and is set anew by whoever waits when it has gone off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: UpstreamTimeouts) -> None:
        self._loop = loop
        self._timeouts = timeouts
        self._shortest_s = min(timeouts.first_byte_s, timeouts.idle_s)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: HeaderList = []
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._paused = False
        self._head_done = False
        self._head_bytes = 0
        self._complete = False
        self._any_byte = False
        self._ends_with_connection = True
        self._broken = ""
        self._sink: Sink | None = None
        """Where pieces go at once; None while they are held to be read."""

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._any_byte = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._broken = f"not HTTP: {error}"
            self.close()
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._broken = "headers without end"
                self.close()
        if self._sink is None or not self._hand_on(self._sink) or self._complete or self._broken:
            self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._head_done and self._ends_with_connection and exc is None and not self._broken:
            self._complete = True
        self._parser = None  # it leads back here: a cycle
        self._wake()

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self._complete:  # what follows would be taken for the answer to somebody else's request
            raise UpstreamBroken("more bytes than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status not in _STATUSES:
            raise UpstreamBroken(f"status {self.status}")
        if self.status < 200:
            return
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > READ_PAUSE_BYTES:
            self._pause()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue, 103 Early Hints: the real answer follows
            self.headers = []
            self._ends_with_connection = True
        else:
            self._complete = True

    # --- one exchange ---

    def send(self, message: bytes) -> None:
        """Begin an exchange: write the whole request."""
        self._reset()
        assert self._transport is not None
        self._transport.write(message)

    async def head(self) -> None:
        """Wait for status and headers. Raises `TimeoutError`, `UpstreamBroken`, or `StaleConnection` when not a byte
        came."""
        self._deadline_s = self._loop.time() + self._timeouts.first_byte_s
        while not self._head_done:
            if self._lost or self._broken:
                if not self._any_byte:
                    raise StaleConnection("the pod closed the connection without an answer")
                raise UpstreamBroken(self._broken or "the pod closed the connection inside its headers")
            await self._wait()

    async def read(self) -> bytes:
        """The next piece of body, everything that has come; b"" at the end. Raises `TimeoutError`, `UpstreamBroken`."""
        if not self._chunks:
            self._deadline_s = self._loop.time() + self._timeouts.idle_s
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost or self._broken:
                raise UpstreamBroken(self._broken or "the pod closed the connection inside its answer")
            await self._wait()
        data = self._held()
        self._go_on()
        return data

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Hand pieces to `sink` as they come, from within `data_received`, to the end. Raises like `read`."""
        while True:
            self._hand_on(sink)
            if self._paused:
                await ready()
                self._go_on()
                continue
            if self._complete:
                return
            if self._lost or self._broken:
                raise UpstreamBroken(self._broken or "the pod closed the connection inside its answer")
            self._sink = sink
            try:
                await self._wait()
            finally:
                self._sink = None

    def _hand_on(self, sink: Sink) -> bool:
        """Give the sink what is held. False where it wants no more; then the pod is told to wait."""
        self._deadline_s = self._loop.time() + self._timeouts.idle_s
        if not self._chunks or sink(self._held()):
            return True
        self._sink = None
        self._pause()
        return False

    def _held(self) -> bytes:
        """Take what has come."""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        self._buffered_bytes = 0
        return data

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and self.alive:
            self._paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        paused, self._paused = self._paused, False
        if paused and self._transport is not None and self.alive:
            self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        """May another exchange follow on this connection?"""
        return self._complete and not self._chunks and self._keep_alive and self.alive

    @property
    def alive(self) -> bool:
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; the pod stops working on whatever is unfinished."""
        if self._transport is not None and not self._lost:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        if self._timer is None:
            self._timer = self._loop.call_later(self._shortest_s, self._look)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """Is whoever waits waiting for too long?"""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        left_s = self._deadline_s - self._loop.time()
        if left_s <= 0:
            self._waiter.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_later(min(left_s, self._shortest_s), self._look)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
