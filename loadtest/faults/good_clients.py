"""A steady load of well-behaved clients, with the times of each request.

Requests are sent when they are due, whether the router keeps up or not, and times count from then.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec

from loadtest.bench.bodies import MARKER
from router.policy.retry import RETRY_STATUSES

TIMEOUT_S = 30.0
REUSED_S = 20.0
"""A connection that was idle for longer is not used again."""
TURNS = 5
FILLING = "filling chat turn"
"""Kind of the requests of `fill`."""
EVIL = "evil pod's"
"""Prefix of the kinds of requests that the evil pod served: how slow it is then is not the router's fault."""
RETRIED = frozenset({f"status {status}" for status in RETRY_STATUSES})
LAG_INTERVAL_S = 0.02


class GoodConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.lost = False
        self.idle_since_s = 0.0
        self.pod = ""
        """The pod of the last response."""
        self._end: asyncio.Future[str] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> tuple[float, float, str]:
        """Send a request. Returns when the first byte of body and the end arrived, and what went wrong."""
        loop = asyncio.get_running_loop()
        self._end, self._first_s, self._last, self.pod = loop.create_future(), 0.0, b"", ""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                error = await self._end
        except TimeoutError:
            error = "no response in time"
        if error:
            self.close()
        self.idle_since_s = loop.time()
        return self._first_s, self.idle_since_s, error

    def close(self) -> None:
        """Close the connection."""
        self.lost = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish("unreadable response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-warmroute-pod":
            self.pod = value.decode()

    def on_body(self, piece: bytes) -> None:
        if not self._first_s:
            self._first_s = asyncio.get_running_loop().time()
        self._last = piece

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        complete = b"[DONE]" in self._last or b'"usage"' in self._last
        self._finish(("" if complete else "incomplete response") if status == 200 else f"status {status}")
        self.lost |= not self._parser.should_keep_alive()

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self._finish("connection lost")

    def _finish(self, error: str) -> None:
        if self._end and not self._end.done():
            self._end.set_result(error)


@dataclass(slots=True)
class GoodResults:
    """Times in seconds, by kind of request, and what went wrong, of the requests that were due in one phase."""

    ttft_s: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    e2e_s: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    failures: Counter[str] = field(default_factory=Counter)
    lag_s: array[float] = field(default_factory=lambda: array("d"))
    """How late the event loop of these clients was: the least error of the times."""

    @property
    def answered(self) -> int:
        return sum(map(len, self.e2e_s.values()))

    def extend(self, other: GoodResults) -> None:
        """Add the times of another phase."""
        for mine, others in ((self.ttft_s, other.ttft_s), (self.e2e_s, other.e2e_s)):
            for kind, values in others.items():
                mine[kind].extend(values)


class GoodClients:
    """Sends requests at `rate_per_s`, and records those that are due to `results` (None: to nothing). `key`: of their
    tenant. Responses that `evil_pod` began and broke cannot be retried, and are no failures."""

    def __init__(
        self,
        port: int,
        rate_per_s: float,
        streamed: Sequence[bytes],
        whole: Sequence[bytes],
        *,
        key: str = "",
        evil_pod: str = "",
    ) -> None:
        self._key, self._evil_pod = key, evil_pod
        self.broken_by_pod = 0
        """Responses that the evil pod began and broke."""
        self.results: GoodResults | None = None
        self.failures: Counter[str] = Counter()
        """Failures of the whole run, also between phases."""
        self._port = port
        self._rate_per_s = rate_per_s
        self._kinds = {
            "stream": _bodies(streamed),
            "unary": _bodies(whole),
            "chat turn": _chat_turns(streamed, "chat"),
            FILLING: _chat_turns(whole, "first chat"),
        }
        self._idle: list[GoodConnection] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send until cancelled."""
        loop, chance = asyncio.get_running_loop(), random.Random(1)
        due_s = loop.time()
        kinds = itertools.cycle(("stream", "unary", "stream", "chat turn"))
        while True:
            due_s += chance.expovariate(self._rate_per_s)
            await asyncio.sleep(due_s - loop.time())
            task = asyncio.create_task(self._one(next(kinds), due_s, self.results))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def fill(self, clients: int, full: asyncio.Event) -> None:
        """Send turns of chats as fast as they are answered, until `full`."""
        loop = asyncio.get_running_loop()

        async def chat() -> None:
            while True:
                await self._one(FILLING, loop.time(), None)
                if full.is_set():
                    return

        await asyncio.gather(*(chat() for _ in range(clients)))

    async def watch_lag(self) -> None:
        """Record the lag of this event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            if self.results:
                self.results.lag_s.append(loop.time() - due_s)

    async def finish(self) -> None:
        """Wait until all requests have ended, and close the connections."""
        if self._running:
            await asyncio.wait(self._running, timeout=TIMEOUT_S)
        for connection in self._idle:
            connection.close()

    async def _one(self, kind: str, due_s: float, results: GoodResults | None) -> None:
        try:
            connection = await self._connection()
            first_s, end_s, error = await connection.ask(_request(next(self._kinds[kind]), self._key))
            if not connection.lost:
                self._idle.append(connection)
            if error and connection.pod and connection.pod == self._evil_pod and error not in RETRIED:
                self.broken_by_pod += 1
                return
        except OSError as failed:
            error = f"cannot connect: {failed}"
        if error:
            self.failures[f"{kind}: {error}"] += 1
        if results is None:
            return
        if error:
            results.failures[f"{kind}: {error}"] += 1
            return
        if self._evil_pod and connection.pod == self._evil_pod:
            kind = f"{EVIL} {kind}"
        results.ttft_s[kind].append(first_s - due_s)
        results.e2e_s[kind].append(end_s - due_s)

    async def _connection(self) -> GoodConnection:
        """The connection that was used last, so that the others become idle, or a new one."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since_s < loop.time() - REUSED_S:
            self._idle.pop(0).close()
        while self._idle:
            if not (connection := self._idle.pop()).lost:
                return connection
        return (await loop.create_connection(GoodConnection, "127.0.0.1", self._port))[1]


def _request(body: bytes, key: str = "") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer %b\r\n" % key.encode() if key else b""
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def _bodies(bodies: Sequence[bytes]) -> Iterator[bytes]:
    """The bodies in turn, each time with another marker."""
    for number in itertools.count():
        yield bodies[number % len(bodies)].replace(MARKER.encode(), b"%016x" % number)


def _chat_turns(bodies: Sequence[bytes], name: str) -> Iterator[bytes]:
    """The turns of chats, each with all messages before it; one chat after another."""
    for chat in itertools.count():
        body = msgspec.json.decode(bodies[chat % len(bodies)])
        messages = body["messages"]
        messages[0]["content"] = f"[{name} {chat}] {messages[0]['content']}"
        for turn in range(TURNS):
            yield msgspec.json.encode(body | {"messages": messages, "max_tokens": 16})
            answer = {"role": "assistant", "content": " token" * 16}
            messages = [*messages, answer, {"role": "user", "content": f"Question {turn} about it, please. " * 8}]
