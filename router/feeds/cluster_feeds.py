"""Exchanges data with Redis: facts, drains and ids of stored responses with other replicas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Annotated, Generic

import msgspec
from redis.exceptions import RedisError

from router.feeds.backoff import Backoff
from router.feeds.supervise import raise_if_cancelled
from router.fleet.drains import MAX_CHARACTERS, MAX_DRAINS, Drain, Drains
from router.guards import Bound
from router.index.stored_responses import StoredResponse
from router.stores.logged_once import LoggedOnce
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.scripts import SWAP
from router.stores.shared_state import RowT, SharedFact, SharedRows

DRAINS_INTERVAL_S, SWAPS = 1.0, 8
RESPONSES_INTERVAL_S = 0.02
BATCH, MAX_WAITING_RESPONSES = 500, 8192
RESPONSE_TTL_S = 3600.0
"""Routers find the pod of each other's stored responses for this long."""
_RESPONSE = msgspec.msgpack.Decoder(tuple[str, str, str])
DRAINS = Bound("drains", 256 * 1024, 256 * 1024)
_DrainLabels = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
_DRAINS = msgspec.json.Decoder(Annotated[dict[_DrainLabels, Drain], msgspec.Meta(max_length=2 * MAX_DRAINS)])
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


class SharedDrains:
    """The drains of operators in Redis, as one string. While Redis is away, the last known ones stay, and changes wait.
    A Redis that has lost the string gets it again from a router. An unreadable string stays as it is."""

    def __init__(self, connection: RedisConnection, keys: Keys, drains: Drains) -> None:
        self._connection = connection
        self._key = keys.drains
        self._drains = drains
        self._skipped = LoggedOnce()
        self._lock = asyncio.Lock()
        self.is_tried = False

    async def run(self) -> None:
        backoff = Backoff("drains", self._connection.nodes)
        while True:
            is_done = await backoff.attempt(self.exchange)
            self.is_tried = True
            await asyncio.sleep(DRAINS_INTERVAL_S if is_done else 0)

    async def share(self) -> bool:
        """Whether Redis has all changes of this router, so that the others have them within a second."""
        try:
            await self.exchange()
        except (RedisError, OSError):
            raise_if_cancelled()
        return not self._drains.unshared

    async def exchange(self) -> None:
        """Use what all routers have written, and write what changed here. Raises `redis.RedisError`."""
        async with self._lock:  # an answer that comes late is older than what is known
            for _ in range(SWAPS):
                if await self._swap():
                    return

    async def _swap(self) -> bool:
        """Whether no other router was faster."""
        found: bytes = await self._connection.client.getrange(self._key, 0, DRAINS.max_bytes)
        drains, sent = self._drains, dict(self._drains.unshared)
        try:
            known = DRAINS.json(found, _DRAINS) if found else {}
        except ValueError as error:
            self._skipped.warn("drains in Redis cannot be read", error=str(error))
            return True
        wanted = drains.with_unshared(known if found else drains.current)
        args = found, msgspec.json.encode(wanted)
        if wanted != known and not await self._connection.script(SWAP, [self._key], args):
            return False
        drains.unshared = {name: drain for name, drain in drains.unshared.items() if sent.get(name, ()) != drain}
        drains.replace(drains.with_unshared(wanted))
        return True


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
