"""The histograms of the seven phases of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_not, methodcaller

from prometheus_client import CollectorRegistry

from router.observe.declared import of_requests
from router.observe.fast_metrics import Histogram
from router.phases import PHASES

_IS_PRESENT = partial(is_not, None)


class PhaseMetrics(Histogram):
    """The histograms of all phases."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, of_requests.PHASE_S)
        for phase in PHASES:
            self.labels(phase)

    def add_all(self, taken_s: Sequence[Mapping[str, float]]) -> None:
        """Add the seconds of many requests, each by phase."""
        for phase in PHASES:
            self.labels(phase).observe_all([*filter(_IS_PRESENT, map(methodcaller("get", phase), taken_s))])
