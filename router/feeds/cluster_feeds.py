"""Exchanges data with Redis: work and stored responses with other replicas, receipts into a stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import msgspec
from redis.exceptions import RedisError

from router.feeds.backoff import Backoff
from router.feeds.supervise import raise_if_cancelled
from router.fleet.ledger import Ledger
from router.guards import Bound
from router.index.stored_responses import StoredResponse
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.shared_state import SharedRows
from router.stores.skipped import Skipped

EXCHANGE_INTERVAL_S = 0.04
RECEIPTS_INTERVAL_S = 0.2
RESPONSES_INTERVAL_S = 0.02
MAX_WAITING_RESPONSES = 8192
RESPONSE_TTL_S = 3600.0
"""Routers find the pod of each other's stored responses for this long."""
BATCH_LINES = 500
MAX_WAITING_LINES = 2000
MAX_WAITING_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 1024 * 1024
"""Longer lines, which contain long prompts (`receipts.prompts`), are dropped: Redis keeps `maxlen` lines in memory."""

_RESPONSE = msgspec.msgpack.Decoder(tuple[str, str, str])
_BOUND = Bound("stored response", 4096, 3)
SHARED_USER = "a publisher may have this router's user of Redis; give publishers one of their own: SECURITY.md"


class ReplicaFeed:
    """Shares the requests in flight with the other routers: without them, two would send to the same idle pod."""

    def __init__(self, rows: SharedRows, ledger: Ledger) -> None:
        self._rows = rows
        self._ledger = ledger
        self.replicas = 0
        """Number of other replicas with a recent update."""
        self.known = 0
        """The same, but as of the last exchange while Redis is away: the replicas go on sending."""

    async def run(self) -> None:
        backoff = Backoff("requests of other routers", self._rows.nodes)
        try:
            while True:
                if await backoff.attempt(self._exchange):
                    await asyncio.sleep(EXCHANGE_INTERVAL_S)
                else:
                    self.replicas = 0
                    self._ledger.apply_replicas((), time.monotonic())
        finally:
            with suppress(RedisError, OSError):  # the row expires by itself
                await asyncio.shield(self._rows.leave())

    async def _exchange(self) -> None:
        own = {pod: work.without_head() for pod, work in self._ledger.own().items()}
        others = await self._rows.exchange(own)
        self.replicas = self.known = len(others)
        self._ledger.apply_replicas(others.values(), time.monotonic())


class ReceiptStream:
    """Appends receipts to a Redis stream of about `maxlen` lines. Writing never waits: lines that cannot be sent are
    dropped, and `on_drop` is called with their number."""

    def __init__(self, connection: RedisConnection, key: str, maxlen: int, on_drop: Callable[[int], None]) -> None:
        self._connection = connection
        self._key = key
        self._maxlen = maxlen
        self._on_drop = on_drop
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def write(self, line: bytes) -> None:
        """Send the line with the next batch; drop it if it is too long, or if too many lines or bytes wait."""
        size_bytes = len(line)
        full = len(self._waiting) >= MAX_WAITING_LINES or self._waiting_bytes + size_bytes > MAX_WAITING_BYTES
        if full or size_bytes > MAX_LINE_BYTES:
            self._on_drop(1)
        else:
            self._waiting.append(line)
            self._waiting_bytes += size_bytes

    async def run(self) -> None:
        backoff = Backoff("receipt stream", self._connection.nodes)
        while True:
            if len(self._waiting) < BATCH_LINES:
                await asyncio.sleep(RECEIPTS_INTERVAL_S)
            if self._waiting:
                await backoff.attempt(self.send)

    async def send(self) -> None:
        """Send one batch. Raises `redis.RedisError`; its lines are dropped then."""
        lines = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_LINES))]
        self._waiting_bytes -= sum(map(len, lines))
        try:
            async with self._connection.client.pipeline(transaction=False) as pipeline:
                for line in lines:
                    pipeline.xadd(self._key, {"line": line}, maxlen=self._maxlen, approximate=True)
                await pipeline.execute()
        except BaseException:
            self._on_drop(len(lines))
            raise


class SharedResponses:
    """The pods of stored responses in Redis. While it is away, each router knows those of its own; at most
    `MAX_WAITING_RESPONSES` wait, and older ones are dropped."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._skipped = Skipped()
        self._waiting: deque[StoredResponse] = deque(maxlen=MAX_WAITING_RESPONSES)

    def add(self, stored: StoredResponse) -> None:
        self._waiting.append(stored)

    async def find(self, response_id: str) -> StoredResponse | None:
        """One of any router; None also while Redis is away, and for an owner that publishers might have written."""
        try:
            found = await self._connection.client.getrange(self._keys.response(response_id), 0, _BOUND.max_bytes)
            pod, model, owner = _BOUND.msgpack(found, _RESPONSE) if found else ("", "", "")
            if owner and await self._connection.may_write(self._keys.scopes):
                self._skipped.warn("not reading the owner of a response", why=SHARED_USER)
                return None
        except (RedisError, OSError, ValueError):
            raise_if_cancelled()
            return None
        return StoredResponse(response_id, pod, model, time.monotonic(), owner) if pod else None

    async def run(self) -> None:
        backoff = Backoff("stored responses", self._connection.nodes)
        while True:
            await asyncio.sleep(RESPONSES_INTERVAL_S)
            if self._waiting:
                await backoff.attempt(self.send)

    async def send(self) -> None:
        """Write one batch, which stays after a failure. Raises `redis.RedisError`."""
        batch = list(islice(self._waiting, BATCH_LINES))
        async with self._connection.client.pipeline(transaction=False) as pipeline:
            for stored in batch:
                value = msgspec.msgpack.encode((stored.pod, stored.model, stored.owner))
                pipeline.set(self._keys.response(stored.id), value, px=int(RESPONSE_TTL_S * 1000))
            await pipeline.execute()
        for stored in batch:
            if self._waiting and self._waiting[0] is stored:  # else it was dropped meanwhile
                self._waiting.popleft()
