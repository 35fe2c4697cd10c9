"""State that router replicas share through Redis, besides the index.

`SharedCalibration`: fitted coefficients, one string per model, which stay when a router stops. `SharedRows`: the rows
of all routers of a fact, such as their requests in flight (`wiring/shared_facts.py`). This file exchanges once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from router.guards import Bound
from router.policy.calibration import CALIBRATION, VERSION, Calibration, UnreadableCalibration
from router.stores.logged_once import LoggedOnce
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import VERSION as SCHEMA_VERSION
from router.stores.redis_schema import Keys
from router.stores.scripts import EXCHANGE

RowT = TypeVar("RowT", bound=Sized)
"""What each router shares of a fact, by pod."""

ROW = Bound("row of a router", 128 * 1024, 10_000)
"""`max_items`: pods in the rows of all routers; to add them up takes four milliseconds."""
ALL_ROWS_BYTES = 1024 * 1024


def calibration_key(keys: Keys, model: str) -> str:
    """Key of the string; includes the versions of the schema and of the calibration."""
    return f"{keys.namespace}:{SCHEMA_VERSION}:calibration:{VERSION}:{model}"


class SharedCalibration:
    """The best fits of all routers of one model. Expires after `ttl_s` without new ones.

    For each fit, the version with the most observations is kept. Versions are not added up, because they may share
    observations. If two routers write at once, the fits of one are lost until its next exchange."""

    def __init__(self, connection: RedisConnection, keys: Keys, model: str, *, ttl_s: float) -> None:
        self._client = connection.client
        self._model = model
        self._key = calibration_key(keys, model)
        self._ttl_ms = int(ttl_s * 1000)
        self._written = b""

    async def exchange(self, calibration: Calibration) -> None:
        """Load better fits from Redis and write new ones. Raises `redis.RedisError`."""
        found: bytes | None = await self._client.getrange(self._key, 0, CALIBRATION.max_bytes)
        try:
            calibration.load(found or b"", self._model)
        except UnreadableCalibration:
            found = None
        own = calibration.dump(self._model)
        # An unchanged calibration is not written again: others may have written newer fits.
        if found is None or own not in (found, self._written):
            await self._client.set(self._key, own, px=self._ttl_ms)
            self._written = own


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFact(Generic[RowT]):
    """A fact of which each router has its own row, and reads those of the others."""

    name: str
    """The name of its task, also in the log."""
    key: str
    """Name of its hash in Redis, after those of namespace and version."""
    ttl_s: float
    """A row is ignored this long after its router last wrote it."""
    interval_s: float
    row: type[RowT]
    """What msgpack decodes. Rows that cannot be decoded are skipped."""
    own: Callable[[], RowT]
    merge: Callable[[Collection[RowT]], None]
    """Called with the rows of the other routers after each exchange, and with none when Redis does not answer."""


class SharedRows(Generic[RowT]):
    """The rows of a fact in Redis. Methods raise `redis.RedisError`."""

    def __init__(self, connection: RedisConnection, keys: Keys, router: str, fact: SharedFact[RowT]) -> None:
        self.nodes = connection.nodes
        self._connection = connection
        self._key = keys.fact(fact.key)
        self._router = router
        self._ttl_ms = int(fact.ttl_s * 1000)
        self._skipped = LoggedOnce()
        self._decoder = msgspec.msgpack.Decoder(fact.row)

    async def exchange(self, own: RowT) -> dict[str, RowT]:
        """Write this router's row; return the others' by router. Unreadable ones are skipped."""
        return await self._exchange(msgspec.msgpack.encode(own))

    async def leave(self) -> None:
        await self._exchange(b"")

    async def _exchange(self, own: bytes) -> dict[str, RowT]:
        args = (self._router, own, self._ttl_ms, ROW.max_bytes, ALL_ROWS_BYTES)
        flat = await self._connection.script(EXCHANGE, [self._key], args)
        found: dict[str, RowT] = {}
        items = 0
        for name, other in zip(flat[::2], flat[1::2], strict=True):
            router = name.decode(errors="replace")
            if other and len(other) > ROW.max_bytes // 8:
                await asyncio.sleep(0)  # yield to requests
            try:
                row = ROW.msgpack(other or b"", self._decoder)
                ROW.check_items(items + len(row))
            except ValueError as error:
                why = "too large" if other is None else str(error)
                self._skipped.warn("skipping row of a router", router=router, error=why)
                continue
            found[router], items = row, items + len(row)
        return found
