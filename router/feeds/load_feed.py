"""Scrapes the load of each pod from its metrics.

Each pod has its own task, so that a slow pod does not delay others. After a failed scrape, the last load stays with its
age, and the pod's state does not change, unless the engine says that it is being scaled: then the pod is drained until
it answers again. Where the metrics cannot be true, or are more than is read of a pod, its load
is unknown: only the requests of the routers count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from router.engines.adapter import EngineAdapter
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamBroken, UpstreamError
from router.feeds.pod_problems import Fetch, excess
from router.feeds.supervise import each_pod, pause
from router.fleet.breaker import Probes
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.guards import OutOfBounds, OutOfRange
from router.types import PodId, PodLoad, PodState

IDLE_FACTOR = 2
_WITH_WORK = (PodState.READY, PodState.DRAINING)

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class LoadFeed:
    """Updates the loads in `fleet`, with at most one scrape per pod at a time. `on_excess` is called with a pod that
    sends more than is read of one, the reason and the time."""

    fleet: Fleet
    ledger: Ledger
    fetch: Fetch
    config: Probes
    on_excess: Callable[[PodId, str, float], None] = lambda _pod, _reason, _now_s: None
    _refused: set[PodId] = field(default_factory=set)
    _drained: set[PodId] = field(default_factory=set)
    """Pods that are drained because they said so."""

    async def run(self) -> None:
        await each_pod("load of", self.fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        try:
            while True:
                await self.scrape(pod_id)
                await pause(changed, self.interval_s(pod_id))
        finally:
            self._refused.discard(pod_id)
            self._drained.discard(pod_id)

    def interval_s(self, pod_id: PodId) -> float:
        """Time until the next scrape of the pod. An idle pod is scraped half as often, which delays only the
        discovery of work from outside this router."""
        status = self.fleet.status(pod_id)
        is_busy = status is not None and (status.load.running > 0 or status.load.waiting > 0)
        is_busy = is_busy or self.ledger.requests_of_router(pod_id) > 0
        return self.config.load_interval_s * (1 if is_busy else IDLE_FACTOR)

    async def scrape(self, pod_id: PodId) -> None:
        """Scrape a pod once, if its state allows work. The engine samples its numbers at an unknown time between
        request and response, so they include at most the largest number of this router's prompts in that time."""
        status = self.fleet.status(pod_id)
        if status is None or status.state not in _WITH_WORK:
            return
        adapter = ENGINES[status.pod.engine]
        try:
            with self.ledger.watching(pod_id) as ours:
                metrics = await self.fetch(status.pod, adapter.metrics_path, self.config.load_timeout_s)
            self.fleet.received(pod_id, time.monotonic())
            scraped = adapter.parse_load(metrics, status.pod.dp_rank, time.monotonic())
        except (UpstreamError, OutOfBounds, OutOfRange) as error:
            self._refuse(pod_id, error)
            if status.state is PodState.READY:
                self._drain(pod_id, adapter, error)
            return
        if pod_id in self._drained:
            self._drained.discard(pod_id)
            self.fleet.event(pod_id, PodEvent.UNDRAIN)
        if scraped is not None:
            load = replace(scraped, our_prompts=ours.max_prompts)
            self.fleet.observe_load(pod_id, load)

    def _drain(self, pod_id: PodId, adapter: EngineAdapter, error: Exception) -> None:
        """Send nothing more to a pod that serves nobody for now, although its health check may succeed."""
        reason = adapter.pause_reason(error.said) if isinstance(error, UpstreamBroken) else ""
        if reason:
            self._drained.add(pod_id)
            self.fleet.event(pod_id, PodEvent.DRAIN, reason=reason)

    def _refuse(self, pod_id: PodId, error: Exception) -> None:
        """Forget the load of a pod that reports nonsense, which is logged once for each pod."""
        reason = str(error) if isinstance(error, OutOfRange) else excess(error)
        if not reason:
            return
        self.fleet.observe_load(pod_id, PodLoad())
        if pod_id not in self._refused:
            self._refused.add(pod_id)
            log.warning("load of this pod is ignored", pod=pod_id, reason=reason)
        if not isinstance(error, OutOfRange):
            self.on_excess(pod_id, reason, time.monotonic())
