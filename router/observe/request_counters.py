"""Makes metrics of what is counted while requests are served."""

from __future__ import annotations

from router.observe.counters import Counters
from router.observe.metrics import Metrics
from router.types import PodId


class RequestCounters(Counters):
    """The `Counters` of `request/` over the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def in_flight(self, more: int) -> None:
        self._metrics.in_flight.value += more

    def match_degraded(self, model: str) -> None:
        self._metrics.degraded_matches.labels(model).inc()

    def attempt_ended(self, pod: PodId, result: str) -> None:
        self._metrics.sent.labels(pod, result).value += 1

    def retried(self, reason: str) -> None:
        self._metrics.retries.labels(reason).inc()

    def retry_refused(self, reason: str) -> None:
        self._metrics.retries_refused.labels(reason).inc()

    def token_gap(self, model: str, workload: str, gap_s: float) -> None:
        self._metrics.inter_token_s.labels(model, workload).observe(gap_s)

    def queue_left(self, model: str, waited_s: float) -> None:
        self._metrics.queue_s.labels(model).observe(waited_s)

    def queue_refused(self, model: str, reason: str) -> None:
        self._metrics.queue_refused.labels(model, reason).inc()

    def queue_learnt(self, model: str, error_share: float, rest_ms: float) -> None:
        self._metrics.queue_error.labels(model).set(error_share)
        self._metrics.queue_rest_s.labels(model).set(rest_ms / 1000)
