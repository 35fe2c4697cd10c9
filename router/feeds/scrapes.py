"""Scrapes the load of each pod from its metrics.

After a failed scrape, the last load stays with its age, and the pod's state does not change, unless the engine says
that it is being scaled: then the pod is drained until it answers again. Where the metrics cannot be true, or are more
than is read of a pod, its load is unknown: only the requests of the routers count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from router.config.schema import Probes
from router.engines.adapter import EngineAdapter
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamBroken, UpstreamError
from router.feeds.probe import excess
from router.feeds.watch import Check, Fetch, Turn
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.guards import OutOfBounds, OutOfRange
from router.types import Pod, PodId, PodLoad, PodState, PodStatus

IDLE_FACTOR = 2
_WITH_WORK = (PodState.READY, PodState.DRAINING)

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class LoadScrapes:
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

    @property
    def check(self) -> Check:
        """Only pods in these states can have work."""
        return Check(
            name="load",
            run=self.scrape,
            due=lambda status: status.state in _WITH_WORK,
            every_s=self.every_s,
            forget=self._forget,
        )

    def _forget(self, pod_id: PodId) -> None:
        self._refused.discard(pod_id)
        self._drained.discard(pod_id)

    def every_s(self, status: PodStatus) -> float:
        """Time until the next scrape of the pod. An idle pod is scraped half as often, which delays only the
        discovery of work from outside this router."""
        load = status.load
        is_busy = load.running > 0 or load.waiting > 0 or self.ledger.requests_of_router(status.pod.id) > 0
        return self.config.load_interval_s * (1 if is_busy else IDLE_FACTOR)

    async def scrape(self, pod: Pod, _turn: Turn) -> None:
        """Scrape a pod once. The engine samples its numbers at an unknown time between
        request and response, so they include at most the largest number of this router's prompts in that time."""
        adapter = ENGINES[pod.engine]
        try:
            with self.ledger.watching(pod.id) as ours:
                metrics = await self.fetch(pod, adapter.metrics_path, self.config.load_timeout_s)
            self.fleet.received(pod.id, time.monotonic())
            scraped = adapter.parse_load(metrics, pod.dp_rank, time.monotonic())
        except (UpstreamError, OutOfBounds, OutOfRange) as error:
            self._refuse(pod.id, error)
            self._drain(pod.id, adapter, error)
            return
        if pod.id in self._drained:
            self._drained.discard(pod.id)
            self.fleet.event(pod.id, PodEvent.UNDRAIN)
        if scraped is not None:
            load = replace(scraped, our_prompts=ours.max_prompts)
            self.fleet.observe_load(pod.id, load)

    def _drain(self, pod_id: PodId, adapter: EngineAdapter, error: Exception) -> None:
        """Send nothing more to a pod that serves nobody for now, although its health check may succeed."""
        reason = adapter.pause_reason(error.said) if isinstance(error, UpstreamBroken) else ""
        status = self.fleet.status(pod_id)
        if reason and status is not None and status.state is PodState.READY:
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
