"""What have the other replicas of the router in flight?

One script and one round trip both ways: our row goes in, everybody else's that is fresh comes out. Only the server's
clock counts. This file never decides how often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from router.stores.connection import Connection
from router.stores.schema import Keys
from router.stores.scripts import EXCHANGE
from router.types import InFlight, PodId

Work: TypeAlias = Mapping[PodId, InFlight]

_SHARED = 7
"""So many fields of `InFlight` mean the same to every router: the rest is by its own clock."""
_ROW = msgspec.msgpack.Decoder(dict[str, tuple[int, int, int, float, int, int, int]])


class Workload:
    """The row of one router, and those of the others. Rows of routers whose names begin with `siblings` are left out:
    other workers of this one, known already. Methods raise `redis.RedisError`."""

    def __init__(
        self, connection: Connection, keys: Keys, router: str, *, lifetime_s: float, siblings: str | None = None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._router = router
        self._lifetime_ms = int(lifetime_s * 1000)
        self._siblings = siblings

    async def exchange(self, own: Work) -> dict[str, Work]:
        """Write our row; the others' by router. A row that cannot be read is one of another version: left out."""
        row = {pod: msgspec.structs.astuple(work)[:_SHARED] for pod, work in own.items()}
        return await self._exchange(msgspec.msgpack.encode(row))

    async def leave(self) -> None:
        """Take our row away."""
        await self._exchange(b"")

    async def _exchange(self, row: bytes) -> dict[str, Work]:
        args = (self._router, row, self._lifetime_ms)
        flat = await self._connection.script(EXCHANGE, [self._keys.routers], args)
        found: dict[str, Work] = {}
        for router, other in zip(flat[::2], flat[1::2], strict=True):
            try:
                name = router.decode()
                if self._siblings is None or not name.startswith(self._siblings):
                    found[name] = {pod: InFlight(*sums) for pod, sums in _ROW.decode(other).items()}
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found
