"""Metrics of pools of pods, for autoscalers.

Some are of this router's own requests and add up over routers. The others are of the pods, so that every router has the
same value. A value that is not known has no series: it never reads as 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.fleet.scaling import PoolSignals
from router.observe.declared import of_pools
from router.observe.exposition import Registry


def replace_pools(registry: Registry, signals: Iterable[PoolSignals]) -> None:
    """Use these values; series of other pools, and of what is unknown, are gone."""
    pools = list(signals)
    registry[of_pools.POOL_DESIRED_REPLICAS].replace(
        {(*one.key, resource.value): need for one in pools for resource, need in one.desired_replicas.items()}
    )
    for declared, found in (
        (of_pools.POOL_QUEUED_TOKENS, {one.key: one.queued_tokens for one in pools}),
        (of_pools.POOL_BACKLOG_S, {one.key: one.backlog_s for one in pools}),
        (of_pools.POOL_PREFILL_LOAD, {one.key: one.prefill_load for one in pools}),
        (of_pools.POOL_READY_REPLICAS, {one.key: one.ready_replicas for one in pools}),
        (of_pools.POOL_SATURATION, {one.key: one.saturation for one in pools}),
        (of_pools.POOL_RUNNING, {one.key: one.running for one in pools}),
        (of_pools.POOL_KV_FREE_TOKENS, {one.key: one.kv_free_tokens for one in pools}),
    ):
        registry[declared].replace({key: value for key, value in found.items() if value is not None})
