"""The operators' page, `/ui`: one HTML file, and what it shows, as one JSON object a second for all viewers.

The file contains no data, so that a browser can load it without a token. The page asks for the token and sends it with
each request for data. No snapshot is computed while nobody watches.

Everything in a snapshot is bounded: the number of pods, series and decisions, and the length of names, which clients
and pods choose. A large fleet is described in slices, so that the event loop serves requests in between.
"""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.config.watched_file import StaleFile
from router.errors import Saturated, shortened
from router.feeds.kv_zmq import KvStreams
from router.feeds.policy_feed import PolicyFeed
from router.frontends.admin.page_figures import (
    MINUTE_S,
    SHOWN,
    CountedHistory,
    MetricRows,
    MetricsGrowth,
    Notice,
    Present,
    counted_of,
    lateness_of,
    latest_ratios,
    unserved_of,
)
from router.frontends.admin.views import MetricsPage, WithoutPods, pod_rows
from router.observe.changes import Changes
from router.observe.declared import of_decisions, of_process, of_requests
from router.observe.ended import Ended, RecordedDecision
from router.observe.fast_metrics import Labelled, Labels, Numbers
from router.observe.recent_decisions import HotPrefix, PrefixTally, RecentDecisions
from router.observe.thresholds import SHOWN_SLOWDOWN
from router.policy.decide import expected_ttft_ms
from router.policy.price import choice_of
from router.types import PodState, PodStatus, PrefixTrust

MAX_PODS_BYTES = 256 * 1024
"""Pods beyond are counted, not described; pods that need attention come first."""
MAX_DECISIONS = 30
MAX_SERIES = 64
"""Series of one metric; the rest is summed as `other`."""
MAX_CALIBRATIONS = 64
MAX_MODELS = 64
MAX_CHARACTERS = 128
MAX_ERROR_CHARACTERS = 400
MAX_STALE_FILES = 16
MAX_CHANGES = 50
POINT_S, MAX_POINTS = 55.0, 66
"""An hour of TTFTs. Less than a minute, so that the history has the point before."""
MAX_GROUPED = 1000
"""Decisions that the prefixes are computed from."""
CHART_S = 10.5
"""A point of the chart is of the last ten seconds."""
SLICE_PODS, SLICE_DECISIONS = 25, 100


ADMIN_ONLY = {"url", "version", "handoff", "trust_reason", "hits", "block_size_tokens", "max_model_len_tokens"}
HEALTHY = {"role": "both", "state": "ready", "trust": "trusted", "matching": "events", "kv_events": "complete"}
"""Facts of a pod that the page omits: always, or with the value that a healthy pod has."""


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What the page shows of the configuration. `price`: of one GPU for one hour; `stale_files` may block."""

    price: float | None = None
    currency: str = ""
    keeps_prompts: bool = False
    kept_decisions: int = 0
    """The most that are kept."""
    stale_files: Callable[[], list[StaleFile]] = list
    without_pods: WithoutPods = WithoutPods.FAIL


@dataclass(frozen=True, slots=True)
class PageSource:
    gauges: MetricsPage
    kv_streams: KvStreams
    recent: RecentDecisions
    policies: PolicyFeed
    facts: PageFacts = PageFacts()
    changes: Changes = field(default_factory=Changes)
    history: CountedHistory = field(default_factory=CountedHistory)
    hour: deque[tuple[float, float | None, float | None]] = field(default_factory=partial(deque, maxlen=MAX_POINTS))
    """Unix time, and TTFT p50 and p95 of the minute before it, in seconds."""

    async def follow(self) -> None:
        """Count also while nobody watches, until cancelled: the next viewer sees the last minute and hour."""
        while True:
            metrics = await self._metrics()
            self.history.add(counted_of(metrics))
            ttft_s = MetricsGrowth(metrics, self.history.since(MINUTE_S).metrics).ttft_s()
            self.hour.append((time.time(), ttft_s.p50, ttft_s.p95))
            await asyncio.sleep(POINT_S)

    async def snapshot(self) -> bytes:
        metrics = await self._metrics()
        self.history.add(counted_of(metrics))
        pods, hidden = await self._pods()
        health = self._health() | {"stale_files": await self._stale_files()}
        notices = self._notices(metrics, health["index_age_s"] if self.gauges.observe_cluster else None)
        first, lately = self.history.since(MINUTE_S), self.history.since(CHART_S)
        return msgspec.json.encode(
            {
                "at_s": time.time(),
                "notices": notices,
                "in_flight": sum(value for _, (value,) in metrics[of_requests.IN_FLIGHT.name]),
                "span_s": self.history.now.at_s - first.at_s,
                "last_minute": MetricsGrowth(metrics, first.metrics).figures(),
                "since_start": MetricsGrowth(metrics, {}).figures(),
                "chart": MetricsGrowth(metrics, lately.metrics).token_shares(),
                "pods": pods,
                "pods_not_shown": hidden,
                "models": self._models(),
                "decisions": [decision_row(*kept) for kept in reversed(self.recent.latest(MAX_DECISIONS))],
                "prefixes": await self._hot_prefixes(),
                "changes": self.changes.latest(MAX_CHANGES),
                "hour": list(self.hour),
                "evicted_reuse": {_short(model): one.reuse for model, one in self.gauges.store.evicted.items()},
                "keeps_prompts": self.facts.keeps_prompts,
                "kept_decisions": self.facts.kept_decisions,
                "placed_error": max((abs(one) for _, (one,) in metrics[of_decisions.PLACED_ERROR.name]), default=None),
                "price": self.facts.price,
                "currency": self.facts.currency,
                "policies": self._policies(),
                "health": health,
            }
        )

    async def _metrics(self) -> dict[str, MetricRows]:
        self.gauges.observe_requests()
        shown: dict[str, MetricRows] = {}
        for metric in self.gauges.metrics.registry.collectors:
            if isinstance(metric, Labelled) and metric.declared in SHOWN:
                shown[metric.declared.name] = _summed(metric, SHOWN[metric.declared])
                await asyncio.sleep(0)
        return shown

    async def _hot_prefixes(self) -> list[HotPrefix]:
        tally = PrefixTally()
        for number, kept in enumerate(self.recent.latest(MAX_GROUPED)):
            tally.add(*kept)
            if number % SLICE_DECISIONS == SLICE_DECISIONS - 1:
                await asyncio.sleep(0)
        return tally.hottest()

    async def _stale_files(self) -> list[StaleFile]:
        found = [
            StaleFile(_short(one.file), _short(one.problem), one.since_s)
            for one in (await asyncio.to_thread(self.facts.stale_files))[:MAX_STALE_FILES]
        ]
        if self.policies.error:
            folder = _short(str(self.policies.folder))
            problem = f"the last valid set stays in force: {self.policies.error}"
            found.append(StaleFile(folder, shortened(problem, MAX_ERROR_CHARACTERS), self.policies.refused_since_s))
        return found

    async def _pods(self) -> tuple[list[msgspec.Raw], int]:
        """The encoded rows, and the number of pods without one."""
        statuses = sorted(self.gauges.fleet.snapshot.pods, key=_is_healthy)
        rows: list[msgspec.Raw] = []
        left_bytes = MAX_PODS_BYTES
        for at, described in enumerate(pod_rows(self.gauges, self.kv_streams, statuses)):
            row = msgspec.json.encode(_shown(described))
            left_bytes -= len(row)
            if left_bytes < 0:
                break
            rows.append(msgspec.Raw(row))
            if at % SLICE_PODS == SLICE_PODS - 1:
                await asyncio.sleep(0)
        return rows, len(statuses) - len(rows)

    def _notices(self, metrics: Mapping[str, MetricRows], index_age_s: float | None) -> list[Notice]:
        tenants = {tenant: tokens for (tenant,), (tokens,) in metrics[of_requests.TENANT_IN_FLIGHT_TOKENS.name]}
        reload, statuses = self.policies.last_reload, self.gauges.fleet.snapshot.pods
        failing = sum(child.value for _, child in self.gauges.metrics[of_process.IDENTITY_PROVIDERS_FAILING].items())
        ready = [status.pod for status in statuses if status.state is PodState.READY]
        streams, reason_of = self.kv_streams, self.gauges.fleet.state_reason
        errors = (f"{one.source}: {one.error}" for one in self.gauges.discovery if one.error)
        since_s = time.time() - MINUTE_S
        restarts = (one for one in self.changes.latest() if one.what == "restarted" and one.at_s >= since_s)
        present = Present(
            pods=len(statuses),
            source_error=next(errors, ""),
            unserved=unserved_of(statuses, reason_of),
            without_pods=self.facts.without_pods,
            ejected={one.pod.id: reason_of(one.pod.id) for one in statuses if one.state is PodState.EJECTED},
            unwell={pod.id: why for pod in ready if (why := reason_of(pod.id))},
            restarted=list(dict.fromkeys(one.subject for one in restarts)),
            events_lost=[status.pod.id for status in statuses if streams.state_of(status.pod.id) == "incomplete"],
            slowdowns=self.gauges.calibrator.calibration.slowdowns(),
            lateness=lateness_of(latest_ratios(self.recent, streamed=False))
            | lateness_of(latest_ratios(self.recent, streamed=True)),
            tenant_tokens=tenants,
            waiting=sum(status.load.waiting for status in statuses),
            index_age_s=index_age_s,
            policy_error=self.policies.error,
            reload_age_s=time.time() - reload.at_s if reload else None,
            reload_review=(reload.review or "") if reload else "",
            reload_ttft_ratio=reload.ttft_ratio if reload else 1.0,
            matching={pod.id: self.gauges.matching_of(pod) for pod in ready},
            providers_failing=int(failing),
        )
        return self.history.notices(present)

    def _models(self) -> list[str]:
        names = {
            name for status in self.gauges.fleet.snapshot.pods for name in (*status.pod.models, *status.pod.adapters)
        }
        return [_short(name) for name in sorted(names)[:MAX_MODELS]]

    def _policies(self) -> dict[str, Any]:
        current, last = self.policies.current(), self.policies.last_reload
        return {"version": current.version, "error": self.policies.error, "last_reload": last}

    def _health(self) -> dict[str, Any]:
        metrics = self.gauges.metrics
        if self.gauges.observe_cluster:
            self.gauges.observe_cluster(metrics)
        holders = [child.value for _, child in metrics[of_process.INDEX_HOLDER_COMPLETE].items()]
        return {
            "shared_index": self.gauges.observe_cluster is not None,
            "index_age_s": sum(child.value for _, child in metrics[of_process.INDEX_AGE_S].items()),
            "replicas": sum(child.value for _, child in metrics[of_process.REPLICAS].items()),
            "block_holders": self.gauges.store.block_holders,
            "holders": len(holders),
            "incomplete_holders": holders.count(0.0),
            "discovery": [
                {"source": _short(one.source), "age_s": round(one.age_s, 1), "error": _short(one.error)}
                for one in islice(self.gauges.discovery, MAX_SERIES)
            ],
            "calibration": list(islice(self._calibration(), MAX_CALIBRATIONS)),
        }

    def _calibration(self) -> Iterator[dict[str, Any]]:
        """One row a class of pods, pod with a fit of its own, or kind of links."""
        seen = set()
        for row in self.gauges.calibrator.calibration.rows():
            if (subject := (row.subject, row.pod)) not in seen:
                seen.add(subject)
                yield {
                    "subject": _short(row.subject),
                    "pod": _short(row.pod),
                    "confidence": round(row.confidence, 3),
                    "error_prior": round(row.error_before, 4),
                    "error_learnt": round(row.error_after, 4),
                }


def _shown(described: dict[str, Any]) -> dict[str, Any]:
    """A pod's texts and numbers, bounded, and its first models."""
    found: dict[str, Any] = {"models": [_short(name) for name in described["models"][:4]]}
    for name, value in (described | {"lacks": ", ".join(described["lacks"])}).items():
        if type(value) in (int, float) and (name != "slowdown" or value >= SHOWN_SLOWDOWN):
            found[name] = value
        elif isinstance(value, str) and value not in ("", HEALTHY.get(name)):
            found[name] = _short(value, MAX_ERROR_CHARACTERS if name.endswith("reason") else MAX_CHARACTERS)
    return {name: value for name, value in found.items() if name not in ADMIN_ONLY}


def decision_row(kept: RecordedDecision, ended: Ended | None) -> dict[str, Any]:
    """A decision in a line: the candidate that served, or the best one while nothing has. A row without a result is
    still being served."""
    facts = kept.scene
    chosen = (ended.served if ended else None) or kept.candidates[0]
    row = {
        "id": facts.request_id,
        "at_s": kept.at_s,
        "model": _short(facts.model),
        "pod": _short(str(choice_of(chosen.plan))),
        "policy": _short(kept.policy.name),
        "workload": _short(facts.workload),
        "reason": _short(kept.reason),
        "result": _short(ended.result) if ended else "",
        "expected_ms": expected_ttft_ms(chosen.cost),
        "ttft_ms": ended.ttft_ms if ended else None,
        "prompt_tokens": facts.prompt_tokens or 0,
        "cached_tokens": ended.cached_tokens if ended else None,
        "failures": len(ended.failures) if ended else 0,
    }
    return {name: value for name, value in row.items() if value not in (None, "")}


def _summed(metric: Labelled[Any], kept: tuple[str, ...]) -> MetricRows:
    """The series of a metric, summed over the labels that are not kept. O(series)."""
    at = [metric.declared.labels.index(label) for label in kept]
    return _bounded(
        (tuple(_short(labels[index]) for index in at), numbers) for labels, numbers in metric.series().items()
    )


def _bounded(rows: Iterable[tuple[Labels, Numbers]]) -> MetricRows:
    """One row for equal labels; at most `MAX_SERIES`, and one for the rest."""
    found: dict[Labels, Numbers] = {}
    for labels, numbers in rows:
        if labels not in found and len(found) >= MAX_SERIES:
            labels = ("other",) * len(labels)
        known = found.get(labels)
        found[labels] = numbers if known is None else list(map(add, known, numbers))
    return list(found.items())


def _is_healthy(status: PodStatus) -> bool:
    """Whether nothing about the pod needs attention, by its state and self-test."""
    return status.state is PodState.READY and status.pod.trust is not PrefixTrust.MISMATCH


def _short(text: str, most: int = MAX_CHARACTERS) -> str:
    return shortened(text, most)


PAGE_PATH, EVENTS_PATH = "/ui", "/ui/events"
INTERVAL_S = 1.0
MAX_VIEWERS = 16
_FILE = Path(__file__).with_name("live_page.html")


class SnapshotStream:
    """Sends the values of `compute` to all viewers, one every `INTERVAL_S`. A viewer that reads slowly skips values."""

    def __init__(self, compute: Callable[[], Awaitable[bytes]]) -> None:
        self._compute = compute
        self._watched = asyncio.Event()
        self._tick = asyncio.Event()
        self._latest = b""
        self._runs = False
        self.viewers = 0

    async def run(self) -> None:
        """Compute while there are viewers, until cancelled; then end their streams."""
        self._runs = True
        try:
            while True:
                await self._watched.wait()
                self._publish(await self._compute())
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._runs = False
            self._publish(b"")

    def _publish(self, value: bytes) -> None:
        self._latest = value
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    @contextmanager
    def viewer(self) -> Iterator[AsyncIterator[bytes]]:
        """A viewer from now on: the values, as server-sent events. Raises `Saturated` if there are `MAX_VIEWERS`."""
        if self.viewers >= MAX_VIEWERS:
            raise Saturated(f"{MAX_VIEWERS} pages are open, the maximum; close one of them.")
        self.viewers += 1
        self._watched.set()
        try:
            yield self._events()
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._watched.clear()

    async def _events(self) -> AsyncIterator[bytes]:
        while self._runs:
            await self._tick.wait()
            if self._latest:
                yield b"data: %b\n\n" % self._latest


class EventsResponse(Response):
    """Streams the snapshots. It counts as a viewer from before its first byte until it ends, however that is."""

    def __init__(self, stream: SnapshotStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream.viewer() as events:
            headers = {"cache-control": "no-store"}
            await StreamingResponse(events, media_type="text/event-stream", headers=headers)(scope, receive, send)


def add_page_routes(app: FastAPI, stream: SnapshotStream) -> None:
    page = _FILE.read_bytes()
    headers = page_headers(page)

    @app.get(PAGE_PATH)
    async def operators_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/")
    async def root() -> Response:
        return RedirectResponse(PAGE_PATH)

    @app.get(EVENTS_PATH)
    async def events() -> Response:
        return EventsResponse(stream)


def page_headers(page: bytes) -> dict[str, str]:
    """Headers that allow the page its own script and styles, by their hashes, and requests to this listener only."""
    script, style = (_hash_of(tag, page) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


def _hash_of(tag: bytes, page: bytes) -> str:
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return f"sha256-{b64encode(sha256(content).digest()).decode()}"
