"""Exchanges data with Redis: facts and ids of stored responses with other replicas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Generic

import msgspec
from redis.exceptions import RedisError

from router.feeds.backoff import Backoff
from router.feeds.supervise import raise_if_cancelled
from router.guards import Bound
from router.index.stored_responses import StoredResponse
from router.stores.logged_once import LoggedOnce
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.shared_state import RowT, SharedFact, SharedRows

RESPONSES_INTERVAL_S = 0.02
BATCH, MAX_WAITING_RESPONSES = 500, 8192
RESPONSE_TTL_S = 3600.0
"""Routers find the pod of each other's stored responses for this long."""
_RESPONSE = msgspec.msgpack.Decoder(tuple[str, str, str])
_BOUND = Bound("stored response", 4096, 3)
SHARED_USER = "a publisher may have this router's user of Redis; give publishers one of their own: SECURITY.md"


class FactFeed(Generic[RowT]):
    def __init__(self, rows: SharedRows[RowT], fact: SharedFact[RowT]) -> None:
        self._rows = rows
        self._fact = fact
        self.replicas = 0
        """Number of other replicas with a recent update."""
        self.known = 0
        """The same, but as of the last exchange while Redis is away: the replicas go on sending."""

    async def run(self) -> None:
        backoff = Backoff(self._fact.name, self._rows.nodes)
        try:
            while True:
                if await backoff.attempt(self._exchange):
                    await asyncio.sleep(self._fact.interval_s)
                else:
                    self.replicas = 0
                    self._fact.merge(())
        finally:
            with suppress(RedisError, OSError):  # the row expires by itself
                await asyncio.shield(self._rows.leave())

    async def _exchange(self) -> None:
        others = await self._rows.exchange(self._fact.own())
        self.replicas = self.known = len(others)
        self._fact.merge(others.values())


class SharedResponses:
    """The pods of stored responses in Redis. While it is away, each router knows those of its own; at most
    `MAX_WAITING_RESPONSES` wait, and older ones are dropped."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._skipped = LoggedOnce()
        self._waiting: deque[StoredResponse] = deque(maxlen=MAX_WAITING_RESPONSES)

    def add(self, stored: StoredResponse) -> None:
        """Write it with the next batch."""
        self._waiting.append(stored)

    async def find(self, response_id: str) -> StoredResponse | None:
        """A response that any router has written; None also while Redis is away. One with an owner is not read if
        publishers might have written it."""
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
        batch = list(islice(self._waiting, BATCH))
        async with self._connection.client.pipeline(transaction=False) as pipeline:
            for stored in batch:
                value = msgspec.msgpack.encode((stored.pod, stored.model, stored.owner))
                pipeline.set(self._keys.response(stored.id), value, px=int(RESPONSE_TTL_S * 1000))
            await pipeline.execute()
        for stored in batch:
            if self._waiting and self._waiting[0] is stored:  # else it was dropped meanwhile
                self._waiting.popleft()
