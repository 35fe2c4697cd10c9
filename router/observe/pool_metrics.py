"""Metrics of pools of pods, for autoscalers.

Some are of this router's own requests and add up over routers. The others are of the pods, so that every router has the
same value. A value that is not known has no series: it never reads as 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from router.fleet.scaling import PoolSignals
from router.observe.declared import of_pools
from router.observe.fast_metrics import Gauge


class PoolMetrics:
    def __init__(self, r: CollectorRegistry) -> None:
        self._desired = Gauge(r, of_pools.POOL_DESIRED_REPLICAS)
        self._queued_tokens = Gauge(r, of_pools.POOL_QUEUED_TOKENS)
        self._backlog_s = Gauge(r, of_pools.POOL_BACKLOG_S)
        self._prefill_load = Gauge(r, of_pools.POOL_PREFILL_LOAD)
        self._saturation = Gauge(r, of_pools.POOL_SATURATION)
        self._ready = Gauge(r, of_pools.POOL_READY_REPLICAS)
        self._running = Gauge(r, of_pools.POOL_RUNNING)
        self._kv_free_tokens = Gauge(r, of_pools.POOL_KV_FREE_TOKENS)

    def replace(self, pools: Iterable[PoolSignals]) -> None:
        """Use these values; series of other pools, and of what is unknown, are gone."""
        pools = list(pools)
        self._desired.replace(
            {(*one.key, resource.value): need for one in pools for resource, need in one.desired_replicas.items()}
        )
        self._queued_tokens.replace({one.key: one.queued_tokens for one in pools})
        self._backlog_s.replace({one.key: one.backlog_s for one in pools})
        self._prefill_load.replace({one.key: one.prefill_load for one in pools})
        self._ready.replace({one.key: one.ready_replicas for one in pools})
        for gauge, found in (
            (self._saturation, {one.key: one.saturation for one in pools}),
            (self._running, {one.key: one.running for one in pools}),
            (self._kv_free_tokens, {one.key: one.kv_free_tokens for one in pools}),
        ):
            gauge.replace({key: value for key, value in found.items() if value is not None})
