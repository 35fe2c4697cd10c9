"""How busy is each engine, by its own account?

Scrapes every pod's metrics side by side, never two at once for one pod, so that a slow pod delays nobody. A scrape that
fails changes nothing: only health decides about a pod.
"""

from __future__ import annotations

import asyncio
import time

import httpx

from router.engines.catalog import ENGINES
from router.fleet.fleet import Fleet
from router.types import Pod, PodId


class LoadFeed:
    """Keeps the loads in `fleet` fresh."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, *, interval_s: float, timeout_s: float) -> None:
        self._fleet = fleet
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._under_way: dict[PodId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Scrape until cancelled."""
        try:
            while True:
                for status in self._fleet.snapshot.pods:
                    self._begin(status.pod)
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._under_way.values():
                task.cancel()

    def _begin(self, pod: Pod) -> None:
        task = self._under_way.get(pod.id)
        if task is None or task.done():
            self._under_way[pod.id] = asyncio.create_task(self.scrape(pod))

    async def scrape(self, pod: Pod) -> None:
        """One pod's load, once."""
        adapter = ENGINES[pod.engine]
        try:
            answer = await self._client.get(pod.url + adapter.metrics_path, timeout=self._timeout_s)
        except httpx.HTTPError:
            return
        if answer.status_code == 200:
            load = adapter.parse_load(answer.content, pod.dp_rank, time.monotonic())
            if load is not None:
                self._fleet.observe_load(pod.id, load)
