"""How do one request and its answer pass over a client's connection?

The request is gathered whole; then a task serves it, and the answer goes straight to the transport: the head together
with the first piece of body, each further piece as it comes, at the client's pace. A client that leaves cancels the
task. To uvicorn's protocol an exchange is one of its cycles. This file parses nothing and knows no pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.errors import BodyTooLarge, RouterError, Saturated
from router.proxy.headers import HeaderList
from router.proxy.relay import is_stream

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_WITHOUT_BODY = frozenset({204, 304})
_STATUS_LINES = {status: line.rstrip() for status, line in STATUS_LINE.items()}


class ReceivedRequest(msgspec.Struct):
    """A request as it came. `refusal`: what is wrong with it before anybody has read its body."""

    method: str
    path: str
    """Without its query, decoded."""
    target: bytes
    """Path and query, raw."""
    headers: HeaderList
    named: Mapping[bytes, bytes]
    """Of these, the first of each name."""
    peer: str
    body: bytes = b""
    refusal: RouterError | None = None


class BodyMemory(msgspec.Struct):
    """Bytes of bodies that the exchanges of all clients hold together, `max_bytes` of them at a time."""

    max_bytes: int
    bytes: int = 0


@dataclass(slots=True, eq=False)
class ClientConnection:
    """What an exchange needs of the connection that it is on."""

    transport: asyncio.Transport
    flow: FlowControl
    tasks: set[asyncio.Task[Any]]
    loop: asyncio.AbstractEventLoop
    answered: Callable[[], None]
    """To be told when an answer is complete."""
    held: BodyMemory


Serve: TypeAlias = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer. `http_1_0`: the client knows no chunks, a body may end with the connection."""

    received: ReceivedRequest
    keep_alive: bool
    http_1_0: bool
    expects_100: bool
    _connection: ClientConnection
    _serve: Serve
    began: bool = False
    """Has anybody begun to serve it?"""
    started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    more_body: bool = True
    """Is there more to come of the request?"""
    pieces: list[bytes] = []
    held_bytes: int = 0
    _first: bool = False
    _served: bool = False
    """Is there, or was there, a task for it?"""
    _task: asyncio.Task[None] | None = None
    _headers: HeaderList | None = None
    """Of the answer."""
    _head: bytes = b""
    _chunked: bool = False
    _expected_bytes: int | None = None

    # --- the request ---

    def take_turn(self) -> None:
        """No other exchange on this connection is before this one."""
        self._first = True
        if self.expects_100 and not self.received.refusal and not self.pieces:
            self._connection.transport.write(_CONTINUE)
        if not self.more_body or self.received.refusal:
            self._begin()

    def take(self, piece: bytes, max_bytes: int) -> None:
        """Take a piece of the body. If that is too much, nothing is held any more and the request is refused."""
        if self.received.refusal is not None:
            return
        held, size_bytes = self._connection.held, len(piece)
        if self.held_bytes + size_bytes > max_bytes:
            self.release_body()
            self.refuse(BodyTooLarge(f"The body is larger than the {max_bytes} bytes that are taken."))
        elif held.bytes + size_bytes > held.max_bytes:
            self.release_body()
            self.refuse(Saturated("The bodies of other requests fill the memory that they may."))
        else:
            held.bytes += size_bytes
            self.held_bytes += size_bytes
            self.pieces.append(piece)

    def release_body(self) -> None:
        """The body is needed no more. Again, it changes nothing."""
        if self.held_bytes:
            self.pieces.clear()
            self._connection.held.bytes -= self.held_bytes
            self.held_bytes = 0

    def complete_request(self) -> None:
        """All of the request is here."""
        self.more_body = False
        if self._first:
            self._begin()

    def refuse(self, error: RouterError) -> None:
        """Answer with this error, without the rest of the request."""
        if not self._served:
            self.received.refusal = error
            if self._first:
                self._begin()

    def disconnect(self) -> None:
        """The client has closed its connection: whoever works for it stops at once."""
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            self._task.cancel()
            if not self.began:  # a task that is cancelled before its first step never runs, not even its `finally`
                self._connection.tasks.discard(self._task)

    def _begin(self) -> None:
        if not self._served:
            self._served = True
            self.received.body = b"".join(self.pieces)
            self.pieces.clear()
            self._task = self._connection.loop.create_task(self._run())
            self._connection.tasks.add(self._task)

    async def _run(self) -> None:
        self.began = True
        try:
            await self._serve(self)
        finally:
            if self._task is not None:
                self._connection.tasks.discard(self._task)
                self._task = None  # a task that was cancelled keeps the frames it was in, and with them this exchange
            if not self.response_complete:
                self._connection.transport.close()
                self.release_body()

    # --- the answer ---

    def start(self, status: int, headers: HeaderList) -> None:
        """Status and headers; they go out with what follows. Whoever begins to answer has read the body.

        Raises `ValueError` where a header would end its line."""
        self.started = True
        self.received.body = b""
        self.release_body()
        self._headers = headers
        lines = [_STATUS_LINES[status], *map(b": ".join, headers)]
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
            raise ValueError("a header of the answer has a line break in it")
        self._head = head + b"\r\n\r\n"

    @property
    def streams(self) -> bool:
        """Is the answer that has begun an event stream?"""
        return self._headers is not None and is_stream(self._headers)

    def put(self, piece: bytes) -> bool:
        """A piece of body. False: the client is slow, and more must wait until it is `ready`."""
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self._expected_bytes is not None:
            piece = piece[: self._expected_bytes]
            self._expected_bytes -= len(piece)
        if self._head:
            piece, self._head = self._head + piece, b""
        line = self._connection
        line.transport.write(piece)
        return not line.flow.write_paused

    async def ready(self) -> None:
        """Wait until the client may take more."""
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()

    def finish(self) -> None:
        """The answer is complete, unless less came than its head has promised: then only the connection can tell."""
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if last:
            self._connection.transport.write(last)
        self.response_complete = True
        if not self.keep_alive or self._expected_bytes:
            self._connection.transport.close()
        self._connection.answered()

    # --- what uvicorn's protocol looks for in a cycle ---

    @property
    def message_event(self) -> Exchange:
        """What is set when the connection is lost."""
        return self

    def set(self) -> None:
        """`gone` is told more precisely."""
