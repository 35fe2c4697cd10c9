"""What would another policy decide on the current traffic?

Decides a sample of the scenes again after their requests have ended, one in each turn of the event loop, and only while
the loop is not late. Scenes that do not fit into the queue are dropped and counted. Nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from router.decision import RouteDecision
from router.observe.loop_lag import call_later
from router.observe.metrics import Metrics
from router.policy.recording import RecordedScene
from router.policy.review import compare
from router.policy.spec import Policy

MAX_WAITING = 256
DELAY_S = 0.1
"""Decisions are batched: many in a row take a third of the CPU of single ones."""
LATE_S = 0.002
"""The loop is busy if a turn is later than this."""


class _Waiting(NamedTuple):
    scene: RecordedScene
    live: RouteDecision
    policy: Policy
    shadow: Policy
    ttft_ms: float | None


class Shadows:
    """Shadow policies, each for a share of the live policy's decisions. `named` finds a policy by name."""

    def __init__(self, named: Callable[[str], Policy | None], metrics: Metrics) -> None:
        self._named = named
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()

    def offer(self, scene: RecordedScene, live: RouteDecision, policy: Policy, ttft_ms: float | None) -> None:
        """Queue one decision of the live policy, if it is in the sample. O(1)."""
        wanted = policy.shadow
        if wanted is None or xxhash.xxh3_64_intdigest(scene.request_id.encode()) >= wanted.rate * 2**64:
            return
        shadow = self._named(wanted.policy)
        if shadow is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.shadow_dropped.labels(shadow.name, scene.workload).inc()
            return
        self._waiting.append(_Waiting(scene, live, policy, shadow, ttft_ms))
        if len(self._waiting) == 1:
            call_later(DELAY_S, self._next)

    def _next(self, late_s: float) -> None:
        """Compare one, unless the loop is busy."""
        if late_s > LATE_S:
            call_later(DELAY_S, self._next)
            return
        try:
            self._compare(self._waiting[0])
        finally:
            self._waiting.popleft()
            if self._waiting:
                call_later(0.0, self._next)

    def _compare(self, one: _Waiting) -> None:
        found = compare(one.scene.scene(), one.live, one.policy, one.shadow)
        if found is None:
            self._metrics.shadow_dropped.labels(one.shadow.name, one.scene.workload).inc()
        else:
            self._metrics.observe_shadow(one.shadow.name, one.scene.workload, found, one.ttft_ms)
