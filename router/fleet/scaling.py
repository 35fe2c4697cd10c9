"""Computes how many replicas each pool of pods needs, for an autoscaler such as HPA or KEDA.

Values in, values out: requests in flight come from the ledger, loads and learnt prices of pods from the fleet.
Rounding, limits and hysteresis are left to the autoscaler. Only the backlog depends on the present number of replicas,
so an autoscaler that follows the result does not oscillate.

What this router's own requests need adds up over all routers. Requests that reach pods without a router do not count.

Sources: prefill is the offered load of queueing theory over a utilization target, as Dynamo's planner divides arriving
tokens by a replica's throughput; 0.8 of the KV cache is the threshold of llm-d's workload variant autoscaler; decode
steps have an ITL target, as in Dynamo's planner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp
from typing import Annotated, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, PositiveFloat

from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.types import InFlight, Pod, PodId, PodState, PodStatus

RATE_WINDOW_S = 60.0
"""Time constant of the mean arrival rate."""
MAX_RUNNING = 1 << 20
"""Most running requests that a pod is believed to have."""


class PoolKey(NamedTuple):
    """Pods that are scaled together: one Deployment. The fields are labels of metrics."""

    pool: str
    model: str
    role: str


class Resource(StrEnum):
    """What a pool can be short of."""

    PREFILL = "prefill"
    KV_CACHE = "kv_cache"
    DECODE_STEPS = "decode_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How busy replicas should be: the targets behind `warmroute_pool_desired_replicas`, for autoscalers of engines."""

    prefill_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of a pod's time that prefills should take. The rest is for decode steps and for prompts that come together:
    at 0.6 a prompt waits for 0.75 others on average (M/D/1: u / 2 (1 - u))."""
    backlog_s: PositiveFloat = 120.0
    """Time in which waiting prefills should be computed. Less than a replica takes to start leads to replicas that have
    nothing to do."""
    kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Used share of the KV cache, as the engines report it."""
    itl_ms: PositiveFloat = 50.0
    """Time of a decode step, by the learnt costs."""
    wake_pods: bool = False
    """Wake sleeping pods (vLLM with `VLLM_SERVER_DEV_MODE=1`) when requests would wait for longer than that takes. Only
    where nothing else uses their GPUs meanwhile. Needs `limits.hold_s`."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSignals:
    """The state and the need of one pool. None, or no entry in `desired_replicas`: unknown."""

    key: PoolKey
    ready_replicas: int
    running: float | None
    """Running requests by the engines' numbers."""
    kv_free_tokens: float | None
    queued_tokens: int
    """Uncached prompt tokens of this router's requests without a first token."""
    backlog_s: float
    """Predicted time of one pod to compute these."""
    prefill_load: float
    """Predicted seconds of prefill that arrive at this router per second: pods that only compute prompts."""
    desired_replicas: Mapping[Resource, float]
    """Replicas that this router's requests need, not rounded; all resources, or none while loads are unknown."""

    @property
    def saturation(self) -> float | None:
        """Desired by ready replicas, 0..1; None if one of them is unknown or no replica is ready."""
        if not self.desired_replicas or not self.ready_replicas:
            return None
        return min(1.0, max(self.desired_replicas.values()) / self.ready_replicas)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Mean rate at which prefill arrived, by pool, in predicted seconds per second.

    `booked_ms`: by pod, all prefill that was booked up to `at_s`; `age_s`: how long arrivals have been observed."""

    at_s: float
    age_s: float = 0.0
    booked_ms: Mapping[PodId, float] = field(default_factory=dict)
    rates: Mapping[PoolKey, float] = field(default_factory=dict)

    def advanced(self, booked_ms: Mapping[PodId, float], pods: Iterable[Pod], now_s: float) -> Arrivals:
        """The arrivals at `now_s`: an exponentially weighted mean, and the plain mean at first. The result depends on
        what arrived, and hardly on how often this is called."""
        elapsed_s = now_s - self.at_s
        if elapsed_s <= 0:
            return self
        age_s = self.age_s + elapsed_s
        weight = (1 - exp(-elapsed_s / RATE_WINDOW_S)) / (1 - exp(-age_s / RATE_WINDOW_S))
        arrived_ms: defaultdict[PoolKey, float] = defaultdict(float)
        for pod in pods:
            now_ms, before_ms = booked_ms.get(pod.id, 0.0), self.booked_ms.get(pod.id, 0.0)
            arrived_ms[pool_of(pod)] += now_ms - before_ms if now_ms >= before_ms else now_ms
        rates = {
            key: (1 - weight) * self.rates.get(key, 0.0) + weight * ms / 1000 / elapsed_s
            for key, ms in arrived_ms.items()
        }
        return Arrivals(now_s, age_s, dict(booked_ms), rates)


class ScalingView:
    """The signals of all pools, computed when they are read. Loads that are older than `max_load_age_s` are unknown."""

    def __init__(self, fleet: Fleet, ledger: Ledger, targets: Scaling, max_load_age_s: float, now_s: float) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._targets = targets
        self._max_load_age_s = max_load_age_s
        self._arrivals = Arrivals(now_s)

    def signals(self, now_s: float) -> list[PoolSignals]:
        statuses = self._fleet.snapshot.pods
        booked_ms = self._ledger.booked_prefill_ms
        self._arrivals = self._arrivals.advanced(booked_ms, (status.pod for status in statuses), now_s)
        oldest_s = now_s - self._max_load_age_s
        return signals_by_pool(statuses, self._ledger.own(), self._arrivals.rates, self._targets, oldest_s, now_s)


def pool_of(pod: Pod) -> PoolKey:
    """The pool of a pod; its model is "" until the pod has reported it."""
    return PoolKey(pod.pool, pod.base_model, pod.role.value)


def signals_by_pool(
    statuses: Iterable[PodStatus],
    own: Mapping[PodId, InFlight],
    rates: Mapping[PoolKey, float],
    targets: Scaling,
    oldest_s: float,
    now_s: float,
) -> list[PoolSignals]:
    """The signals of each pool whose model is known. `own`: this router's requests; `rates`: as in `Arrivals`; loads
    from before `oldest_s` are unknown."""
    pools: defaultdict[PoolKey, list[PodStatus]] = defaultdict(list)
    for status in statuses:
        if status.pod.models:
            pools[pool_of(status.pod)].append(status)
    return [_signals(key, pods, own, rates.get(key, 0.0), targets, oldest_s, now_s) for key, pods in pools.items()]


def _signals(
    key: PoolKey,
    statuses: list[PodStatus],
    own: Mapping[PodId, InFlight],
    rate: float,
    targets: Scaling,
    oldest_s: float,
    now_s: float,
) -> PoolSignals:
    ready = [status for status in statuses if status.state is PodState.READY]
    known = [status for status in ready if status.load.scraped_at_s > 0 and status.load.scraped_at_s >= oldest_s]
    work = [(status.pod, own[status.pod.id]) for status in statuses if status.pod.id in own]
    backlog_s = sum(one.queue_ms(now_s) for _, one in work) / 1000
    desired: dict[Resource, float] = {}
    if known:
        # A replica has several pods if an engine has data-parallel ranks or a Kubernetes pod several engines.
        share = _replicas(statuses) / len(statuses)
        requests = sum(one.requests for _, one in work)
        desired = {
            Resource.PREFILL: share * (rate + backlog_s / targets.backlog_s) / targets.prefill_utilization,
            Resource.KV_CACHE: share * requests * _kv_per_request(known) / targets.kv_usage,
            Resource.DECODE_STEPS: share * sum(_decode_need(pod, one, targets.itl_ms) for pod, one in work),
        }
    return PoolSignals(
        key=key,
        ready_replicas=_replicas(ready),
        running=len(ready) * sum(map(_running, known)) / len(known) if known else None,
        kv_free_tokens=_kv_free_tokens(known, len(ready)),
        queued_tokens=sum(one.prefill_tokens for _, one in work),
        backlog_s=backlog_s,
        prefill_load=rate,
        desired_replicas=desired,
    )


def _replicas(statuses: Iterable[PodStatus]) -> int:
    return len({status.pod.uid or status.pod.url for status in statuses})


def _kv_per_request(known: Iterable[PodStatus]) -> float:
    """Share of a pod's KV cache that a running request has on average; 0 while none runs."""
    rows = [(_kv_usage(status), _running(status)) for status in known]
    running = sum(count for _, count in rows)
    return sum(usage for usage, _ in rows) / running if running else 0.0


def _decode_need(pod: Pod, work: InFlight, itl_ms: float) -> float:
    """Pods that these requests need so that a step takes `itl_ms`: d0 + (d1 requests + d2 tokens) / pods = itl. 0 if d0
    alone takes longer: more pods would not help."""
    speed = pod.speed
    if speed.d0_ms >= itl_ms:
        return 0.0
    return (speed.step_ms(work.decode_requests, work.decode_tokens) - speed.d0_ms) / (itl_ms - speed.d0_ms)


def _kv_free_tokens(known: Iterable[PodStatus], ready: int) -> float | None:
    """Pods without a recent load count as the mean of the others."""
    free = [
        (1 - _kv_usage(status)) * status.pod.capacity_tokens
        for status in known
        if status.pod.capacity_tokens is not None
    ]
    return ready * sum(free) / len(free) if free else None


def _running(status: PodStatus) -> int:
    return min(max(status.load.running, 0), MAX_RUNNING)


def _kv_usage(status: PodStatus) -> float:
    return min(max(status.load.kv_usage, 0.0), 1.0)
