"""Metrics of the process: versions, CPU, memory, open files."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from router import __version__
from router.observe.declared import of_process
from router.observe.fast_metrics import Gauge


def add_process_metrics(registry: CollectorRegistry, worker: int | None = None) -> None:
    """Add `warmroute_build_info` and `process_*`. `worker`: number of this process if there are several."""
    info = Gauge(registry, of_process.BUILD_INFO)
    info.replace({(__version__, platform.python_version()): 1.0})
    registry.register(_ProcessMetrics({} if worker is None else {"worker": str(worker)}))


class _ProcessMetrics(Collector):
    """prometheus_client's families of this process, with more labels. There are none without /proc."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        for family in self._process.collect():
            family.samples = [sample._replace(labels=sample.labels | self._labels) for sample in family.samples]
            yield family
