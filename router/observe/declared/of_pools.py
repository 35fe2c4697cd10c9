"""Pools of pods, for autoscalers"""

from __future__ import annotations

from router.observe.fast_metrics import gauge

_POOL = "pool model role"

POOL_DESIRED_REPLICAS = gauge(
    "warmroute_pool_desired_replicas",
    "Replicas that this router's requests need, by resource, not rounded; sum over routers, then maximum.",
    f"{_POOL} resource",
)
POOL_QUEUED_TOKENS = gauge(
    "warmroute_pool_queued_prompt_tokens",
    "Uncached prompt tokens of this router's requests without a first token; sum over routers.",
    _POOL,
)
POOL_BACKLOG_S = gauge(
    "warmroute_pool_prefill_backlog_seconds",
    "Predicted seconds of one pod to compute these tokens; sum over routers.",
    _POOL,
)
POOL_PREFILL_LOAD = gauge(
    "warmroute_pool_prefill_load_ratio",
    "Predicted seconds of prefill that arrive at this router per second; sum over routers.",
    _POOL,
)
POOL_SATURATION = gauge(
    "warmroute_pool_saturation_ratio",
    "Desired by ready replicas, at most 1; sum over routers, at most 1.",
    _POOL,
)
POOL_READY_REPLICAS = gauge(
    "warmroute_pool_ready_replicas", "Ready replicas; about the same in all routers, maximum.", _POOL
)
POOL_RUNNING = gauge(
    "warmroute_pool_running_requests",
    "Running requests by the engines' numbers; about the same in all routers, maximum.",
    _POOL,
)
POOL_KV_FREE_TOKENS = gauge(
    "warmroute_pool_kv_free_tokens",
    "Free tokens in the KV caches of ready pods; about the same in all routers, maximum.",
    _POOL,
)
