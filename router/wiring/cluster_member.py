"""How does a router take part in the cluster's index?

Builds the store, the feeds that keep it fresh and the exchange of work in flight, over one Redis. A router without
`index.redis` has none of it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from router.config.index_schema import RedisIndex
from router.feeds.kv_redis import IndexFeed
from router.feeds.receipt_stream import ReceiptStream
from router.feeds.workload import WorkloadFeed
from router.fleet.ledger import Ledger
from router.index.cluster import ClusterIndex
from router.observe.metrics import Metrics
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import LocalStore, ReplicaStore
from router.stores.redis_connection import RedisAddress, RedisConnection, Secret, Tls, parse_url
from router.stores.redis_schema import Keys
from router.stores.shared_state import SharedCalibration, SharedWorkload
from router.types import Generation
from router.workers.worker_sync import WorkerIdentity

WORK_LIFETIME_S = 1.0
"""Another router's work counts for this long after it was last told."""

CALIBRATION_LIFETIME_S = 7 * 24 * 3600.0
"""What was learnt is kept for so long after it was last written."""

log = structlog.get_logger()


def redis_address(config: RedisIndex) -> RedisAddress:
    """Where Redis is, by the configuration. Raises `ConfigError`, also if a secret cannot be read."""
    username = _secret(config.username_file, config.username_env)
    password = _secret(config.password_file, config.password_env)
    tls = Tls(**config.tls.model_dump()) if config.tls else None
    address = parse_url(
        config.url, mode=config.mode, master=config.master, username=username, password=password, tls=tls
    )
    for secret in (address.username, address.password):
        if secret is not None:
            secret.read()
    return address


def _secret(file: str | None, variable: str | None) -> Secret | None:
    return Secret(file=file, variable=variable) if file or variable else None


class ClusterMember:
    """One router's part in the cluster. `wanted`: are blocks of this generation of any use here?"""

    def __init__(
        self,
        config: RedisIndex,
        ledger: Ledger,
        local: LocalStore,
        wanted: Callable[[Generation], bool],
        worker: WorkerIdentity | None,
    ) -> None:
        self._config = config
        keys = self._keys = Keys(config.namespace)
        address = redis_address(config)
        self._connection = RedisConnection(address, timeout_s=config.timeout_s)
        registry = IndexReader(self._connection, keys)
        index = ClusterIndex(
            lifetime_s=config.holder_ttl_s, max_bytes=config.max_replica_bytes, scatter=secrets.randbits(64)
        )
        self.store = ReplicaStore(index, local, max_age_s=config.max_stale_s)
        self._feed = IndexFeed(registry, self.store, wanted)
        siblings = f"{socket.gethostname()}:{worker.folder.name}:" if worker else None
        router = f"{siblings or socket.gethostname() + ':'}{os.getpid()}:{secrets.token_hex(4)}"
        work = SharedWorkload(self._connection, keys, router, lifetime_s=WORK_LIFETIME_S, siblings=siblings)
        self._work = WorkloadFeed(work, ledger)

    def calibration(self, model: str) -> SharedCalibration:
        """What the routers of that model have learnt together."""
        return SharedCalibration(self._connection, self._keys, model, lifetime_s=CALIBRATION_LIFETIME_S)

    def receipts(self, maxlen: int, lost: Callable[[int], None]) -> ReceiptStream:
        """Where receipts of all routers go."""
        return ReceiptStream(self._connection, self._keys.receipts, maxlen, lost)

    @property
    def loaded(self) -> asyncio.Event:
        """Set once what was there at the start has been read."""
        return self._feed.loaded

    @property
    def feeds(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What must run."""
        return {"index": self._feed.run, "work of other routers": self._work.run}

    def observe(self, metrics: Metrics) -> None:
        """Take the gauges; called before each rendering."""
        metrics.replicas.set(self._work.replicas)
        metrics.index_holder.clear()
        index = self.store.index
        metrics.index_age_s.set(self.store.age_s(time.monotonic()))
        metrics.index_bytes.set(index.bytes)
        metrics.index_left_out.set(index.dropped_blocks)
        metrics.index_reads.set(self._feed.holders_read)
        for holder in index.holders:
            metrics.index_holder.labels(holder.generation.model, holder.id).set(holder.complete)

    async def close(self) -> None:
        """Give all sockets back."""
        await self._connection.close()
