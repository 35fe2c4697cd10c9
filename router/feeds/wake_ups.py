"""Wakes a pod that sleeps when requests would wait for longer than a wake-up takes: no pod of its model is ready, or
the prompts ahead on every ready pod take longer.

One pod of a model is woken at a time, in the same order by all routers. A second wake-up of a pod has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.supervise import loop_time_s, wait_until
from router.feeds.watch import Check, Fetch, Post, Turn
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.policy.eligible import ready_pods
from router.types import Pod, PodId, PodState

LOOK_S, MAX_PAUSE_S = 0.5, 60.0
FIRST_S = 10.0
"""What a wake-up is assumed to take before the first one of the model."""
TIMEOUT_S = 300.0
"""Limit of each call, and of the time from the last one until the pod is ready: weights may come from a disk."""
METRICS_TIMEOUT_S = 5.0

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class WakeUps:
    """`is_wanted`: whether requests want a ready pod of a model or adapter. `now_s`: the clock of the ledger."""

    fleet: Fleet
    ledger: Ledger
    fetch: Fetch
    post: Post
    is_wanted: Callable[[str], bool]
    now_s: Callable[[], float]
    _running: set[str] = field(default_factory=set)
    """Models of which a pod is being woken."""
    _took_s: dict[str, float] = field(default_factory=dict)
    """How long the last wake-up took, by model."""
    _failures: Counter[PodId] = field(default_factory=Counter)

    @property
    def check(self) -> Check:
        return Check(
            name="wake-up",
            run=self._wake,
            due=lambda status: status.pod.is_asleep and self._is_next(status.pod),
            every_s=lambda _status: LOOK_S,
            max_s=MAX_PAUSE_S,
            forget=lambda pod_id: self._failures.pop(pod_id, None),
        )

    def _is_next(self, pod: Pod) -> bool:
        """Whether a pod of its model is needed, and it is the one to wake: those that could not be woken come last."""
        model = pod.base_model
        if not model or model in self._running or not self._is_needed(pod):
            return False
        asleep = [s.pod.id for s in self.fleet.snapshot.pods if s.pod.is_asleep and s.pod.base_model == model]
        return pod.id == min(asleep, key=lambda pod_id: (self._failures[pod_id], pod_id))

    def _is_needed(self, pod: Pod) -> bool:
        if any(map(self.is_wanted, (*pod.models, *pod.adapters))):
            return True
        ready, now_s = ready_pods(self.fleet.snapshot, pod.base_model), self.now_s()
        queues_ms = [self.ledger.on(s.pod.id).queue_ms(now_s) for s in (*ready.direct, *ready.prefill)]
        return min(queues_ms, default=0.0) / 1000 > self._took_s.get(pod.base_model, FIRST_S)

    async def _wake(self, pod: Pod, _turn: Turn) -> bool:
        model, began_s = pod.base_model, loop_time_s()
        self._running.add(model)
        try:
            metrics = await self.fetch(pod, ENGINES[pod.engine].metrics_path, METRICS_TIMEOUT_S)
            calls = ENGINES[pod.engine].wake_calls(metrics)
            for path, body in calls:
                await self.post(pod, path, body, TIMEOUT_S)
            is_awake = bool(calls) and await self._becomes_ready(pod.id)
        except UpstreamError as error:
            is_awake = False
            log.warning("pod cannot be woken", pod=pod.id, error=str(error))
        finally:
            self._running.discard(model)
        if is_awake:
            self._took_s[model] = loop_time_s() - began_s
            log.info("pod woken", pod=pod.id, took_s=round(self._took_s[model], 1))
        self._failures[pod.id] = 0 if is_awake else self._failures[pod.id] + 1
        return is_awake

    async def _becomes_ready(self, pod_id: PodId) -> bool:
        """Whether the probe finds the pod awake in time."""

        def state() -> PodState | None:
            return status.state if (status := self.fleet.status(pod_id)) else None

        await wait_until(lambda: state() in (PodState.READY, None), TIMEOUT_S)
        return state() is PodState.READY
