"""One request and its response on a client's connection.

When the request is complete, a task serves it. The response is written at the client's pace, its head together with
the first piece of the body. The task is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec

from router.admission.tenant import OPEN_TENANT, Tenant
from router.errors import BodyTooLarge, RouterError, Saturated
from router.frontends.http.relay import is_stream
from router.request.inbound import HeaderList

SMALL_PIECE_BYTES = 512
"""Smaller pieces of a body are joined on arrival: Python needs 60 bytes for a piece of one byte."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JOINED_INLINE_BYTES = 1024 * 1024
"""Larger bodies are joined in a thread, which releases the interpreter."""
_WITHOUT_BODY = frozenset({204, 304})
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}


class ReceivedRequest(msgspec.Struct):
    """A request as it was received."""

    method: str
    path: str
    """As sent, without the query."""
    target: bytes
    """Path and query, raw."""
    headers: HeaderList
    named: Mapping[bytes, bytes]
    """The first header of each name."""
    peer: str
    """Address of the client."""
    body: bytes = b""
    refusal: RouterError | None = None
    """Why the request is refused, if that follows from its headers."""
    tenant: Tenant = OPEN_TENANT
    """Who sent it, if it was admitted."""
    cors_headers: HeaderList = []
    """Headers of its response for a web page of an allowed origin."""


class BodyMemory(msgspec.Struct):
    """Total size of all buffered request bodies, limited to `max_bytes`."""

    max_bytes: int
    bytes: int = 0
    freed_bytes: int = 0
    """Total size of all bodies that were freed."""


@dataclass(slots=True, eq=False)
class ClientConnection:
    """The parts of a connection that its exchanges use."""

    transport: asyncio.Transport
    tasks: set[asyncio.Task[Any]]
    loop: asyncio.AbstractEventLoop
    on_complete: Callable[[], None]
    """Called when a response is complete."""
    body_memory: BodyMemory
    read_paused: bool = False
    write_paused: bool = False
    _writable: asyncio.Event = field(default_factory=asyncio.Event)

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        await self._writable.wait()


Serve: TypeAlias = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Exchange(msgspec.Struct, eq=False):
    """One request and its response. Clients of HTTP/1.0 (`http_1_0`) get no chunks: the end of the connection ends the
    body."""

    received: ReceivedRequest
    keep_alive: bool
    http_1_0: bool
    expects_100: bool
    _connection: ClientConnection
    serve: Serve
    waits_for_body: bool = True
    """Whether it is served when its body is complete; else it is served at once, and its body is dropped."""
    on_disconnect: Callable[[], None] | None = None
    """Called when the client disconnects, in place of cancelling the task."""
    began: bool = False
    """Whether its task has run."""
    started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    was_slow: bool = False
    """Whether the response had to wait for the client."""
    more_body: bool = True
    """Whether the request is incomplete."""
    pieces: list[bytes] = []
    buffered_bytes: int = 0
    _first: bool = False
    _served: bool = False
    """Whether a task was started for it."""
    _task: asyncio.Task[None] | None = None
    _headers: HeaderList | None = None
    """Headers of the response."""
    _head: bytes = b""
    _chunked: bool = False
    _expected_bytes: int | None = None

    # --- the request ---

    def take_turn(self) -> None:
        """Begin: all earlier responses of this connection are complete."""
        self._first = True
        if self.expects_100 and not self.received.refusal and not self.pieces:
            self._connection.transport.write(_CONTINUE)
        if not (self.more_body and self.waits_for_body) or self.received.refusal:
            self._begin()

    def add_body(self, piece: bytes, max_bytes: int) -> None:
        """Buffer a piece of the body. If that exceeds a limit, drop the body and refuse the request. The body of a
        request that is refused, or was, is dropped."""
        if self._served or self.received.refusal is not None or not self.waits_for_body:
            return
        memory, size_bytes = self._connection.body_memory, len(piece)
        if self.buffered_bytes + size_bytes > max_bytes:
            self.release_body()
            self.refuse(BodyTooLarge(f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes)."))
        elif memory.bytes + size_bytes > memory.max_bytes:
            self.release_body()
            self.refuse(Saturated("Request-body memory limit reached (limits.max_held_bytes); retry later."))
        else:
            memory.bytes += size_bytes
            self.buffered_bytes += size_bytes
            if size_bytes < SMALL_PIECE_BYTES and self.pieces and len(self.pieces[-1]) < SMALL_PIECE_BYTES:
                self.pieces[-1] += piece
            else:
                self.pieces.append(piece)

    def release_body(self) -> None:
        """Free the body. Idempotent."""
        if self.buffered_bytes:
            self.pieces.clear()
            memory = self._connection.body_memory
            memory.bytes -= self.buffered_bytes
            memory.freed_bytes += self.buffered_bytes
            self.buffered_bytes = 0

    def complete_request(self) -> None:
        """Serve the request, whose last byte has arrived."""
        self.more_body = False
        if self._first:
            self._begin()

    def refuse(self, error: RouterError) -> None:
        """Answer with this error, without waiting for the rest of the request."""
        if not self._served:
            self.received.refusal = error
            if self._first:
                self._begin()

    def disconnect(self) -> None:
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            (self.on_disconnect or self._task.cancel)()
            if not self.began:  # a task that is cancelled before its first step never runs its `finally`
                self._connection.tasks.discard(self._task)

    def _begin(self) -> None:
        if not self._served:
            self._served = True
            if self.buffered_bytes <= JOINED_INLINE_BYTES:
                self.received.body = b"".join(self.pieces)
                self.pieces.clear()
            self._task = self._connection.loop.create_task(self._run())
            self._connection.tasks.add(self._task)

    async def _run(self) -> None:
        self.began = True
        try:
            if self.pieces:
                pieces, self.pieces = self.pieces, []
                self.received.body = await asyncio.to_thread(b"".join, pieces)
            await self.serve(self)
        finally:
            if self._task is not None:
                self._connection.tasks.discard(self._task)
                self._task = None  # a cancelled task keeps its frames, and so this exchange
            if not self.response_complete:
                self._connection.transport.close()
                self.release_body()

    # --- the response ---

    def start(self, status: int, headers: HeaderList) -> None:
        """Set status and headers, which are sent with the first piece of body. Frees the request body.

        Raises `ValueError` if a header contains a line break."""
        self.started = True
        self.received.body = b""
        self.release_body()
        if self.received.cors_headers:
            headers = [*headers, *self.received.cors_headers]
        self._headers = headers
        lines = [STATUS_LINES[status], *map(b": ".join, headers)]
        if self.received.method == "HEAD" or status in _WITHOUT_BODY:
            self._expected_bytes = 0
        elif length := dict(headers).get(b"content-length"):
            self._expected_bytes = int(length)
        elif not self.http_1_0:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
            raise ValueError("a response header contains a line break")
        self._head = head + b"\r\n\r\n"

    @property
    def streams(self) -> bool:
        """Whether the response is an event stream."""
        return self._headers is not None and is_stream(self._headers)

    def put(self, piece: bytes) -> bool:
        """Send a piece of body. Returns False if the client is slow: wait for `ready` before sending more."""
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self._expected_bytes is not None:
            piece = piece[: self._expected_bytes]
            self._expected_bytes -= len(piece)
        if self._head:
            piece, self._head = self._head + piece, b""
        connection = self._connection
        connection.transport.write(piece)
        return not connection.write_paused

    async def ready(self) -> None:
        """Wait until the client has read enough."""
        if self._connection.write_paused:
            self.was_slow = True
            await self._connection.drain()

    def finish(self) -> None:
        """End the response. If it is shorter than its content-length, close the connection to show that."""
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if last:
            self._connection.transport.write(last)
        self.response_complete = True
        if not self.keep_alive or self._expected_bytes:
            self._connection.transport.close()
        self._connection.on_complete()
