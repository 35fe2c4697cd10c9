"""Where does what was learnt about pods and links outlive a router, and how do its replicas share it?

One string a model, in the Redis of the index. Of every fit there the one that has seen most stays: fits that have seen
the same traffic, or grew out of one another, must not be added up as if they were independent. Whoever exchanges takes
over what is better than its own and writes the union. Two that write at once lose nothing but the other's latest fits,
which come back with its next exchange, so that no script is needed. This file never decides how often.
"""

from __future__ import annotations

from router.policy.calibration import VERSION, Calibration, UnreadableCalibration
from router.stores import schema
from router.stores.connection import Connection
from router.stores.schema import Keys


def calibration_key(keys: Keys, model: str) -> str:
    """String: another version of the schema or of the calibration has another key."""
    return f"{keys.namespace}:{schema.VERSION}:calibration:{VERSION}:{model}"


class SharedCalibration:
    """What the routers of one model know together. Expires when none has learnt anything for `lifetime_s`."""

    def __init__(self, connection: Connection, keys: Keys, model: str, *, lifetime_s: float) -> None:
        self._client = connection.client
        self._key = calibration_key(keys, model)
        self._lifetime_ms = int(lifetime_s * 1000)
        self._written = b""

    async def exchange(self, calibration: Calibration) -> None:
        """Take over what is better there, and write what is new here. Raises `redis.RedisError`."""
        found: bytes | None = await self._client.get(self._key)
        try:
            calibration.load(found or b"")
        except UnreadableCalibration:
            found = None
        own = calibration.dump()
        # A router without traffic repeats nothing: its fits could be older than those that others write.
        if found is None or own not in (found, self._written):
            await self._client.set(self._key, own, px=self._lifetime_ms)
            self._written = own
