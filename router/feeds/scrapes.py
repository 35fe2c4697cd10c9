"""Scrapes the load of each pod from its metrics, as often as a tenth of a core allows.

After a failed scrape, the last load stays with its age, and the pod's state does not change, unless the engine says
that it is being scaled: then the pod is drained until it answers again. Where the metrics cannot be true, or are more
than is read of a pod, its load is unknown: only the requests of the routers count.

A pod that publishes its load over ZMQ is followed instead. It is scraped while it is silent.

An engine is asked for the few series that are read once it has shown that it gives all of them: in each epoch, and
after each failed scrape. A page without a load is a failed one: vLLM with several API servers filters everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from types import coroutine
from typing import Any, TypeVar

import structlog

from router.engines.adapter import LOAD
from router.engines.engine_catalog import ENGINES
from router.engines.prometheus import only, series
from router.errors import UpstreamBroken, UpstreamError
from router.feeds.probe import excess
from router.feeds.watch import Check, Fetch, Turn
from router.feeds.zmtp import LOST, ZmqLink, connected
from router.fleet.breaker import Probes
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.guards import OutOfBounds, OutOfRange
from router.types import Pod, PodId, PodLoad, PodState, PodStatus, Role

IDLE_FACTOR = 2
MAX_FACTOR = 20
"""An interval grows to at most this multiple of the configured one: half of `Probes.max_load_age_s`."""
MAX_SHARE = 0.1
"""Share of a core that all scrapes together may take."""
LOOP_FACTOR = 2.0
"""CPU of a scrape relative to that of its own steps: the event loop reads the response. Measured with uvloop: 1.8 for a
page of 58 kB, 2.2 for three series."""
PINNED_USAGE, PINNED_S = 0.01, 10.0
"""An idle decode pod with more KV in use for longer holds it for offers: a transfer is over sooner."""
_SMOOTHING = 1 / 32
SILENCE_S, SILENT_PAUSE_S = 3.0, 60.0
"""SGLang publishes its load each second. A pod that does not is scraped for a while before it is followed again."""
MAX_EARLY = 1000
"""Messages in one interval, for a pod that publishes each step."""
_WITH_WORK = (PodState.READY, PodState.DRAINING)
_T = TypeVar("_T")

log = structlog.get_logger()


def intervals_s(least_s: float, cost_s: float, busy: int, idle: int) -> tuple[float, float]:
    """The time between two scrapes of each of `busy` pods with work, and of each of `idle` ones, so that all take at
    most `MAX_SHARE` of a core. An idle pod gives way first: until its interval is the longest, that of a pod with work
    stays the shortest."""
    most_s = MAX_FACTOR * least_s
    per_s = MAX_SHARE / max(cost_s, 1e-9)
    busy_s = _interval_s(busy, max(per_s - idle / most_s, per_s / 2), least_s, most_s)
    return busy_s, _interval_s(idle, per_s - busy / busy_s, IDLE_FACTOR * least_s, most_s)


def _interval_s(pods: int, per_s: float, least_s: float, most_s: float) -> float:
    return min(max(pods / per_s, least_s), most_s) if per_s > 0 else most_s


@coroutine
def metered(work: Coroutine[Any, Any, _T], spend: Callable[[float], None]) -> Generator[Any, Any, _T]:
    """The result of `work`. `spend` is called with the time of its own steps, without that of its waits."""
    spent_s, resume, value = 0.0, work.send, None
    while True:
        began_s = time.perf_counter()
        try:
            waited = resume(value)
        except StopIteration as ended:
            result: _T = ended.value
            spend(spent_s + time.perf_counter() - began_s)
            return result
        spent_s += time.perf_counter() - began_s
        try:
            resume, value = work.send, (yield waited)
        except BaseException as error:
            resume, value = work.throw, error


async def _published(link: ZmqLink, pod: Pod, from_s: float) -> PodLoad:
    """The first load that the pod publishes after a time. Raises `LOST`, `OutOfBounds` and `OutOfRange`."""
    for _ in range(MAX_EARLY):
        async with asyncio.timeout(SILENCE_S):
            message = await link.receive()
        if (now_s := time.monotonic()) >= from_s:
            return ENGINES[pod.engine].parse_published_load(message[-1], now_s)
    raise OutOfRange(f"published load: more than {MAX_EARLY} messages in an interval")


@dataclass(slots=True)
class _Scraped:
    """What is known of the scrapes of one pod."""

    at_s: float = 0.0
    """When the last one began."""
    path: str = ""
    """What is fetched of it in `epoch`; empty: that is not known."""
    epoch: int = 0
    silent_until_s: float = 0.0
    """Until when it is not followed."""
    is_refused: bool = False
    is_drained: bool = False
    """It is drained because it said so."""
    pinned_since_s: float = inf
    """Since when KV of an idle decode pod has been in use."""
    logged_pins: bool = False


@dataclass(slots=True, eq=False)
class LoadScrapes:
    """Updates the loads in `fleet`, with at most one scrape per pod at a time. `on_excess` is called with a pod that
    sends more than is read of one, the reason and the time."""

    fleet: Fleet
    ledger: Ledger
    fetch: Fetch
    config: Probes
    on_excess: Callable[[PodId, str, float], None] = lambda _pod, _reason, _now_s: None
    cost_s: float = 0.0
    """CPU time of a scrape, learnt from those that succeed."""
    _scraped: dict[PodId, _Scraped] = field(default_factory=dict)
    _busy: set[PodId] = field(default_factory=set)

    @property
    def check(self) -> Check:
        return Check(
            name="load",
            run=self._load,
            due=self._is_due,
            every_s=self._every_s,
            forget=self._forget,
        )

    def _forget(self, pod_id: PodId) -> None:
        self._scraped.pop(pod_id, None)
        self._busy.discard(pod_id)

    def interval_s(self, status: PodStatus) -> float:
        """Time between two scrapes of the pod. An idle pod is scraped at most half as often, which delays only the
        discovery of work from outside this router."""
        load, pod_id = status.load, status.pod.id
        is_busy = load.running > 0 or load.waiting > 0 or self.ledger.requests_of_router(pod_id) > 0
        (self._busy.add if is_busy else self._busy.discard)(pod_id)
        busy = len(self._busy)
        idle = max(len(self._scraped) - busy, 0)
        return intervals_s(self.config.load_interval_s, self.cost_s, busy, idle)[not is_busy]

    def _every_s(self, status: PodStatus) -> float:
        """An idle pod may get work of this router before it is due."""
        return min(self.interval_s(status), IDLE_FACTOR * self.config.load_interval_s)

    def _is_due(self, status: PodStatus) -> bool:
        """Only pods in these states can have work."""
        if status.state not in _WITH_WORK:
            return False
        known = self._scraped.get(status.pod.id)
        early_s = self.config.load_interval_s  # it is not looked at more often
        if known is None or known.epoch != status.pod.epoch:
            return True
        return time.monotonic() - known.at_s >= self.interval_s(status) - early_s

    def _spend(self, spent_s: float) -> None:
        cost_s = LOOP_FACTOR * spent_s
        self.cost_s += _SMOOTHING * (min(cost_s, 4 * self.cost_s) - self.cost_s) if self.cost_s else cost_s

    async def _load(self, pod: Pod, _turn: Turn) -> None:
        """Follow the pod if it publishes its load; scrape it once if it does not, or no more."""
        known = self._scraped.setdefault(pod.id, _Scraped())
        if pod.load_endpoint and time.monotonic() >= known.silent_until_s:
            with suppress(*LOST, OutOfBounds, OutOfRange):
                await self._follow(pod, known)
            known.silent_until_s = time.monotonic() + SILENT_PAUSE_S
        await metered(self.scrape(pod), self._spend)

    async def _follow(self, pod: Pod, known: _Scraped) -> None:
        """Observe what the pod publishes, which includes at most the largest number of this router's prompts since its
        last message that counts. Raises `LOST`, `OutOfBounds` and `OutOfRange`."""
        async with connected(pod.load_endpoint, b"SUB", LOAD) as link:
            while (now := self.fleet.same_epoch(pod)) and now.state in _WITH_WORK:
                from_s = known.at_s + self.interval_s(now)
                with self.ledger.watching(pod.id) as ours:
                    load = await _published(link, pod, from_s)
                known.at_s = load.scraped_at_s
                self.fleet.received(pod.id, known.at_s)
                self._observe(pod, known, replace(load, our_prompts=ours.max_prompts))

    def _observe(self, pod: Pod, known: _Scraped, load: PodLoad) -> None:
        self.fleet.observe_load(pod.id, load)
        if pod.role is Role.DECODE:
            self._look_for_pins(pod, known, load)

    async def scrape(self, pod: Pod) -> None:
        """Scrape a pod once. The engine samples its numbers at an unknown time between request and response, so they
        include at most the largest number of this router's prompts in that time."""
        known = self._scraped.setdefault(pod.id, _Scraped())
        known.at_s = time.monotonic()
        if known.epoch != pod.epoch:
            known.epoch, known.path = pod.epoch, ""
        adapter = ENGINES[pod.engine]
        try:
            with self.ledger.watching(pod.id) as ours:
                page = await self.fetch(pod, known.path or adapter.metrics_path, self.config.load_timeout_s)
            if page:
                self.fleet.received(pod.id, time.monotonic())
            load = adapter.parse_load(page, pod.dp_rank, time.monotonic())
        except (UpstreamError, OutOfBounds, OutOfRange) as error:
            known.path = ""
            self._refuse(pod.id, known, error)
            self._drain(pod, known, error)
            return
        if load is None:
            known.path = ""
            return
        if known.is_drained:
            known.is_drained = False
            self.fleet.event(pod.id, PodEvent.UNDRAIN)
        self._observe(pod, known, replace(load, our_prompts=ours.max_prompts))
        if not known.path:
            known.path = await self._path(pod, page)

    def _look_for_pins(self, pod: Pod, known: _Scraped, load: PodLoad) -> None:
        """Warn of a decode pod that keeps KV without a request: it offers the KV of its answers to nobody."""
        is_busy = load.running or load.waiting or self.ledger.requests_of_router(pod.id)
        holds = not is_busy and load.kv_usage >= PINNED_USAGE
        known.pinned_since_s = min(known.pinned_since_s, known.at_s) if holds else inf
        if known.at_s - known.pinned_since_s >= PINNED_S and not known.logged_pins:
            known.logged_pins = True
            hint = "remove `bidirectional_kv_xfer` from its --kv-transfer-config (docs/handoff.md#offers)"
            log.warning("an idle decode pod has KV in use", pod=pod.id, kv_usage=load.kv_usage, hint=hint)

    async def _path(self, pod: Pod, page: bytes) -> str:
        """The path of what is read of the pod alone if that has each series of the page, else that of the page."""
        adapter = ENGINES[pod.engine]
        path = adapter.metrics_path + only(adapter.gauges.names)
        try:
            part = await self.fetch(pod, path, self.config.load_timeout_s)
            is_whole = series(part, adapter.gauges.names) >= series(page, adapter.gauges.names)
        except (UpstreamError, OutOfBounds):
            is_whole = False
        return path if is_whole and len(part) < len(page) else adapter.metrics_path

    def _drain(self, pod: Pod, known: _Scraped, error: Exception) -> None:
        """Send nothing more to a pod that serves nobody for now, although its health check may succeed."""
        reason = ENGINES[pod.engine].pause_reason(error.said) if isinstance(error, UpstreamBroken) else ""
        status = self.fleet.status(pod.id)
        if reason and status is not None and status.state is PodState.READY:
            known.is_drained = True
            self.fleet.event(pod.id, PodEvent.DRAIN, reason=reason)

    def _refuse(self, pod_id: PodId, known: _Scraped, error: Exception) -> None:
        """Forget the load of a pod that reports nonsense, which is logged once for each pod."""
        reason = str(error) if isinstance(error, OutOfRange) else excess(error)
        if not reason:
            return
        self.fleet.observe_load(pod_id, PodLoad())
        if not known.is_refused:
            known.is_refused = True
            log.warning("load of this pod is ignored", pod=pod_id, reason=reason)
        if not isinstance(error, OutOfRange):
            self.on_excess(pod_id, reason, time.monotonic())
