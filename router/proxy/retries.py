"""Is this failure followed by another attempt?

The law of `policy/retry.py` with this router's budget, counted. This file never chooses a candidate.
"""

from __future__ import annotations

import time

from router.errors import UpstreamError
from router.observe.metrics import Metrics
from router.policy.retry import Retry, RetryBudget, law_of


class Retries:
    """One for all requests. `share`: of the requests, how many may be tried again."""

    def __init__(self, share: float, metrics: Metrics) -> None:
        self._budget = RetryBudget(share)
        self._metrics = metrics

    def asked(self) -> None:
        """A request came in."""
        self._budget.asked(time.monotonic())

    def allowed(self, error: UpstreamError, *, bytes_sent: bool) -> bool:
        """May another candidate be tried, if there is one? To be asked once a failure."""
        law, reason = law_of(error, bytes_sent=bytes_sent), type(error).__name__
        allowed = law is Retry.ALWAYS or (law is Retry.IN_BUDGET and self._budget.spend(time.monotonic()))
        if allowed:
            self._metrics.retries.labels(reason).inc()
        elif law is Retry.IN_BUDGET:
            self._metrics.retries_refused.labels(reason).inc()
        return allowed

    def left(self) -> bool:
        """May an answer be thrown away for another candidate's?"""
        left = self._budget.left(time.monotonic())
        if not left:
            self._metrics.retries_refused.labels("status").inc()
        return left
