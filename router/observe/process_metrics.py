"""Metrics of the process: versions, CPU, memory, open files."""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from router import __version__
from router.observe.declared import of_process
from router.observe.fast_metrics import Gauge


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add `warmroute_build_info` and `process_*`. There are none of the latter without /proc."""
    info = Gauge(registry, of_process.BUILD_INFO)
    info.replace({(__version__, platform.python_version()): 1.0})
    ProcessCollector(registry=registry)
