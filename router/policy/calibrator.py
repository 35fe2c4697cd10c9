"""Calibrates the speed of pods and links by observed responses, and compares predictions with them."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import Protocol

from router.decision import Candidate, RouteDecision
from router.policy.calibration import Calibration, class_key
from router.policy.decide import expected_ttft_ms
from router.policy.prefill_clock import PrefillClock, PrefillObservation, TransferObservation
from router.types import Links, Pod, PodId, PodSpeed

MIN_INTERVAL_S = 0.01
"""Minimum interval between two observations of one class of pods: each costs 40 us."""
HANDOFF_STEPS = 2
"""Decode steps in the measured time of a transfer: one that runs when the KV arrives, and that of the first token."""
MIN_LINK_MS = 2.0
"""Transfers with a shorter configured time do not show how fast the link is."""
REGRET_EVERY = 8
"""The regret is computed for every eighth request."""


class SpeedMetrics(Protocol):
    """Counts what was observed; `Metrics` does."""

    def observe_transfer(self, kind: str, kv_bytes: float, elapsed_ms: float, slowdown: float | None) -> None:
        """A transfer of KV over a link of this kind. `slowdown`: its part of the configured time; None: unknown."""

    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None:
        """A first token, expected and actual."""

    def observe_regret(self, model: str, regret_ms: float) -> None:
        """Time that another candidate was expected to save."""


class Calibrator:
    """Owner of the calibration and of the pods' prefill clocks, which interpret the times of first tokens. `priors` and
    `links` are configured values."""

    def __init__(self, calibration: Calibration, metrics: SpeedMetrics, links: Links) -> None:
        self.calibration = calibration
        self.links = links
        self.priors: dict[PodId, PodSpeed] = {}
        self._metrics = metrics
        self._clocks: defaultdict[PodId, PrefillClock] = defaultdict(PrefillClock)
        self._compared = 0
        self._observed_s: dict[str, float] = {}

    def clock(self, pod: PodId) -> PrefillClock:
        return self._clocks[pod]

    def remove(self, pod: Pod) -> None:
        """Remove a pod; the calibration of its class stays."""
        self._clocks.pop(pod.id, None)
        self.priors.pop(pod.id, None)
        self.calibration.forget(class_key(pod), pod.id)

    def wants_observation(self, pod: Pod, now_s: float) -> bool:
        """Whether `MIN_INTERVAL_S` has passed since the last observation of the pod's class."""
        return now_s - self._observed_s.get(class_key(pod), -inf) >= MIN_INTERVAL_S

    def observe_prefill(self, pod: Pod, seen: PrefillObservation, now_s: float) -> None:
        """Calibrate by computed prompts, at most once in `MIN_INTERVAL_S` for each class."""
        prior, key = self.priors.get(pod.id), class_key(pod)
        if not self.wants_observation(pod, now_s):
            return
        self._observed_s[key] = now_s
        if prior is not None:
            self.calibration.observe_prefill(key, pod.id, prior, seen)

    def observe_transfer(self, sender: Pod, receiver: Pod, tokens: int, elapsed_ms: float, concurrent: int) -> None:
        """Calibrate by a transfer of KV, during `concurrent` other transfers of the sender."""
        link = self.links.between(sender, receiver)
        if link is not None and tokens:
            kv_bytes = tokens * receiver.kv_bytes_per_token
            link_ms = link.transfer_ms(kv_bytes * (1 + concurrent))
            slowdown = max(elapsed_ms - HANDOFF_STEPS * receiver.speed.d0_ms, 0.0) / link_ms
            self._metrics.observe_transfer(link.kind, kv_bytes, elapsed_ms, slowdown if link_ms > MIN_LINK_MS else None)
            self.calibration.observe_transfer(link.kind, link, TransferObservation(kv_bytes, concurrent, elapsed_ms))

    def compare_ttft(self, model: str, decision: RouteDecision, chosen: Candidate, ttft_ms: float) -> None:
        """Record the error of the expected time to first token, and for a sample the regret: the actual time minus the
        time expected of the best other candidate."""
        self._metrics.observe_ttft(model, expected_ttft_ms(chosen.cost), ttft_ms)
        self._compared += 1
        if self._compared % REGRET_EVERY == 0:
            others = (expected_ttft_ms(one.cost) for one in decision.candidates if one is not chosen)
            self._metrics.observe_regret(model, max(0.0, ttft_ms - min(others, default=ttft_ms)))
