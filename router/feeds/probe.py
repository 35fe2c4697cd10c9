"""Probes the health of each pod, and fetches the description of a new pod before it gets traffic.

Only the engine's health path counts: failures go to the breaker, a success admits the pod, or drains it as long as the
engine reports a fault. /v1/models and /metrics do not count, because a busy engine answers them late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf

from router.engines.adapter import MODELS_PATH, PodFacts, parse_models
from router.engines.engine_catalog import ENGINES
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.feeds.pod_problems import Fetch, excess, fetch_facts, unusable_reason
from router.feeds.supervise import each_pod, pause
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.guards import OutOfBounds
from router.stores.logged_once import LoggedOnce
from router.types import Pod, PodId, PodState

JOINING_INTERVAL_S = 0.1
"""Interval for a pod that is not up yet, so that it gets traffic within a second of its start."""

ADAPTERS_INTERVAL_S = 10.0
"""Interval at which a READY pod is asked for its adapters, which others may load and unload."""


@dataclass(slots=True)
class _Seen:
    """State of one pod. `described_epoch` 0: not described yet. `reasons`: those logged since it was last READY."""

    described_epoch: int = 0
    refused: bool = False
    reasons: LoggedOnce = field(default_factory=LoggedOnce)
    reports_faults: bool = False
    fault: str = ""
    """Why it is drained."""
    listed_at_s: float = 0.0
    """When its adapters were last read."""


@dataclass(slots=True, eq=False)
class ProbeFeed:
    """Moves pods between JOINING, READY and EJECTED. `on_described(pod, facts)` is called before a pod becomes READY
    for the first time, and after each of its restarts."""

    fleet: Fleet
    breaker: Breaker
    fetch: Fetch
    on_described: Callable[[Pod, PodFacts], None]
    config: Probes

    async def run(self) -> None:
        await each_pod("probe of", self.fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        seen = _Seen()
        while True:
            status = self.fleet.status(pod_id)
            if status is not None and self.breaker.may_probe(pod_id, time.monotonic()):
                await self._probe(status.pod, seen)
            await pause(changed, self._pause_s(pod_id))

    def _pause_s(self, pod_id: PodId) -> float:
        status = self.fleet.status(pod_id)
        joining = status is not None and status.state is PodState.JOINING
        return min(self.config.health_interval_s, JOINING_INTERVAL_S) if joining else self.config.health_interval_s

    async def _probe(self, pod: Pod, seen: _Seen) -> None:
        sent_s = time.monotonic()
        try:
            await self.fetch(pod, ENGINES[pod.engine].health_path, self.config.health_timeout_s)
        except UpstreamError as error:
            seen.refused = seen.refused or (isinstance(error, ConnectFailed) and error.refused)
            if not (isinstance(error, ConnectFailed) and error.local):
                timed_out = isinstance(error, UpstreamTimeout) or isinstance(error.__cause__, TimeoutError)
                self.breaker.probe_failed(pod.id, time.monotonic(), sent_s if timed_out else inf)
            self._explain(pod, seen, error)
            return
        self.breaker.seen_alive(pod.id)
        if seen.refused and seen.described_epoch:
            # A port that accepts connections again belongs to a new process, with an empty cache.
            self.fleet.restarted(pod.id)
            seen.described_epoch = 0
        seen.refused = False
        await self._admit(pod.id, seen)

    async def _admit(self, pod_id: PodId, seen: _Seen) -> None:
        """Make a healthy pod READY once it has been described. A serving pod is not described again after a restart
        that another feed detected, because that feed has already reset its caches."""
        status = self.fleet.status(pod_id)
        if status is None:
            return
        serving = status.state is PodState.READY and seen.described_epoch > 0
        if not serving and seen.described_epoch != status.pod.epoch and not await self._describe(status.pod, seen):
            return
        fault = await self._fault(status.pod, seen)
        begins, ends = fault and status.state is not PodState.DRAINING, seen.fault and not fault
        if begins or ends:
            self.fleet.event(pod_id, PodEvent.DRAIN if fault else PodEvent.UNDRAIN, reason=fault)
            seen.fault = fault
        now_s = time.monotonic()
        if not self.breaker.may_probe(pod_id, now_s):  # it was ejected while it answered
            return
        if self.fleet.event(pod_id, PodEvent.PROBE_OK, now_s) is PodState.READY:
            seen.reasons.clear()
            await self._list_adapters(pod_id, seen)

    async def _fault(self, pod: Pod, seen: _Seen) -> str:
        """The fault that keeps a pod from serving although its health check succeeds."""
        if not seen.reports_faults:
            return ""
        adapter = ENGINES[pod.engine]
        try:
            return adapter.fault(await self.fetch(pod, adapter.faults_path, self.config.health_timeout_s), pod)
        except UpstreamError as error:
            seen.reports_faults = not (isinstance(error, UpstreamBroken) and error.status == HTTPStatus.NOT_FOUND)
            return seen.fault if seen.reports_faults else ""

    async def _list_adapters(self, pod_id: PodId, seen: _Seen) -> None:
        """Read the adapters of a described pod again after `ADAPTERS_INTERVAL_S`. The answer does not
        count if one was loaded or unloaded meanwhile."""
        now_s, status = time.monotonic(), self.fleet.status(pod_id)
        if status is None or now_s - seen.listed_at_s < ADAPTERS_INTERVAL_S:
            return
        pod, seen.listed_at_s = status.pod, now_s
        try:
            facts = parse_models(await self.fetch(pod, MODELS_PATH, self.config.health_timeout_s), pod.allowed_models)
        except (UpstreamError, OutOfBounds) as error:
            if reason := excess(error):
                self.breaker.exceeded(pod_id, reason, now_s)
            return
        now = self.fleet.same_epoch(pod)
        if facts is not None and now and now.pod.adapters == pod.adapters:
            self.fleet.learn(pod_id, adapters=facts.adapters)

    async def _describe(self, pod: Pod, seen: _Seen) -> bool:
        """Fetch what the pod serves and report it. False if it does not answer, or is another pod now."""
        try:
            facts = await fetch_facts(self.fetch, pod, self.config.health_timeout_s)
        except UpstreamError as error:
            self._explain(pod, seen, error)
            return False
        now = self.fleet.same_epoch(pod)
        if now is None:
            return False
        seen.described_epoch, seen.reports_faults = pod.epoch, bool(ENGINES[pod.engine].faults_path)
        seen.listed_at_s = time.monotonic()
        self.on_described(now.pod, facts)
        return self.fleet.same_epoch(pod) is not None

    def _explain(self, pod: Pod, seen: _Seen, error: UpstreamError) -> None:
        """Record why the pod is not READY; log each reason, also of a READY one, once until a probe succeeds."""
        now = self.fleet.same_epoch(pod)
        if now is not None and now.state is PodState.READY and (kept := self.fleet.state_reason(pod.id)):
            seen.reasons.warn("pod fails its health checks", pod=pod.id, reason=kept)
        if now is None or now.state not in (PodState.JOINING, PodState.EJECTED):
            return
        reason = unusable_reason(pod, error)
        self.fleet.explain_state(pod.id, reason)
        seen.reasons.warn("pod cannot be used", pod=pod.id, reason=reason)
