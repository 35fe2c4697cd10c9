"""One request and its response on a client's connection.

When the request is complete, a task serves it. The response is written at the client's pace, its head together with
the first piece of the body. The task is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from itertools import islice
from time import time
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec

from router.admission.fair_bound import FairBound
from router.admission.tenant import Admitted
from router.errors import BodyTooLarge, RouterError, Saturated
from router.frontends.fair_turns import FairTurns
from router.frontends.http.connection import LARGE_PIECE_BYTES
from router.request.inbound import EVENT_STREAM, Head, HeaderList, media_type

MAX_COMPARED = 128
"""Connections, or bodies, that are compared to drop one of them. Comparing thousands would cost milliseconds."""
MAX_DROPPED = 4
"""Bodies that are dropped to take one piece of another."""
SLOW_REQUEST_S = 5.0
"""A request that is incomplete for longer may be dropped when all connections are in use, or all memory for bodies."""
PROGRESS_BYTES = 1024 * 1024
"""A client that sends a body has `limits.request_timeout_s` for each of them."""
MAX_LATE_BYTES = 1024 * 1024
"""A response that becomes an event of a stream is cut there."""
SMALL_PIECE_BYTES = 512
"""Smaller pieces of a body are joined on arrival: Python needs 60 bytes for a piece of one byte."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JOINED_INLINE_BYTES = 1024 * 1024
"""Larger bodies are joined in a thread, which releases the interpreter."""
_WITHOUT_BODY = frozenset({204, 304})
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}


@lru_cache(maxsize=1)
def date_line(unix_s: int) -> bytes:
    """Made once a second."""
    return b"date: " + formatdate(unix_s, usegmt=True).encode()


class BodyHolder(Protocol):
    """A request whose body is buffered; `Exchange` is one."""

    admitted: Admitted
    arrived_s: float
    """When the last piece arrived."""
    buffered_bytes: int
    pieces: list[bytes]

    def refuse(self, error: RouterError) -> None:
        """Answer with this error, without waiting for the rest of the request."""


class BodyMemory:
    """Total size of all buffered request bodies, limited to the `bound`.

    When it is full, bodies that arrive slowly give way: of the owner with the most for its weight, the one that holds
    the most bytes for the longest time without progress."""

    def __init__(self, bound: FairBound) -> None:
        self.bound = bound
        self.freed_bytes = 0
        self.arriving: dict[BodyHolder, float] = {}
        """Requests that hold bytes and are not complete, by the time of the first byte, oldest first."""

    @property
    def bytes(self) -> int:
        return self.bound.used

    def take(self, holder: BodyHolder, size_bytes: int, max_bytes: int, now_s: float) -> bool:
        """Count a piece of a body, and drop slow ones if necessary. Where there is no room for it, or the body has more
        than `max_bytes`, free the body, refuse the request and return False."""
        holder.arrived_s, owner, weight = now_s, holder.admitted.owner, holder.admitted.tenant.weight
        is_long = holder.buffered_bytes + size_bytes > max_bytes
        if is_long or not (self.bound.take(owner, weight, size_bytes) or self._takes_from_slow(holder, size_bytes)):
            why = f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes)."
            self.release(holder)
            holder.refuse(BodyTooLarge(why) if is_long else self.bound.refusal(owner, weight))
            return False
        if not holder.buffered_bytes:
            self.arriving[holder] = now_s
        holder.buffered_bytes += size_bytes
        return True

    def release(self, holder: BodyHolder) -> None:
        """Free a body. Idempotent."""
        if holder.buffered_bytes:
            self.arriving.pop(holder, None)
            self.bound.give_back(holder.admitted.owner, holder.buffered_bytes)
            self.freed_bytes += holder.buffered_bytes
            holder.buffered_bytes, holder.pieces = 0, []

    def _takes_from_slow(self, holder: BodyHolder, size_bytes: int) -> bool:
        admitted = holder.admitted
        for _ in range(MAX_DROPPED):
            if not self._drop_slowest(holder, size_bytes):
                return False
            if self.bound.take(admitted.owner, admitted.tenant.weight, size_bytes):
                return True
        return False

    def _drop_slowest(self, holder: BodyHolder, size_bytes: int) -> bool:
        now_s, part, must_yield = holder.arrived_s, self.bound.part, self.bound.must_yield
        taker = holder.admitted.owner, holder.admitted.tenant.weight, size_bytes
        slow = [
            other
            for other, began_s in islice(self.arriving.items(), MAX_COMPARED)
            if other is not holder
            and must_yield(other.admitted.owner, *taker, is_slow=now_s - began_s > SLOW_REQUEST_S)
        ]
        if not slow:
            return False
        slowest = max(slow, key=lambda one: (part(one.admitted.owner), (now_s - one.arrived_s) * one.buffered_bytes))
        self.release(slowest)
        slowest.refuse(Saturated("The body arrived too slowly, and others need memory (limits.max_held_bytes)."))
        return True


class ClientConnection(asyncio.Protocol):
    """What exchanges use of the connection that they are on."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[Any]]
    body_memory: BodyMemory
    turns: FairTurns
    """For the next large piece of a response."""
    write_paused = read_paused = False

    def response_complete(self) -> None:
        """Called at the end of each response."""
        raise NotImplementedError

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
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self.write_paused:
            self.write_paused = False
            self._writable.set()

    async def drain(self) -> None:
        await self._writable.wait()


Serve: TypeAlias = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Exchange(msgspec.Struct, eq=False):
    """One request and its response. Clients of HTTP/1.0 (`http_1_0`) get no chunks: the end of the connection ends the
    body."""

    head: Head
    admitted: Admitted
    refusal: RouterError | None
    """Why the request is refused: by its head, or while its body arrives."""
    keep_alive: bool
    http_1_0: bool
    _connection: ClientConnection
    serve: Serve
    waits_for_body: bool = True
    """Whether it is served when its body is complete; else it is served at once, and its body is dropped."""
    cors_headers: HeaderList = []
    """Headers of the response for a web page of an allowed origin."""
    body: bytes = b""
    """Complete once the request is served."""
    is_plain: bool = False
    """Whether its body has been unpacked."""
    _gone: asyncio.Event | None = None
    began: bool = False
    started: bool = False
    response_complete: bool = False
    _content_type: bytes = b""
    disconnected: bool = False
    was_slow: bool = False
    """Whether the response had to wait for the client."""
    more_body: bool = True
    pieces: list[bytes] = []
    buffered_bytes: int = 0
    arrived_s: float = 0.0
    """When the last piece arrived."""
    sees_response: ClassVar[bool] = True
    """Whether the response passes the router."""
    _first: bool = False
    _served: bool = False
    _task: asyncio.Task[None] | None = None
    _head: bytes = b""
    _chunked: bool = False
    _expected_bytes: int | None = None
    kept_open: bool = False
    """Whether the head of a stream was sent while the request waited: its status is 200 for good."""
    _ping: asyncio.TimerHandle | None = None
    _late: bytes | None = None
    """What has come of a response that is no stream, but must be an event now."""
    _late_event: bytes = b""

    # --- the request ---

    def take_turn(self) -> None:
        """Begin: all earlier responses of this connection are complete."""
        self._first = True
        expects_100 = self.head.named.get(b"expect", b"").lower() == b"100-continue"
        if expects_100 and not (self.http_1_0 or self.refusal or self.pieces):
            self._connection.transport.write(_CONTINUE)
        if not (self.more_body and self.waits_for_body) or self.refusal:
            self._begin()

    def add_body(self, piece: bytes, max_bytes: int) -> None:
        """Buffer a piece of the body. If that exceeds a limit, drop the body and refuse the request. The body of a
        request that is refused, or was, is dropped."""
        if self._served or self.refusal is not None or not self.waits_for_body:
            return
        connection, size_bytes = self._connection, len(piece)
        if connection.body_memory.take(self, size_bytes, max_bytes, connection.loop.time()):
            if size_bytes < SMALL_PIECE_BYTES and self.pieces and len(self.pieces[-1]) < SMALL_PIECE_BYTES:
                self.pieces[-1] += piece
            else:
                self.pieces.append(piece)

    def complete_request(self) -> None:
        self.more_body = False
        self._connection.body_memory.arriving.pop(self, None)
        if self.response_complete and not self.keep_alive:
            self._connection.transport.close()
        elif self._first:
            self._begin()

    def refuse(self, error: RouterError) -> None:
        """Answer with this error, without waiting for the rest of the request."""
        if not self.started:
            self.refusal = error
            if self._first:
                self._begin()

    def outlives_client(self) -> asyncio.Event:
        """Serve the request to its end also when its client disconnects: then the event is set."""
        self._gone = asyncio.Event()
        return self._gone

    def keep_open(self, interval_s: float, piece: bytes, headers: HeaderList) -> None:
        """Until the response starts, send this piece of a stream of events once in this time, the first time with the
        head. A response that is no stream then becomes an event."""
        if self._ping is None:
            self._ping = self._connection.loop.call_later(interval_s, self._keep_open, interval_s, piece, headers)

    def _keep_open(self, interval_s: float, piece: bytes, headers: HeaderList) -> None:
        if self.started or self.disconnected or self._task is None:
            return
        if not self.kept_open:
            self._set_head(200, headers)
            self.kept_open = True
        if not self._connection.write_paused:
            self.put(piece)
        self._ping = self._connection.loop.call_later(interval_s, self._keep_open, interval_s, piece, headers)

    def disconnect(self) -> None:
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            if self._gone is not None:
                self._gone.set()
            else:
                self._task.cancel()
            if not self.began:  # a task that is cancelled before its first step never runs its `finally`
                self._connection.tasks.discard(self._task)

    def _begin(self) -> None:
        if not self._served:
            self._served = True
            if self.buffered_bytes <= JOINED_INLINE_BYTES:
                self.body = b"".join(self.pieces)
                self.pieces.clear()
            self._task = self._connection.loop.create_task(self._run())
            self._connection.tasks.add(self._task)

    async def _run(self) -> None:
        self.began = True
        try:
            if self.pieces:
                pieces, self.pieces = self.pieces, []
                self.body = await asyncio.to_thread(b"".join, pieces)
            await self.serve(self)
        finally:
            if self._ping is not None:
                self._ping.cancel()
            if self._task is not None:
                self._connection.tasks.discard(self._task)
                self._task = None  # a cancelled task keeps its frames, and so this exchange
            if not self.response_complete:
                self._break_off()
                self._connection.body_memory.release(self)

    def _break_off(self) -> None:
        """Close the connection. Where its end would end the body, reset it: the body is not to look complete."""
        transport = self._connection.transport
        if (self.started or self.kept_open) and not (
            self._chunked or self._expected_bytes is not None or transport.is_closing()
        ):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        transport.close()

    # --- the response ---

    def start(self, status: int, headers: HeaderList) -> None:
        """Set status and headers, which are sent with the first piece of body. Frees the request body. Of a stream that
        was kept open, again for an error: what has come of a response that is no stream is left out then.

        Raises `ValueError` if a header contains a line break."""
        self.started = True
        self.body = b""
        self._connection.body_memory.release(self)
        if not self.kept_open:
            self._set_head(status, headers)
        elif status != 200 or media_type(dict(headers)) != EVENT_STREAM:
            self._late, self._late_event = b"", b"" if status == 200 else b"event: error\n"
        else:
            self._late = None

    def _set_head(self, status: int, headers: HeaderList) -> None:
        if self.cors_headers:
            headers = [*headers, *self.cors_headers]
        named = dict(headers)
        self._content_type = named.get(b"content-type", b"")
        lines = [STATUS_LINES[status], *map(b": ".join, headers)]
        if b"date" not in named:  # a pod's remains (RFC 9110 6.6.1)
            lines.append(date_line(int(time())))
        if self.head.method == "HEAD" or status in _WITHOUT_BODY:
            self._expected_bytes = 0
        elif length := named.get(b"content-length"):
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
    def sends_events(self) -> bool:
        return media_type({b"content-type": self._content_type}) == EVENT_STREAM

    def put(self, piece: bytes) -> bool:
        """Send a piece of body. Returns False if the client is slow: wait for `ready` before sending more."""
        if self._late is not None:
            self._late += piece[: MAX_LATE_BYTES - len(self._late)]
            return True
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self._expected_bytes is not None:
            piece = piece[: self._expected_bytes]
            self._expected_bytes -= len(piece)
        if self._head:
            piece, self._head = self._head + piece, b""
        connection = self._connection
        if not self.disconnected:  # its transport is closed, and its task has yet to learn that
            connection.transport.write(piece)
        return not connection.write_paused and len(piece) <= LARGE_PIECE_BYTES

    async def ready(self) -> None:
        """Wait until the client has read enough, and for its tenant's turn."""
        if self._connection.write_paused:
            self.was_slow = True
            await self._connection.drain()
        async with self._connection.turns.turn(self.admitted.tenant, 0, LARGE_PIECE_BYTES):
            await asyncio.sleep(0)

    def finish(self) -> None:
        """End the response. If it is shorter than its content-length, close the connection to show that. While a client
        is still sending, a close would reset the connection before the client has read the response."""
        if self._late is not None:
            data, self._late = b" ".join(self._late.splitlines()), None
            self.put(b"%bdata: %b\n\n" % (self._late_event, data))
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if last:
            self._connection.transport.write(last)
        self.response_complete = True
        if self._expected_bytes or not (self.keep_alive or self.more_body):
            self._connection.transport.close()
        self._connection.response_complete()
