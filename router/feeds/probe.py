"""Is each pod alive, and what is it?

One task a pod: asks its health every interval and at once when it joins, describes it when it comes (back) to life, and
tells the breaker of failures. Only the health path decides; a busy pod that is slow to list its models stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import structlog

from router.engines.adapter import PodFacts
from router.engines.catalog import ENGINES
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import Pod, PodId, PodState

JOINING_INTERVAL_S = 0.1
"""How often a pod is asked that has not been ready yet: a new pod gets traffic well within a second of being up."""

Described = Callable[[Pod, PodFacts], None]

log = structlog.get_logger()


class ProbeFeed:
    """Keeps states in `fleet` true. `described` is told (pod, facts) before a pod becomes READY."""

    def __init__(
        self,
        fleet: Fleet,
        breaker: Breaker,
        client: httpx.AsyncClient,
        described: Described,
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._breaker = breaker
        self._client = client
        self._described = described
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._tasks: dict[PodId, asyncio.Task[None]] = {}
        fleet.listen(self._on_change)

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            for status in self._fleet.snapshot.pods:
                self._watch(status.pod.id)
            await asyncio.Event().wait()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _on_change(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.JOINING:
            self._watch(pod.id)
        elif new is PodState.GONE:
            task = self._tasks.pop(pod.id, None)
            if task is not None:
                task.cancel()

    def _watch(self, pod: PodId) -> None:
        if pod not in self._tasks:
            self._tasks[pod] = asyncio.create_task(self._watch_forever(pod))

    async def _watch_forever(self, pod: PodId) -> None:
        while (status := self._fleet.status(pod)) is not None:
            try:
                await self.probe(status.pod, status.state)
            except Exception:
                log.exception("probe failed", pod=pod)
            joining = status.state is PodState.JOINING
            await asyncio.sleep(min(JOINING_INTERVAL_S, self._interval_s) if joining else self._interval_s)

    async def probe(self, pod: Pod, state: PodState) -> None:
        """Ask one pod once."""
        now_s = time.monotonic()
        if state is PodState.EJECTED and not self._breaker.may_probe(pod.id, now_s):
            return
        adapter = ENGINES[pod.engine]
        if not await self._answers(pod.url + adapter.health_path):
            self._breaker.probe_failed(pod.id, time.monotonic())
            return
        self._breaker.probe_ok(pod.id)
        if state in (PodState.JOINING, PodState.EJECTED):
            await self._welcome(pod, state)

    async def _welcome(self, pod: Pod, state: PodState) -> None:
        """The pod is (again) alive: learn what it is now, then let it have requests."""
        facts = await self.describe(pod)
        if facts is None:
            return
        if state is PodState.EJECTED:
            self._fleet.restarted(pod.id)
        status = self._fleet.status(pod.id)
        if status is not None:
            self._described(status.pod, facts)
            self._fleet.event(pod.id, PodEvent.PROBE_OK)

    async def describe(self, pod: Pod) -> PodFacts | None:
        """Everything the pod says of itself; None while it does not name its models."""
        adapter = ENGINES[pod.engine]
        bodies = await asyncio.gather(*(self._body(pod.url + path) for path in adapter.describe_paths))
        answers = {path: body for path, body in zip(adapter.describe_paths, bodies, strict=True) if body is not None}
        return adapter.describe(answers, pod)

    async def _answers(self, url: str) -> bool:
        return await self._body(url) is not None

    async def _body(self, url: str) -> bytes | None:
        try:
            answer = await self._client.get(url, timeout=self._timeout_s)
        except httpx.HTTPError:
            return None
        return answer.content if answer.status_code == 200 else None
