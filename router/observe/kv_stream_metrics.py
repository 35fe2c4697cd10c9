"""Metrics of the KV event streams of pods, of routers and publishers."""

from __future__ import annotations

from collections.abc import Container

from prometheus_client import CollectorRegistry

from router.observe.fast_metrics import Counter, Gauge
from router.types import PodId


class KvStreamMetrics:
    """Applied events, and whether the stream is complete, by pod."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.events = Counter(r, "warmroute_kv_events", "Applied KV events, by pod.", "pod")
        self.complete = Gauge(
            r, "warmroute_kv_stream_complete", "1 while the KV event stream of a pod has no gap, else 0.", "pod"
        )

    def keep(self, pods: Container[PodId]) -> None:
        """Remove the series of all other pods."""
        for metric in (self.events, self.complete):
            metric.remove_where(lambda labels: labels[0] not in pods)
