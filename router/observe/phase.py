"""The histograms of the seven phases of a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import is_not, methodcaller

from prometheus_client import CollectorRegistry

from router.observe.declared import of_requests
from router.observe.fast_metrics import Histogram, Labels, Numbers
from router.phases import PHASES

COUNTED_AT_ONCE = 64
"""Requests whose times are added to the histograms together."""
_IS_PRESENT = partial(is_not, None)


class PhaseMetrics(Histogram):
    """The histograms of all phases."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, of_requests.PHASE_S)
        self._waiting: list[Mapping[str, float]] = []
        for phase in PHASES:
            self.labels(phase)

    def add(self, taken_s: Mapping[str, float]) -> None:
        """Add the seconds of one request by phase; the mapping must not change any more."""
        self._waiting.append(taken_s)
        if len(self._waiting) >= COUNTED_AT_ONCE:
            self._count()

    def series(self) -> dict[Labels, Numbers]:
        self._count()
        return super().series()

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        for phase in PHASES:
            self.labels(phase).observe_all([*filter(_IS_PRESENT, map(methodcaller("get", phase), waiting))])
