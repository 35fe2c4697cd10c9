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

from router.errors import StaleConnection, UpstreamBroken, UpstreamTimeout
from router.proxy.headers import HeaderList
from router.types import PodId

Sink: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of body; False: no more for now."""
Ready: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when the sink takes pieces again."""

READ_PAUSE_BYTES = 256 * 1024
"""Held unread for one request before the pod is told to wait; or is given up, where all that is no more than a head."""
_STATUSES = range(100, 600)


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """Deadlines of one exchange."""

    connect_s: float
    first_byte_s: float
    idle_s: float


class Connection(asyncio.Protocol):
    """One connection to `pod`, one exchange at a time. Parser callbacks fill it, `head` and `read` drain it.

    Deadlines cost next to nothing: one timer a connection looks whether somebody has waited for too long, no later
    than the shortest of them can be over, and is set anew by whoever waits when it has gone off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: UpstreamTimeouts, pod: PodId = "") -> None:
        self._loop = loop
        self._pod = pod
        self._timeouts = timeouts
        self._shortest_s = min(timeouts.first_byte_s, timeouts.idle_s)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self.idle_since_s = 0.0
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        """For httptools: most of what comes is body, and costs no call of ours."""
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self._chunks.clear()
        self._buffered_bytes = 0
        """What came since anybody has taken it, with all that is around a body."""
        self._paused = False
        self._head_done = False
        self._complete = False
        self._broken = ""
        self._sink: Sink | None = None
        """Where pieces go at once; None while they are held to be read."""

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._give_up(f"not HTTP: {error}")
        sink = self._sink
        if sink is None:
            self._buffered_bytes += len(data)
            if self._buffered_bytes > READ_PAUSE_BYTES:
                self._too_much()
            self._wake()
        elif not self._hand_on(sink) or self._complete or self._broken:
            self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._head_done and exc is None and not self._broken and not _tells_its_end(self.headers):
            self._complete = True
        self._parser = None  # it leads back here: a cycle
        self._wake()

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self._complete:  # what follows would be taken for the answer to somebody else's request
            raise UpstreamBroken("more bytes than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status not in _STATUSES:
            raise UpstreamBroken(f"status {self.status}")
        if self.status < 200:
            return
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue, 103 Early Hints: the real answer follows
            self.headers = []
        else:
            self._complete = True

    # --- one exchange ---

    def send(self, message: bytes) -> None:
        """Begin an exchange: write the whole request."""
        self._reset()
        self._transport.write(message)

    async def head(self) -> None:
        """Wait until `status` and `headers` are here. Raises `UpstreamTimeout`, `UpstreamBroken`, or `StaleConnection`
        when not a byte came; whatever it raises, the connection is closed."""
        self._deadline_s = self._loop.time() + self._timeouts.first_byte_s
        try:
            while not self._head_done:
                if self._lost or self._broken:
                    if not self._buffered_bytes:
                        raise StaleConnection("the pod closed the connection without an answer", pod=self._pod)
                    raise self._cut_off("headers")
                await self._news()
        except BaseException:
            self.close()
            raise

    async def read(self) -> bytes:
        """The next piece of body, everything that has come; b"" at the end. Raises `UpstreamTimeout`,
        `UpstreamBroken`."""
        if not self._chunks:
            self._deadline_s = self._loop.time() + self._timeouts.idle_s
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost or self._broken:
                raise self._cut_off("answer")
            await self._news()
        piece = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._go_on()
        return piece

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Hand pieces to `sink` as they come, from within `data_received`, to the end. Raises like `read`."""
        while True:
            self._buffered_bytes = 0
            self._hand_on(sink)
            if self._paused:
                await ready()
                self._go_on()
                continue
            if self._complete:
                return
            if self._lost or self._broken:
                raise self._cut_off("answer")
            self._sink = sink
            try:
                await self._news()
            finally:
                self._sink = None

    def _hand_on(self, sink: Sink) -> bool:
        """Give the sink what is held. False where it wants no more; then the pod is told to wait."""
        self._deadline_s = self._loop.time() + self._timeouts.idle_s
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

    def _too_much(self) -> None:
        if not self._head_done:
            self._give_up("headers without end")
        elif self._chunks:
            self._pause()

    def _pause(self) -> None:
        if not self._paused and self.alive:
            self._paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        self._paused = False
        if self.alive:
            self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        """May another exchange follow on this connection?"""
        return self._complete and not self._chunks and self._keep_alive and self.alive

    @property
    def alive(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; the pod stops working on whatever is unfinished."""
        if not self._lost:
            self._transport.abort()

    def _give_up(self, why: str) -> None:
        self._broken = why
        self.close()

    def _cut_off(self, part: str) -> UpstreamBroken:
        why = self._broken or f"the pod closed the connection inside its {part}"
        return UpstreamBroken(f"pod {self._pod}: {why}", pod=self._pod)

    def _news(self) -> asyncio.Future[None]:
        """Done when anything has come, the end of the connection too. Raises `UpstreamTimeout` at the deadline."""
        self._waiter = waiter = self._loop.create_future()
        if self._timer is None:
            self._timer = self._loop.call_later(self._shortest_s, self._look)
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _look(self) -> None:
        """Is whoever waits waiting for too long?"""
        self._timer, waiter = None, self._waiter
        if waiter is None or waiter.done():
            return
        left_s = self._deadline_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._shortest_s), self._look)
            return
        self._waiter = None  # its exception knows the frames that know this connection: a cycle
        waiter.set_exception(UpstreamTimeout(f"pod {self._pod} {self._silence()}", pod=self._pod))

    def _silence(self) -> str:
        if self._head_done:
            return f"was silent for {self._timeouts.idle_s:g} s"
        return f"did not answer within {self._timeouts.first_byte_s:g} s"


def _tells_its_end(headers: HeaderList) -> bool:
    """Else a body ends with its connection."""
    return any(
        name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
        for name, value in headers
    )
