"""Renders the router's state as JSON and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from router.config.watched_file import WatchedFile
from router.feeds.answers_test import missing_answers
from router.feeds.discovery.membership import SourceStatus
from router.feeds.kv_zmq import KvStreams
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.scaling import ScalingView
from router.observe.declared import of_decisions, of_pods, of_requests
from router.observe.fast_metrics import Labels, TextFormat
from router.observe.metrics import Metrics, replace_pools
from router.policy.calibrator import Calibrator
from router.policy.catalog import PICKERS
from router.stores.prefix_store import LocalStore
from router.types import Matching, Pod, PodId, PodState, PodStatus

_OF_SPLITS = ("computed", "again")


def kv_events_state(pod_id: PodId, store: LocalStore, kv_streams: KvStreams) -> str:
    """How the router follows the KV events of a pod: `published`, or the state of its stream."""
    published = not kv_streams.follows(pod_id) and store.is_published(pod_id, time.monotonic())
    return "published" if published else kv_streams.state_of(pod_id)


def describe_pods(gauges: MetricsPage, kv_streams: KvStreams) -> list[dict[str, Any]]:
    return list(pod_rows(gauges, kv_streams, gauges.fleet.snapshot.pods))


def pod_rows(gauges: MetricsPage, kv_streams: KvStreams, statuses: Sequence[PodStatus]) -> Iterator[dict[str, Any]]:
    """These pods. `attempts`, `first_tokens` of streams and their `ttft_s` in all count from the start; `slowdown`: of
    prefills, relative to other pods of the class; `load_age_s` None: its load was never scraped."""
    fleet, ledger, store, metrics = gauges.fleet, gauges.ledger, gauges.store, gauges.metrics
    slowdowns, now_s = gauges.calibrator.calibration.slowdowns(), time.monotonic()
    attempts: dict[PodId, float] = defaultdict(float)
    for (pod_id, _), count in metrics.sent.items():
        attempts[pod_id] += count.value
    splits = {labels: count.value for labels, count in metrics[of_requests.SPLIT_TOKENS].items()}
    ttfts = {pod_id: (sum(one.counts), one.total) for (pod_id,), one in metrics.pod_ttft_s.items()}
    for status in statuses:
        pod, load = status.pod, status.load
        matching, matching_reason = gauges.matching_of(pod)
        first_tokens, ttft_s = ttfts.get(pod.id, (0, 0.0))
        yield {
            "id": pod.id,
            "url": pod.url,
            "engine": pod.engine,
            "version": pod.version,
            "front_end": pod.front_end,
            "role": pod.role.value,
            "handoff": pod.handoff,
            "state": status.state.value,
            "state_reason": fleet.state_reason(pod.id),
            "trust": pod.trust.value,
            "trust_reason": fleet.trust_reason(pod.id),
            "matching": matching.value,
            "matching_reason": matching_reason,
            "converts": sorted(pod.converts),
            "reads_pictures": pod.reads_pictures,
            "misreads": sorted(pod.misreads),
            "continues": sorted(pod.continues),
            "lacks": sorted(pod.lacks),
            "keeps_answers": pod.keeps_answers,
            "answers": missing_answers(
                pod, *(splits.get((pod.base_model, pod.handoff, one), 0.0) for one in _OF_SPLITS)
            ),
            "kv_events": kv_events_state(pod.id, store, kv_streams),
            "hits": store.cache_of(pod.id).hits,
            "models": pod.models,
            "adapters": pod.adapters,
            "block_size_tokens": pod.block_size_tokens,
            "capacity_tokens": pod.capacity_tokens,
            "max_model_len_tokens": pod.max_model_len_tokens,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": round(load.kv_usage, 3),
            "in_flight": ledger.requests_of_router(pod.id),
            "epoch": pod.epoch,
            "attempts": attempts[pod.id],
            "first_tokens": first_tokens,
            "ttft_s": ttft_s,
            "slowdown": round(slowdowns.get(pod.id, 1.0), 1),
            "load_age_s": round(max(now_s - load.scraped_at_s, 0.0), 1) if load.scraped_at_s else None,
        }


def describe_policies(feed: PolicyFeed) -> dict[str, Any]:
    """The active policies in matching order, with everything they inherit, and the error if the files are invalid.
    Filters, costs and pickers are written as in a file, with all their settings."""
    current = feed.current()
    active = [
        {
            "default": policy is current.default,
            "name": policy.name,
            "version": policy.version,
            "match": policy.match.model_dump(exclude_defaults=True) if policy.match else None,
            "percent": policy.percent,
            "filters": {name: one.model_dump() for name, one in policy.filters},
            "costs": {name: term.model_dump() for name, term in policy.costs},
            "picker": {
                name: policy.picker.model_dump() for name, kind in PICKERS.items() if isinstance(policy.picker, kind)
            },
        }
        for policy in current.active
    ]
    return {"version": current.version, "error": feed.error or None, "active": active}


class WithoutPods(Enum):
    """What requests do while no pod is ready."""

    FAIL = "fail"
    LEAVE = "fail where no provider serves them"
    WAIT = "wait for one"

    @classmethod
    def of(cls, *, holds: bool, has_providers: bool) -> WithoutPods:
        """`holds`: with `limits.hold_s`, which providers cut short."""
        return cls.WAIT if holds else cls.LEAVE if has_providers else cls.FAIL


def describe_readiness(
    fleet: Fleet,
    feed: PolicyFeed,
    files: Mapping[str, WatchedFile[Any]],
    without_pods: WithoutPods = WithoutPods.FAIL,
    *,
    is_stopping: bool,
) -> tuple[bool, dict[str, Any]]:
    """Whether the router is ready, and the answer of `/readyz`. `files`: by the key that names them. Providers make
    it ready once each pod that joins has failed a check: it may be about to serve for less."""
    pods = fleet.snapshot.pods
    states = [status.state.value for status in pods]
    is_settled = all(one.state is not PodState.JOINING or fleet.state_reason(one.pod.id) for one in pods)
    serves = without_pods is WithoutPods.WAIT or (without_pods is WithoutPods.LEAVE and is_settled)
    any_ready = serves or PodState.READY.value in states
    version, error = feed.current().version, feed.error
    return any_ready and not is_stopping, {
        "status": "stopping" if is_stopping else "ready" if any_ready else "no pod is ready",
        "pods": {state: states.count(state) for state in set(states)},
        "policies": {"version": version} | ({"error": error} if error else {}),
    } | {key: {"error": file.error} for key, file in files.items() if file.error}


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The metrics of this process. Some gauges are read from other objects at each rendering."""

    metrics: Metrics
    fleet: Fleet
    ledger: Ledger
    store: LocalStore
    calibrator: Calibrator
    scaling: ScalingView
    observe_cluster: Callable[[Metrics], None] | None = None
    discovery: Iterable[SourceStatus] = ()
    prompt_cache_bytes: Callable[[], Mapping[str, int]] = dict
    """By model."""
    in_flight_tokens: Callable[[], Mapping[str, int]] = dict
    """By tenant."""
    matching_of: Callable[[Pod], tuple[Matching, str]] = lambda _: (Matching.EVENTS, "")

    async def observe(self) -> None:
        """Update these gauges, in a few turns of the event loop: all of 500 pods take 6 ms."""
        self.metrics.observe_fleet(self.fleet.snapshot, self.ledger.own(), self.store.block_holders)
        await asyncio.sleep(0)
        pods = [status.pod for status in self.fleet.snapshot.pods]
        matching: dict[Labels, Matching] = {(pod.id,): self.matching_of(pod)[0] for pod in pods}
        self.metrics[of_pods.POD_MATCHING].replace_states(matching, Matching)
        self.metrics.observe_loads(self.fleet.snapshot, time.monotonic())
        await asyncio.sleep(0)
        replace_pools(self.metrics.registry, self.scaling.signals(time.monotonic()))
        await asyncio.sleep(0)
        calibration = self.calibrator.calibration
        self.metrics.observe_calibration(calibration.rows())
        slower = calibration.slowdowns()
        self.metrics[of_pods.POD_SLOWDOWN].replace({(pod.id,): slower.get(pod.id, 1.0) for pod in pods})
        await asyncio.sleep(0)
        self.metrics.observe_discovery({one.source: (one.age_s, one.resync_differences) for one in self.discovery})
        cached = {(model,): size for model, size in self.prompt_cache_bytes().items()}
        self.metrics[of_requests.PROMPT_CACHE_BYTES].replace(cached)
        learnt = {(model,): one.reuse for model, one in self.store.evicted.items()}
        self.metrics[of_decisions.EVICTED_REUSE].replace(learnt)
        if self.observe_cluster:
            self.observe_cluster(self.metrics)
        self.observe_requests()

    def observe_requests(self) -> None:
        """Update those that follow from the latest requests."""
        self.metrics.by_class.observe_in_flight(self.in_flight_tokens())
        soon_tokens = {model: one.soon_tokens for model, one in self.store.evicted.items()}
        self.metrics.observe_evicted(soon_tokens, self.fleet.snapshot)

    async def render(self, text_format: TextFormat) -> bytes:
        await self.observe()
        return await self.metrics.render_in_turns(text_format=text_format)
