"""Scrapes the load of each pod from its metrics.

Each pod has its own task, so that a slow pod does not delay others. After a failed scrape, the last load stays with its
age, and the pod's state does not change.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from router.config.schema import Probes
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.pod_problems import Fetch
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.types import PodId, PodState

IDLE_FACTOR = 2
_WITH_WORK = (PodState.READY, PodState.DRAINING)


class LoadFeed:
    """Updates the loads in `fleet`, with at most one scrape per pod at a time."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        fetch: Fetch,
        config: Probes,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._fetch = fetch
        self._interval_s = config.load_interval_s
        self._timeout_s = config.load_timeout_s

    async def run(self) -> None:
        await each_pod("load of", self._fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        while True:
            await self.scrape(pod_id)
            await pause(changed, self.interval_s(pod_id))

    def interval_s(self, pod_id: PodId) -> float:
        """Time until the next scrape of the pod. An idle pod is scraped half as often, which delays only the
        discovery of work from outside this router."""
        status = self._fleet.status(pod_id)
        is_busy = status is not None and (status.load.running > 0 or status.load.waiting > 0)
        is_busy = is_busy or self._ledger.requests_of_router(pod_id) > 0
        return self._interval_s * (1 if is_busy else IDLE_FACTOR)

    async def scrape(self, pod_id: PodId) -> None:
        """Scrape a pod once, if its state allows work. The engine samples its numbers at an unknown time between
        request and response, so they include at most the largest number of this router's prompts in that time."""
        status = self._fleet.status(pod_id)
        if status is None or status.state not in _WITH_WORK:
            return
        adapter = ENGINES[status.pod.engine]
        with self._ledger.watching(pod_id) as ours:
            try:
                metrics = await self._fetch(status.pod, adapter.metrics_path, self._timeout_s)
            except UpstreamError:
                return
        scraped = adapter.parse_load(metrics, status.pod.dp_rank, time.monotonic())
        if scraped is not None:
            load = replace(scraped, our_prompts=ours.max_prompts)
            self._fleet.observe_load(pod_id, load)
