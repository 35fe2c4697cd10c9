"""Connects a router to Redis: the replica of the cluster index, its feed, and the facts that routers share.

Used only with `index.redis`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from router.admission.sharing import MeterSharing
from router.config.index_schema import RedisIndex
from router.feeds.kv_redis import IndexFeed
from router.feeds.shared_rows import SharedCalibration, SharedDrains, SharedQuotas, SharedResponses, SharedWork
from router.feeds.supervise import Feeds
from router.fleet.drains import Drains
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.index.cluster import ClusterIndex
from router.observe.declared import of_process
from router.observe.metrics import Metrics
from router.policy.calibrator import Calibrator
from router.stores.index_reader import IndexReader
from router.stores.logged_once import LoggedOnce
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import connect
from router.stores.redis_schema import Keys
from router.types import Generation, Pod

_NO_PUBLISHER = (
    "no publisher with this pod's URL is in Redis: it is missing or has stopped; run `warmroute publish` for it, with"
    " `--advertise` if it knows the pod by another URL"
)


class ReadableGenerations:
    """Whether blocks of a publisher's generation can match prompts of this router. `ours`: its generations by model.
    One that differs is logged once."""

    def __init__(self, ours: Mapping[str, Generation]) -> None:
        self._ours = ours
        self.differing: dict[str, str] = {}
        """By model, how its publisher differs."""
        self._logged = LoggedOnce()

    def __call__(self, generation: Generation) -> bool:
        ours = self._ours.get(generation.model)
        if ours is None:
            return False
        expected, found = (f"{one.tokenizer}, blocks of {one.block_size_tokens}" for one in (ours, generation))
        if expected != found:
            self.differing[generation.model] = f"its publisher has {found}, and this router {expected}"
            event = "ignoring publisher: tokenizer or block size differs"
            self._logged.warn(event, model=generation.model, router=expected, publisher=found)
        return expected == found


class ClusterMember:
    """A router's connection to the cluster. `wanted`: whether to read a generation; `apply_drains` is awaited when
    drains of other routers have changed."""

    def __init__(
        self,
        config: RedisIndex,
        wanted: ReadableGenerations,
        ledger: Ledger,
        calibrator: Calibrator,
        fleet: Fleet,
        drains: Drains,
        apply_drains: Callable[[], Awaitable[None]],
    ) -> None:
        self._differing = wanted.differing
        keys = Keys(config.namespace)
        self._connection = redis = connect(config)
        index = ClusterIndex(
            holder_ttl_s=config.holder_ttl_s, max_bytes=config.max_replica_bytes, scatter=secrets.randbits(64)
        )
        self.store = ReplicaStore(index, max_age_s=config.max_stale_s)
        self._feed = IndexFeed(IndexReader(redis, keys), self.store, wanted)
        self.loaded = self._feed.loaded
        self.nodes = redis.nodes

        def models() -> set[str]:
            return {status.pod.base_model for status in fleet.snapshot.pods} - {""}

        router = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.work = SharedWork(redis, keys, router, ledger)
        self.calibration = SharedCalibration(redis, keys, calibrator.calibration, models)
        self.drains = SharedDrains(redis, keys, drains, apply_drains)
        self.responses = SharedResponses(redis, keys)
        self.quotas = SharedQuotas(redis, keys, router, MeterSharing())

    @property
    def other_routers(self) -> int:
        return self.work.known

    @property
    def is_away(self) -> bool:
        return bool(self._feed.error)

    def no_events_reason(self, pod: Pod, of_engine: str) -> str:
        """Why the index does not get a pod's KV events: the first known cause, and what to do. `of_engine`: why the
        pod does not name them."""
        if self._feed.error:
            return f"Redis at {self.nodes} does not answer ({self._feed.error}); check that it runs, and index.redis"
        if different := next(filter(None, map(self._differing.get, pod.models)), ""):
            return f"{different}; give both the same `models`"
        return of_engine or _NO_PUBLISHER

    @property
    def feeds(self) -> Feeds:
        rows = self.work, self.calibration, self.drains, self.responses
        return {"index": self._feed.run, **{row.name: row.run for row in rows}}

    def observe(self, metrics: Metrics) -> None:
        metrics[of_process.REPLICAS].set(self.work.replicas)
        index = self.store.index
        metrics[of_process.INDEX_AGE_S].set(self.store.age_s(time.monotonic()))
        metrics[of_process.INDEX_BYTES].set(index.masks.bytes)
        metrics[of_process.INDEX_DROPPED_BLOCKS].set(index.masks.dropped_blocks)
        metrics[of_process.INDEX_READS].set(self._feed.holders_read)
        complete = {(each.generation.model, each.id): each.complete for each in index.holders}
        metrics[of_process.INDEX_HOLDER_COMPLETE].replace(complete)

    async def close(self) -> None:
        await self._connection.close()
