"""One kept-alive HTTP/1.1 connection to a pod.

A protocol class around `httptools`: a request is one write, a piece of body one callback. Closing is immediate, because
engines stop generating when the socket closes. Pools and retries are in `frontends/http/upstream.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import httptools

from router.errors import StaleConnection, UpstreamBroken, UpstreamTimeout
from router.request.inbound import HeaderList
from router.types import PodId

if TYPE_CHECKING:
    from router.config.schema import Limits

Sink: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of body; returns False when it cannot take more for now."""
Ready: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when the sink can take pieces again."""

UpstreamMessage: TypeAlias = bytes | tuple[bytes, bytes]
"""A whole request; a large body follows its head as a piece of its own."""

LARGE_PIECE_BYTES = 32 * 1024
"""Larger pieces of responses are read in turns, one each time the loop runs: it takes a millisecond to read the tokens
in 256 KiB, and many pods may send as much at once."""
READ_PAUSE_BYTES = 256 * 1024
"""Unread bytes of one response above which reading pauses; larger headers are an error, and larger trailers or
extensions of a chunk."""
MAX_FIELDS = 512
"""Headers of a response, and its trailers."""
MAX_INTERIM = 16
"""Interim responses, such as 103 Early Hints, before a response."""
_STATUSES = range(100, 600)


class Connection(asyncio.Protocol):
    """A connection to `pod`, one exchange at a time. Parser callbacks buffer what `head`, `read` and `pour` return.

    One timer for each connection checks the deadline of the current wait, at least once in the shortest timeout."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, pod: PodId = "") -> None:
        self._loop = loop
        self._pod = pod
        self._limits = limits
        self._shortest_s = min(limits.first_byte_timeout_s, limits.idle_timeout_s)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._half_closed = False
        self.idle_since_s = 0.0
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        """The callback of httptools: a method would cost a Python call for each piece."""
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self._fields: HeaderList = []
        """Headers being received; after the head: trailers, which are dropped."""
        self._chunks.clear()
        self._buffered_bytes = 0
        """Bytes received since the last read, including headers and framing."""
        self._framing_bytes = self._interim = 0
        self._paused = False
        self._head_done = False
        self._complete = False
        self._broken = ""
        self._sink: Sink | None = None
        """Receives pieces on arrival; None while they are buffered for `read`."""

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {error.__context__ or error}")
        if self._head_done and not self._chunks:
            self._framing_bytes += len(data)
            if self._framing_bytes > READ_PAUSE_BYTES:
                self._fail("trailers are larger than the limit")
        elif self._framing_bytes:
            self._framing_bytes = 0
        sink = self._sink
        if sink is None:
            self._buffered_bytes += len(data)
            if self._buffered_bytes > READ_PAUSE_BYTES:
                if not self._head_done:
                    self._fail("headers are larger than the limit")
                elif self._chunks:
                    self._pause()
            self._wake()
        elif not self._flush(sink) or self._complete or self._broken:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._head_done and exc is None and not self._broken and not _has_body_end(self.headers):
            self._complete = True
        self._parser = None  # it references this connection: a cycle
        self._wake()

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self._complete:  # these bytes would be taken for the response to the next request
            raise UpstreamBroken("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._fields) >= MAX_FIELDS:
            raise UpstreamBroken("headers or trailers are more than the limit")
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self.status = self._parser.get_status_code()
        if status not in _STATUSES:
            raise UpstreamBroken(f"status {status}")
        fields, self._fields = self._fields, []
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise UpstreamBroken("interim responses are more than the limit")
            return
        self.headers = fields
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.status >= 200:  # else 100 Continue, 103 Early Hints: the final response follows
            self._complete = True

    # --- one exchange ---

    def send(self, message: UpstreamMessage) -> None:
        self._reset()
        if isinstance(message, bytes):
            self._transport.write(message)
            return
        for piece in message:
            self._transport.write(piece)

    async def head(self) -> None:
        """Wait for `status` and `headers`. Raises `UpstreamTimeout`, `UpstreamBroken`, or `StaleConnection` when the
        connection closed without a byte. After an exception the connection is closed."""
        self._deadline_s = self._loop.time() + self._limits.first_byte_timeout_s
        try:
            while not self._head_done:
                if self._lost or self._broken:
                    if not self._buffered_bytes:
                        raise StaleConnection("connection closed without a response", pod=self._pod)
                    raise self._broken_off("headers")
                await self._next_event()
        except BaseException:
            self.close()
            raise

    async def read(self) -> bytes:
        """All body bytes received since the last call; b"" at the end. Raises `UpstreamTimeout`, `UpstreamBroken`."""
        if not self._chunks:
            self._deadline_s = self._loop.time() + self._limits.idle_timeout_s
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost or self._broken:
                raise self._broken_off("response")
            await self._next_event()
        piece = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._resume()
        return piece

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Pass pieces to `sink` on arrival, from within `data_received`, to the end. Raises like `read`."""
        while True:
            self._buffered_bytes = 0
            self._flush(sink)
            if self._paused:
                await ready()
                self._resume()
                continue
            if self._complete:
                return
            if self._lost or self._broken:
                raise self._broken_off("response")
            self._sink = sink
            try:
                await self._next_event()
            finally:
                self._sink = None

    def _flush(self, sink: Sink) -> bool:
        """Pass buffered pieces to the sink. Returns False, and pauses reading, when the sink can take no more."""
        self._deadline_s = self._loop.time() + self._limits.idle_timeout_s
        chunks = self._chunks
        if not chunks:
            return True
        piece = b"".join(chunks)
        chunks.clear()
        if sink(piece):
            return True
        self._sink = None
        self._pause()
        return False

    def _pause(self) -> None:
        if not self._paused and self.alive:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        if self.alive:
            self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow on this connection. Not while reading is paused: the client disconnected
        before it could receive the rest."""
        is_complete = self._complete and not self._chunks and not self._paused
        return is_complete and self._keep_alive and not self._half_closed and self.alive

    @property
    def alive(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; the pod stops working on the request."""
        if not self._lost:
            self._transport.abort()

    def half_close(self) -> bool:
        """Let the pod stop working on the request, as after `close`, but read a response that it has already sent.
        Returns False, and does nothing, where the transport cannot: TLS."""
        if not self.alive or not self._transport.can_write_eof():
            return False
        self._half_closed = True
        self._transport.write_eof()
        return True

    def _fail(self, why: str) -> None:
        self._broken = why
        self.close()

    def _broken_off(self, part: str) -> UpstreamBroken:
        why = self._broken or f"connection closed inside the {part}"
        return UpstreamBroken(f"pod {self._pod}: {why}", pod=self._pod)

    def _next_event(self) -> asyncio.Future[None]:
        """Done on the next bytes, or when the connection closes. Raises `UpstreamTimeout` at the deadline."""
        self._waiter = waiter = self._loop.create_future()
        if self._timer is None:
            self._timer = self._loop.call_later(self._shortest_s, self._check_deadline)
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _check_deadline(self) -> None:
        self._timer, waiter = None, self._waiter
        if waiter is None or waiter.done():
            return
        left_s = self._deadline_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._shortest_s), self._check_deadline)
            return
        self._waiter = None  # the exception references frames that reference this connection: a cycle
        why = f"did not respond within {self._limits.first_byte_timeout_s:g} s"
        if self._head_done:
            why = f"sent nothing for {self._limits.idle_timeout_s:g} s"
        waiter.set_exception(UpstreamTimeout(f"pod {self._pod} {why}", pod=self._pod))


def _has_body_end(headers: HeaderList) -> bool:
    """Whether the headers give the end of the body; otherwise it ends with the connection."""
    return any(
        name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
        for name, value in headers
    )
