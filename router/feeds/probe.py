"""Probes the health of each pod, and fetches the description of a new pod before it gets traffic.

Only the engine's health path counts: failures go to the breaker, a success admits the pod. /v1/models and /metrics do
not count, because a busy engine answers them late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from router.config.schema import Probes
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES
from router.errors import ConnectFailed, UpstreamError
from router.feeds.http_client import Fetch
from router.feeds.supervise import each_pod, pause
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, PodEvent
from router.types import Pod, PodId, PodState

JOINING_INTERVAL_S = 0.1
"""Interval for a pod that is not up yet, so that it gets traffic within a second of its start."""

OnDescribed: TypeAlias = Callable[[Pod, PodFacts], None]

log = structlog.get_logger()


@dataclass(slots=True)
class _Seen:
    """Results of the probes of one pod. `described_epoch` 0: it has not been described yet."""

    described_epoch: int = 0
    refused: bool = False
    warned: bool = False


class ProbeFeed:
    """Moves pods between JOINING, READY and EJECTED. `on_described(pod, facts)` is called before a pod becomes READY
    for the first time, and after each of its restarts."""

    def __init__(
        self,
        fleet: Fleet,
        breaker: Breaker,
        fetch: Fetch,
        on_described: OnDescribed,
        config: Probes,
    ) -> None:
        self._fleet = fleet
        self._breaker = breaker
        self._fetch = fetch
        self._on_described = on_described
        self._interval_s = config.health_interval_s
        self._timeout_s = config.health_timeout_s

    async def run(self) -> None:
        await each_pod("probe of", self._fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        seen = _Seen()
        while True:
            status = self._fleet.status(pod_id)
            if status is not None and self._breaker.may_probe(pod_id, time.monotonic()):
                await self._probe(status.pod, seen)
            await pause(changed, self._pause_s(pod_id))

    def _pause_s(self, pod_id: PodId) -> float:
        status = self._fleet.status(pod_id)
        joining = status is not None and status.state is PodState.JOINING
        return min(self._interval_s, JOINING_INTERVAL_S) if joining else self._interval_s

    async def _probe(self, pod: Pod, seen: _Seen) -> None:
        try:
            await self._fetch(pod, ENGINES[pod.engine].health_path, self._timeout_s)
        except UpstreamError as error:
            seen.refused = seen.refused or (isinstance(error, ConnectFailed) and error.refused)
            self._breaker.probe_failed(pod.id, time.monotonic())
            return
        self._breaker.seen_alive(pod.id)
        if seen.refused and seen.described_epoch:
            # A port that accepts connections again belongs to a new process, with an empty cache.
            self._fleet.restarted(pod.id)
            seen.described_epoch = 0
        seen.refused = False
        await self._admit(pod.id, seen)

    async def _admit(self, pod_id: PodId, seen: _Seen) -> None:
        """Make a healthy pod READY once it has been described. A serving pod is not described again after a restart
        that another feed detected, because that feed has already reset its caches."""
        status = self._fleet.status(pod_id)
        if status is None:
            return
        serving = status.state is PodState.READY and seen.described_epoch > 0
        if not serving and seen.described_epoch != status.pod.epoch and not await self._describe(status.pod, seen):
            return
        self._fleet.event(pod_id, PodEvent.PROBE_OK, time.monotonic())

    async def _describe(self, pod: Pod, seen: _Seen) -> bool:
        """Fetch what the pod serves and report it. False if the pod does not answer or has restarted since."""
        adapter = ENGINES[pod.engine]
        bodies = await asyncio.gather(*(self._body(pod, path) for path in adapter.describe_paths))
        answers = {path: body for path, body in zip(adapter.describe_paths, bodies, strict=True) if body is not None}
        facts = adapter.describe(answers, pod)
        if facts is None and not seen.warned:
            seen.warned = True
            log.warning(
                "healthy pod does not list its models",
                pod=pod.id,
                path=adapter.describe_paths[0],
                hint="if the engine has an API key, configure it under `auth` of the pod",
            )
        now = self._fleet.status(pod.id)
        if facts is None or now is None or now.pod.epoch != pod.epoch:
            return False
        seen.described_epoch, seen.warned = pod.epoch, False
        self._on_described(now.pod, facts)
        return True

    async def _body(self, pod: Pod, path: str) -> bytes | None:
        try:
            return await self._fetch(pod, path, self._timeout_s)
        except UpstreamError:
            return None
