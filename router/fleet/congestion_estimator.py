"""How busy are pods with computing prompts?

The ledger reports bookings and the begin and end of each pod's work on prompts. Rates and busy shares are averages with
exponential decay, which is applied at most every `STEP_S`: an error below `STEP_S / WINDOW_S`, 0.1 %. They start as if
the pod had been idle for `COLD_START_S`. Pods are combined when a request reads them, so a pod that has left the fleet
has left the means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp

import msgspec

from router.types import Congestion, FleetSnapshot, InFlight, Pod, PodId, PodState, Role

WINDOW_S = 120.0
"""Time constant of the averages."""
STEP_S = 0.1
"""Bookings and changes decay the averages of their pod at most this often."""
COLD_START_S = 10.0
"""Idle time that a new pod's averages start with."""
REFRESH_S = 0.05
"""The means of a model are computed at most this often."""
AS_FAST = 1.5
"""Pods whose c1 differ by at most this factor are as fast: learnt coefficients of equal pods differ a little."""
MAX_PODS = 4096
"""Pods with averages; of more, those without a recent change are dropped."""


class _Averages(msgspec.Struct, gc=False):
    """The averages of one pod, decayed to `at_s`. `observed_s`: the decayed length of the time that they cover."""

    since_s: float
    at_s: float
    observed_s: float = 0.0
    prompts: float = 0.0
    busy_s: float = 0.0
    busy: bool = False

    def set_busy(self, busy: bool, now_s: float) -> None:
        if now_s - self.at_s >= STEP_S:
            self.decay(now_s)
        # The next decay counts the time since `at_s` as the state then is; this corrects for the part before now.
        self.busy_s += self.at_s - now_s if busy else now_s - self.at_s
        self.busy = busy

    def decay(self, now_s: float) -> None:
        if now_s <= self.at_s:
            return
        kept = exp((self.at_s - now_s) / WINDOW_S)
        self.prompts *= kept
        self.busy_s = self.busy_s * kept + (WINDOW_S * (1 - kept) if self.busy else 0.0)
        self.at_s = now_s
        self.observed_s = WINDOW_S * (1 - exp((self.since_s - now_s) / WINDOW_S))


class CongestionEstimator:
    """Averages by pod, and their means by model. Times must not go backwards."""

    def __init__(self) -> None:
        self._pods: dict[PodId, _Averages] = {}
        self._means: dict[str, tuple[float, Congestion]] = {}
        """By model, with the time of their computation."""

    def booked(self, pod: PodId, now_s: float) -> None:
        """A prompt is sent to `pod`, which is busy from now on."""
        averages = self._pods.get(pod) or self._add(pod, now_s)
        if now_s - averages.at_s >= STEP_S:
            averages.decay(now_s)
        averages.prompts += 1
        if not averages.busy:
            averages.set_busy(True, now_s)

    def set_busy(self, pod: PodId, busy: bool, now_s: float) -> None:
        """`pod` has a prompt without a first token, of any router, or has none. Idempotent."""
        averages = self._pods.get(pod)
        if averages is None and busy:
            averages = self._add(pod, now_s)
        if averages is not None and averages.busy is not busy:
            averages.set_busy(busy, now_s)

    def prompts_per_s(self, pod: PodId) -> float:
        """Rate of the prompts booked on the pod, as of the last change."""
        averages = self._pods.get(pod)
        return averages.prompts / averages.observed_s if averages and averages.prompts else 0.0

    def means(
        self, fleet: FleetSnapshot, model: str, inflight: Callable[[], Mapping[PodId, InFlight]], now_s: float
    ) -> Congestion:
        """Means over the ready pods that serve `model` and compute prompts. `inflight` returns the work of all routers.
        O(pods), but O(1) within `REFRESH_S`."""
        known = self._means.get(model)
        if known is not None and now_s - known[0] < REFRESH_S:
            return known[1]
        found = self._computed(_computing(fleet, model), inflight(), now_s)
        if len(self._means) > MAX_PODS:
            self._means.clear()
        self._means[model] = now_s, found
        return found

    def _computed(self, pods: list[Pod], inflight: Mapping[PodId, InFlight], now_s: float) -> Congestion:
        prompts_per_s = backlog_ms = 0.0
        busy_shares = [self._busy_share(pod.id, now_s) for pod in pods]
        for pod in pods:
            work = inflight.get(pod.id)
            if work:
                backlog_ms += work.queue_ms(now_s)
            prompts_per_s += work.prompts_per_s if work else self.prompts_per_s(pod.id)
        count = max(len(pods), 1)
        by_speed = _means_by_speed(pods, busy_shares)
        return Congestion(prompts_per_s / count, sum(busy_shares) / count, backlog_ms / count, by_speed)

    def _busy_share(self, pod: PodId, now_s: float) -> float:
        averages = self._pods.get(pod)
        if averages is None:
            return 0.0
        averages.decay(now_s)  # of the prompts as well
        return averages.busy_s / averages.observed_s

    def _add(self, pod: PodId, now_s: float) -> _Averages:
        if len(self._pods) >= MAX_PODS:
            recent = sorted(self._pods.items(), key=lambda one: one[1].at_s)[MAX_PODS // 2 :]
            self._pods = dict(recent)
        averages = self._pods[pod] = _Averages(now_s - COLD_START_S, now_s - COLD_START_S)
        averages.decay(now_s)
        return averages


def _means_by_speed(pods: Sequence[Pod], shares: Sequence[float]) -> dict[PodId, float]:
    """By pod, the mean share of the pods that are as fast; empty if all are. O(pods log pods)."""
    c1 = [pod.speed.c1_ms_per_token for pod in pods]
    if not c1 or max(c1) <= AS_FAST * min(c1):
        return {}
    groups: list[list[int]] = []
    for number in sorted(range(len(pods)), key=c1.__getitem__):
        if not groups or c1[number] > AS_FAST * c1[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    means = {number: sum(shares[one] for one in group) / len(group) for group in groups for number in group}
    return {pod.id: means[number] for number, pod in enumerate(pods)}


def _computing(fleet: FleetSnapshot, model: str) -> list[Pod]:
    """The pods that compute prompts: in a fleet with prefill pods, these; otherwise all."""
    serving = [s.pod for s in fleet.pods if s.state is PodState.READY and s.pod.serves(model)]
    return [pod for pod in serving if pod.role is not Role.DECODE] or serving
