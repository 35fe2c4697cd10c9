"""What do answers teach about pods and links, and was the price right?

Between the clocks of the pods, which tell what a first token's time means, and the calibration, which learns from it.
Also compares what was predicted with what came. This file never reads a clock and never decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias

import msgspec

from router.decision import Candidate, RouteDecision
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration, PrefillClock, PrefillObservation, TransferObservation, class_key
from router.policy.decide import expected_ttft_ms
from router.types import Links, Pod, PodId, PodSpeed

MIN_INTERVAL_S = 0.01
"""Between two lessons of one class of pods: each takes 40 us to learn, and any hundred a second teach the same."""
REGRET_EVERY = 8
"""A look back at every so many requests."""


class PrefillReport(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A pod computed prompts."""

    pod: PodId
    seen: PrefillObservation


class TransferReport(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """So much KV took so long, beside other transfers of the sender."""

    sender: PodId
    receiver: PodId
    tokens: int
    elapsed_ms: float
    concurrent: int


SpeedReport: TypeAlias = PrefillReport | TransferReport
"""What another worker of this router needs to learn the same."""


class Calibrator:
    """Clocks by pod, and what is learnt through them. `priors` and `links` are what was configured."""

    def __init__(self, calibration: Calibration, metrics: Metrics, links: Links) -> None:
        self.calibration = calibration
        self.links = links
        self.priors: dict[PodId, PodSpeed] = {}
        self._metrics = metrics
        self._clocks: dict[PodId, PrefillClock] = {}
        self._settled = 0
        self._taught_s: dict[str, float] = {}
        self.on_report: Callable[[SpeedReport], None] | None = None
        """Called with each observation of this worker that was used."""

    def clock(self, pod: PodId) -> PrefillClock:
        """The pod's clock."""
        clock = self._clocks.get(pod)
        if clock is None:
            clock = self._clocks[pod] = PrefillClock()
        return clock

    def remove(self, pod: Pod) -> None:
        """It is gone. What it taught its class stays."""
        self._clocks.pop(pod.id, None)
        self.priors.pop(pod.id, None)
        self.calibration.forget(class_key(pod), pod.id)

    def wants_observation(self, pod: Pod, now_s: float) -> bool:
        """Whether its class has not just been learnt from."""
        return now_s - self._taught_s.get(class_key(pod), -inf) >= MIN_INTERVAL_S

    def observe_prefill(self, pod: Pod, seen: PrefillObservation, now_s: float, *, remote: bool = False) -> None:
        """Learn from what the pod computed, unless its class has just been learnt from; `remote`: another worker has
        seen it, and chosen."""
        prior, key = self.priors.get(pod.id), class_key(pod)
        if not remote:
            if not self.wants_observation(pod, now_s):
                return
            self._taught_s[key] = now_s
        if prior is not None:
            self.calibration.observe_prefill(key, pod.id, prior, seen)
        if self.on_report is not None and not remote:
            self.on_report(PrefillReport(pod.id, seen))

    def observe_transfer(
        self, sender: Pod, receiver: Pod, tokens: int, elapsed_ms: float, concurrent: int, *, remote: bool = False
    ) -> None:
        """Learn from so much KV that took so long between them, beside other transfers of the sender."""
        link = self.links.between(sender, receiver)
        if link is not None and tokens:
            kv_bytes = tokens * receiver.kv_bytes_per_token
            self.calibration.observe_transfer(link.kind, link, TransferObservation(kv_bytes, concurrent, elapsed_ms))
        if self.on_report is not None and not remote:
            self.on_report(TransferReport(sender.id, receiver.id, tokens, elapsed_ms, concurrent))

    def compare_ttft(self, model: str, decision: RouteDecision, chosen: Candidate, ttft_ms: float) -> None:
        """Compare a streamed request's time to first token with its price, and with that of the other candidates."""
        self._metrics.observe_ttft(model, expected_ttft_ms(chosen.cost), ttft_ms)
        self._settled += 1
        if self._settled % REGRET_EVERY == 0:
            others = (expected_ttft_ms(one.cost) for one in decision.candidates if one is not chosen)
            self._metrics.observe_regret(model, max(0.0, ttft_ms - min(others, default=ttft_ms)))
