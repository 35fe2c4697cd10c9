"""What routers share through Redis, besides the index: requests in flight, fitted speeds, drains, the pods of stored
responses, and shares of quotas.

Each of them is a `SharedRow`, with a task of its own that runs one loop: write what this router has, merge what the
others have, pause.
A failure is retried with backoff and never fails a request. `stores/README.md` describes the keys. A new fact is a
class here and a line in `wiring/cluster_member.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, TypeAlias

import msgspec
from redis.exceptions import RedisError

from router.admission.sharing import CeilingReport, Grant, Grants, MeterSharing
from router.feeds.backoff import Backoff
from router.feeds.supervise import pause, raise_if_cancelled
from router.fleet.drains import MAX_CHARACTERS, MAX_DRAINS, Drain, Drains
from router.fleet.ledger import Ledger
from router.guards import Bound
from router.index.stored_responses import StoredResponse
from router.policy.calibration import CALIBRATION, Calibration, UnreadableCalibration
from router.stores.logged_once import LoggedOnce
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.scripts import EXCHANGE, EXCHANGE_SHARES, SWAP
from router.types import InFlight

SWAPS = 8
"""Attempts to replace a string that other routers replace as well, until the next exchange."""


class SharedRow:
    """One fact that routers share. `name`: of its task, also in the log; `interval_s`: between two exchanges."""

    name: str
    interval_s: float

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis
        self._skipped = LoggedOnce()

    async def exchange(self) -> None:
        """Write what this router has, and merge what the others have. Raises `redis.RedisError`, `OSError`."""
        raise NotImplementedError

    def lose(self) -> None:
        """Redis does not answer."""

    async def leave(self) -> None:
        """This router stops. Raises `redis.RedisError`; what it leaves then expires."""

    async def pause(self) -> None:
        await asyncio.sleep(self.interval_s)

    async def run(self) -> None:
        backoff = Backoff(self.name, self._redis.nodes)
        try:
            while True:
                if await backoff.attempt(self.exchange):
                    await self.pause()
                else:
                    self.lose()
        finally:
            with suppress(RedisError, OSError):
                await asyncio.shield(self.leave())

    async def _swap(self, key: str, bound: Bound, merge: Callable[[bytes], bytes | None], ttl_s: float = 0) -> bool:
        """Replace a string that all routers write by what `merge` makes of it, or leave it for None. False if other
        routers were faster each time."""
        for _ in range(SWAPS):
            found: bytes = await self._redis.client.getrange(key, 0, bound.max_bytes)
            new = merge(found)
            args = found, new, bound.max_bytes, int(ttl_s * 1000)
            if new is None or await self._redis.script(SWAP, [key], args):
                return True
        return False


# --- requests in flight ---

Work: TypeAlias = dict[str, InFlight]
"""Requests in flight by pod."""
ROW = Bound("row of a router", 128 * 1024, 10_000)
"""`max_items`: pods in the rows of all routers; to add them up takes four milliseconds."""
ALL_ROWS_BYTES = 1024 * 1024
_WORK = msgspec.msgpack.Decoder(Work)


class SharedWork(SharedRow):
    """The requests in flight of each router, in a hash with a row of each: without them, two routers would send to the
    same idle pod. A row is ignored `ttl_s` after its router last wrote it."""

    name, interval_s = "requests of other routers", 0.04

    def __init__(self, redis: RedisConnection, keys: Keys, router: str, ledger: Ledger, ttl_s: float = 1.0) -> None:
        super().__init__(redis)
        self._key = keys.routers
        self._router = router
        self._ledger = ledger
        self._ttl_ms = int(ttl_s * 1000)
        self.replicas = 0
        """Number of other routers with a recent row."""
        self.known = 0
        """The same, but as of the last exchange while Redis is away: the others go on sending."""

    def own(self) -> Work:
        """What the others get: without times by this router's clock."""
        return {pod: work.without_head() for pod, work in self._ledger.own().items()}

    def merge(self, rows: Iterable[Work]) -> None:
        self._ledger.apply_replicas(rows, time.monotonic())

    async def exchange(self) -> None:
        others = await self.rows(self.own())
        self.replicas = self.known = len(others)
        self.merge(others.values())

    def lose(self) -> None:
        self.replicas = 0
        self.merge(())

    async def leave(self) -> None:
        await self._rows(b"")

    async def rows(self, own: Work) -> dict[str, Work]:
        """Write this router's row; return those of the others by router. Unreadable ones are skipped."""
        flat = await self._rows(msgspec.msgpack.encode(own))
        found: dict[str, Work] = {}
        items = 0
        for name, other in zip(flat[::2], flat[1::2], strict=True):
            router = name.decode(errors="replace")
            if other and len(other) > ROW.max_bytes // 8:
                await asyncio.sleep(0)  # yield to requests
            try:
                row = ROW.msgpack(other or b"", _WORK)
                ROW.check_items(items + len(row))
            except ValueError as error:
                why = "too large" if other is None else str(error)
                self._skipped.warn("skipping row of a router", router=router, error=why)
                continue
            found[router], items = row, items + len(row)
        return found

    async def _rows(self, own: bytes) -> Any:
        """Names and rows of the others, in turn; None for a row that is too large."""
        args = (self._router, own, self._ttl_ms, ROW.max_bytes, ALL_ROWS_BYTES)
        return await self._redis.script(EXCHANGE, [self._key], args)


# --- fitted speeds ---

CALIBRATION_TTL_S = 7 * 24 * 3600.0
"""Calibration is kept this long after it was last written."""


class SharedCalibration(SharedRow):
    """The best fits of all routers, one string for each of the `models` that pods serve. It expires without new ones.

    For each fit, the version with the most observations is kept. Versions are not added up, because they may share
    observations."""

    name, interval_s = "shared calibration", 5.0

    def __init__(
        self,
        redis: RedisConnection,
        keys: Keys,
        calibration: Calibration,
        models: Callable[[], Iterable[str]],
        ttl_s: float = CALIBRATION_TTL_S,
    ) -> None:
        super().__init__(redis)
        self._keys = keys
        self._calibration = calibration
        self._models = models
        self._ttl_s = ttl_s
        self._written: dict[str, bytes] = {}
        """By model."""

    async def exchange(self) -> None:
        for model in sorted(self._models()):
            await self._exchange(model)

    async def pause(self) -> None:
        await asyncio.sleep(self.interval_s if self._written else 1.0)

    async def _exchange(self, model: str) -> None:
        last, new = self._written.setdefault(model, b""), None

        def merge(found: bytes) -> bytes | None:
            nonlocal new
            known: tuple[bytes, ...] = (found, last)
            try:
                self._calibration.load(found, model)
            except UnreadableCalibration:
                known = ()
            own = self._calibration.dump(model)
            # An unchanged calibration is not written again: others may have written newer fits.
            new = None if own in known else own
            return new

        if await self._swap(self._keys.calibration(model), CALIBRATION, merge, self._ttl_s) and new:
            self._written[model] = new


# --- drains ---

DRAINS = Bound("drains", 256 * 1024, 256 * 1024)
_Labels: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
_DRAINS = msgspec.json.Decoder(Annotated[dict[_Labels, Drain], msgspec.Meta(max_length=2 * MAX_DRAINS)])
_WRITTEN = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SharedDrains(SharedRow):
    """The drains of operators in Redis, as one string. While Redis is away, the last known ones stay, and changes wait.
    A Redis that has lost the string gets it again from a router. An unreadable string stays as it is. `apply` is
    awaited after a change."""

    name, interval_s = "drains", 1.0

    def __init__(
        self, redis: RedisConnection, keys: Keys, drains: Drains, apply: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(redis)
        self._key = keys.drains
        self._drains = drains
        self._apply = apply
        self._lock = asyncio.Lock()
        self.is_tried = False

    def lose(self) -> None:
        self.is_tried = True

    async def share(self) -> bool:
        """Whether Redis has all changes of this router, so that the others have them within a second."""
        try:
            await self.exchange()
        except (RedisError, OSError):
            raise_if_cancelled()
        return not self._drains.unshared

    async def exchange(self) -> None:
        async with self._lock:  # an answer that comes late is older than what is known
            is_changed = await self._exchange()
        self.is_tried = True
        if is_changed:
            await self._apply()

    async def _exchange(self) -> bool:
        """Whether other drains are in force than before."""
        drains, sent, merged = self._drains, dict[str, Drain | None](), dict[str, Drain]()

        def merge(found: bytes) -> bytes | None:
            nonlocal sent, merged
            known = DRAINS.json(found, _DRAINS) if found else {}
            sent, merged = dict(drains.unshared), drains.with_unshared(known if found else drains.current)
            return None if merged == known else encoded_drains(merged, known, found)

        try:
            if not await self._swap(self._key, DRAINS, merge):
                return False
        except ValueError as error:
            self._skipped.warn("drains in Redis cannot be read", error=str(error))
            return False
        drains.unshared = {name: one for name, one in drains.unshared.items() if sent.get(name, ()) != one}
        return drains.replace(drains.with_unshared(merged))


def encoded_drains(drains: Mapping[str, Drain], known: Mapping[str, Drain], found: bytes) -> bytes:
    """The string of these drains. One that is as it was `found` keeps the fields that a later version has written."""
    written = DRAINS.json(found, _WRITTEN) if found else {}
    kept = {name: written[name] if known.get(name) == drain else drain for name, drain in drains.items()}
    return msgspec.json.encode(kept)


# --- stored responses ---

BATCH, MAX_WAITING_RESPONSES = 500, 8192
RESPONSE_TTL_S = 3600.0
"""Routers find the pod of each other's stored responses for this long."""
SHARED_USER = "a publisher may have this router's user of Redis; give publishers one of their own: SECURITY.md"
_RESPONSE = msgspec.msgpack.Decoder(tuple[str, str, str])
_BOUND = Bound("stored response", 4096, 3)


class SharedResponses(SharedRow):
    """The pods of stored responses in Redis, a string each, read when they are asked for. While it is away, each router
    knows those of its own; at most `MAX_WAITING_RESPONSES` wait, and older ones are dropped."""

    name, interval_s = "stored responses", 0.02

    def __init__(self, redis: RedisConnection, keys: Keys) -> None:
        super().__init__(redis)
        self._keys = keys
        self._waiting: deque[StoredResponse] = deque(maxlen=MAX_WAITING_RESPONSES)

    def add(self, stored: StoredResponse) -> None:
        """Write it with the next batch."""
        self._waiting.append(stored)

    async def find(self, response_id: str) -> StoredResponse | None:
        """A response that any router has written; None also while Redis is away. One with an owner is not read if
        publishers might have written it."""
        try:
            found = await self._redis.client.getrange(self._keys.response(response_id), 0, _BOUND.max_bytes)
            pod, model, owner = _BOUND.msgpack(found, _RESPONSE) if found else ("", "", "")
            if owner and await self._redis.may_write(self._keys.scopes):
                self._skipped.warn("not reading the owner of a response", why=SHARED_USER)
                return None
        except (RedisError, OSError, ValueError):
            raise_if_cancelled()
            return None
        return StoredResponse(response_id, pod, model, time.monotonic(), owner) if pod else None

    async def exchange(self) -> None:
        """Write one batch, which stays after a failure."""
        batch = list(islice(self._waiting, BATCH))
        if not batch:
            return
        async with self._redis.client.pipeline(transaction=False) as pipeline:
            for stored in batch:
                value = msgspec.msgpack.encode((stored.pod, stored.model, stored.owner))
                pipeline.set(self._keys.response(stored.id), value, px=int(RESPONSE_TTL_S * 1000))
            await pipeline.execute()
        for stored in batch:
            if self._waiting and self._waiting[0] is stored:  # else it was dropped meanwhile
                self._waiting.popleft()


# --- quotas ---

SHORTEST_INTERVAL_S = 0.005
"""Time between two exchanges of quotas while requests wait for shares, as near a limit."""
MAX_EXCHANGE_S = 0.5
"""An exchange that takes longer has failed: another process may use the share by then."""
MAX_WAIT_S = 0.5
"""A request waits for a round trip, but no longer than this. Then the local shares are used, which may be wrong by one
share: a shorter wait would cause that on a busy machine."""


class SharedQuotas(SharedRow):
    """Exchanges what this process uses of its quotas for new shares of them (`admission/sharing.py`). `member`: the
    name of this process.

    A request that does not fit under the ceilings of this process waits for the next exchange, which begins at once,
    and no longer than `MAX_WAIT_S`. All other requests wait for nothing. No library serves here: `limits` and its like
    ask Redis about each request."""

    name, interval_s = "quotas", 0.05

    def __init__(
        self,
        redis: RedisConnection,
        keys: Keys,
        member: str,
        sharing: MeterSharing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(redis)
        self._keys = keys
        self._member = member
        self.sharing = sharing
        self._clock = clock
        self._wanted = asyncio.Event()
        self._waiting: asyncio.Future[None] | None = None

    async def pause(self) -> None:
        await asyncio.sleep(SHORTEST_INTERVAL_S)
        await pause(self._wanted, self.interval_s)

    async def exchange(self) -> None:
        waiting, self._waiting = self._waiting, None
        try:
            async with asyncio.timeout(MAX_EXCHANGE_S):
                answer = await self.grants(self.sharing.reports(self._clock()))
            self.sharing.granted(answer, self._clock())
        except BaseException:
            self.sharing.lost(self._clock())
            raise
        finally:
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def grants(self, reports: Sequence[CeilingReport]) -> Grants:
        """Record these reports in the book of shares. Raises `redis.RedisError`."""
        keys = [self._keys.quota_members, *(self._keys.quota(report.meter) for report in reports)]
        numbers = [n for one in reports for n in (one.limit, one.used, one.wanted, int(one.kept_s * 1000))]
        members, *flat = await self._redis.script(EXCHANGE_SHARES, keys, [self._member, *numbers])
        return Grants([Grant(*pair) for pair in zip(flat[::3], flat[1::3], flat[2::3], strict=True)], members)

    async def next_exchange(self) -> None:
        """Wait until an exchange that begins now has ended; without an answer in time, use the local shares."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        self._wanted.set()
        done, _ = await asyncio.wait([self._waiting], timeout=MAX_WAIT_S)
        if not done:
            self.sharing.lost(self._clock())

    async def leave(self) -> None:
        """Be no member any more: what it may use is free, what it has used expires."""
        self.sharing.lost(self._clock())
        await self._redis.client.hdel(self._keys.quota_members, self._member)
