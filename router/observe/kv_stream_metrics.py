"""Metrics of the KV event streams of pods, of routers and publishers."""

from __future__ import annotations

from collections.abc import Container

from prometheus_client import CollectorRegistry

from router.observe.declared import of_pods
from router.observe.fast_metrics import Counter, Gauge
from router.types import PodId


class KvStreamMetrics:
    """Applied events, and whether the stream is complete, by pod."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.events = Counter(r, of_pods.KV_EVENTS)
        self.gaps = Counter(r, of_pods.KV_GAPS)
        self.complete = Gauge(r, of_pods.KV_STREAM_COMPLETE)

    def keep(self, pods: Container[PodId]) -> None:
        """Remove the series of all other pods."""
        for metric in (self.events, self.gaps, self.complete):
            metric.remove_where(lambda labels: labels[0] not in pods)
