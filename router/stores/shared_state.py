"""State that router replicas share through Redis, besides the index.

`SharedCalibration`: fitted coefficients, one string per model, which stay when a router stops. `SharedWorkload`:
requests in flight by router. This file does not decide how often to exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from router.policy.calibration import VERSION, Calibration, UnreadableCalibration
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import VERSION as SCHEMA_VERSION
from router.stores.redis_schema import Keys
from router.stores.scripts import EXCHANGE
from router.types import InFlight, PodId


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
        found: bytes | None = await self._client.get(self._key)
        try:
            calibration.load(found or b"")
        except UnreadableCalibration:
            found = None
        own = calibration.dump(self._model)
        # An unchanged calibration is not written again: others may have written newer fits.
        if found is None or own not in (found, self._written):
            await self._client.set(self._key, own, px=self._ttl_ms)
            self._written = own


Work: TypeAlias = Mapping[PodId, InFlight]

_ROW = msgspec.msgpack.Decoder(dict[str, InFlight])


class SharedWorkload:
    """Requests in flight of this router and of the others. Methods raise `redis.RedisError`."""

    def __init__(self, connection: RedisConnection, keys: Keys, router: str, *, ttl_s: float) -> None:
        self.nodes = connection.nodes
        self._connection = connection
        self._keys = keys
        self._router = router
        self._ttl_ms = int(ttl_s * 1000)

    async def exchange(self, own: Work) -> dict[str, Work]:
        """Write own requests in flight; return the others' by router. Rows of another version are skipped."""
        row = {pod: work.without_head() for pod, work in own.items()}
        return await self._exchange(msgspec.msgpack.encode(row))

    async def leave(self) -> None:
        await self._exchange(b"")

    async def _exchange(self, row: bytes) -> dict[str, Work]:
        args = (self._router, row, self._ttl_ms)
        flat = await self._connection.script(EXCHANGE, [self._keys.routers], args)
        found: dict[str, Work] = {}
        for router, other in zip(flat[::2], flat[1::2], strict=True):
            try:
                found[router.decode()] = _ROW.decode(other)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found
