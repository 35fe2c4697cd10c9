"""Connects a router to Redis: the replica of the cluster index, its feed, and the facts that routers share.

Used only with `index.redis`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from router.admission.sharing import MeterSharing
from router.config.index_schema import RedisIndex
from router.feeds.discovery.membership import Membership
from router.feeds.kv_redis import IndexFeed, ReadableGenerations
from router.feeds.pod_log import untested
from router.feeds.shared_rows import SharedCalibration, SharedDrains, SharedQuotas, SharedResponses, SharedWork
from router.feeds.supervise import Feeds, wait_until
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.index.cluster import ClusterIndex
from router.observe.declared import of_process
from router.observe.metrics import Metrics
from router.policy.calibrator import Calibrator
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import RedisConnection, connect
from router.stores.redis_schema import Keys
from router.types import Generation, Pod

_NO_PUBLISHER = (
    "no publisher with this pod's URL is in Redis: it is missing or has stopped; run `warmroute publish` for it, with"
    " `--advertise` if it knows the pod by another URL"
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A router's connection to the cluster. `differing`: see `ReadableGenerations`."""

    connection: RedisConnection
    store: ReplicaStore
    index: IndexFeed
    work: SharedWork
    calibration: SharedCalibration
    drains: SharedDrains
    responses: SharedResponses
    quotas: SharedQuotas
    differing: Mapping[str, str]

    def no_events_reason(self, pod: Pod, of_engine: str) -> str:
        """Why the index does not get a pod's KV events: the first known cause, and what to do. `of_engine`: why the
        pod does not name them."""
        if self.index.error:
            nodes, error = self.connection.nodes, self.index.error
            return f"Redis at {nodes} does not answer ({error}); check that it runs, and index.redis"
        if different := next(filter(None, map(self.differing.get, pod.models)), ""):
            return f"{different}; give both the same `models`"
        return of_engine or _NO_PUBLISHER

    @property
    def feeds(self) -> Feeds:
        rows = self.work, self.calibration, self.drains, self.responses
        return {"index": self.index.run, **{row.name: row.run for row in rows}}

    def observe(self, metrics: Metrics) -> None:
        metrics[of_process.REPLICAS].set(self.work.replicas)
        replica = self.store.index
        metrics[of_process.INDEX_AGE_S].set(self.store.age_s(time.monotonic()))
        metrics[of_process.INDEX_BYTES].set(replica.masks.bytes)
        metrics[of_process.INDEX_DROPPED_BLOCKS].set(replica.masks.dropped_blocks)
        metrics[of_process.INDEX_READS].set(self.index.holders_read)
        complete = {(each.generation.model, each.id): each.complete for each in replica.holders}
        metrics[of_process.INDEX_HOLDER_COMPLETE].replace(complete)

    async def wait(self, fleet: Fleet, timeout_s: float, *, self_test: bool) -> None:
        """Wait until the index is loaded and, with `self_test`, each pod has a result, or until Redis does not answer:
        the index is then read in the background."""

        def complete() -> bool:
            is_read = self.index.loaded.is_set() and self.drains.is_tried
            return is_read and not (self_test and untested(fleet))

        await wait_until(lambda: bool(self.index.error) or complete(), timeout_s)
        if not complete():
            is_loaded = self.index.loaded.is_set()
            log.warning("serving before startup is complete", index=is_loaded, untested=untested(fleet))

    async def close(self) -> None:
        await self.connection.close()


def join_cluster(
    config: RedisIndex,
    generations: Mapping[str, Generation],
    ledger: Ledger,
    calibrator: Calibrator,
    fleet: Fleet,
    membership: Membership,
) -> ClusterMember:
    """`generations`: those of this router, by model."""
    keys, redis, wanted = Keys(config.namespace), connect(config), ReadableGenerations(generations)
    scatter, ttl_s = secrets.randbits(64), config.holder_ttl_s
    index = ClusterIndex(holder_ttl_s=ttl_s, max_bytes=config.max_replica_bytes, scatter=scatter)
    store = ReplicaStore(index, max_age_s=config.max_stale_s)

    def models() -> set[str]:
        return {status.pod.base_model for status in fleet.snapshot.pods} - {""}

    router = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    return ClusterMember(
        connection=redis,
        store=store,
        index=IndexFeed(IndexReader(redis, keys), store, wanted),
        work=SharedWork(redis, keys, router, ledger),
        calibration=SharedCalibration(redis, keys, calibrator.calibration, models),
        drains=SharedDrains(redis, keys, membership.drains, membership.follow_drains),
        responses=SharedResponses(redis, keys),
        quotas=SharedQuotas(redis, keys, router, MeterSharing()),
        differing=wanted.differing,
    )
