"""Both /metrics pages follow the naming conventions of Prometheus."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.observe.metrics import Metrics, add_process_metrics
from router.publisher.publisher_app import PublisherMetrics

RESERVED_SUFFIXES = ("_total", "_count", "_sum", "_bucket")
NOT_BASE_UNITS = re.compile(r"_(ms|millis\w*|micros\w*|minutes|hours|kb|mb|gb|kib|mib|gib|percent|s|sec)(_|$)")
OF_HISTOGRAMS = ("_seconds", "_ratio", "_tokens_error", "_tokens")
"""Ends of their names: the unit. The error in tokens has the end of its counters `cached_tokens_*`."""


def of_router() -> CollectorRegistry:
    """The registry of a router."""
    metrics = Metrics()
    add_process_metrics(metrics.registry)
    return metrics.registry


@pytest.fixture(params=["router", "publisher"])
def page(request: pytest.FixtureRequest) -> str:
    """The text of all families, most of them without samples."""
    registry = of_router() if request.param == "router" else PublisherMetrics().registry
    return generate_latest(registry).decode()


def families(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))


def test_no_family_occurs_twice(page: str) -> None:
    """Prometheus refuses such a page."""
    declared = Counter(line.split()[2] for line in page.splitlines() if line.startswith("# TYPE "))
    assert declared and max(declared.values()) == 1


def test_every_family_has_a_help_text(page: str) -> None:
    """One sentence."""
    assert not [family.name for family in families(page) if not family.documentation.endswith(".")]


def test_counters_and_no_others_end_with_total(page: str) -> None:
    """The names of counters are followed by `_total`; other names end like no sample of another type."""
    types = {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE ")}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types.items())
    assert not [name for name, kind in types.items() if kind != "counter" and name.endswith(RESERVED_SUFFIXES)]


def test_units_are_base_units(page: str) -> None:
    """Seconds, bytes and ratios; never milliseconds or percent."""
    assert not [family.name for family in families(page) if NOT_BASE_UNITS.search(family.name)]
    histograms = [family.name for family in families(page) if family.type == "histogram"]
    assert not [name for name in histograms if not name.endswith(OF_HISTOGRAMS)]


def test_gauges_that_are_always_one_end_with_info() -> None:
    """Their labels are the information."""
    [build] = [family for family in families(generate_latest(of_router()).decode()) if "build" in family.name]
    [sample] = build.samples
    assert (sample.name, sample.value) == ("warmroute_build_info", 1.0)
    assert sample.labels.keys() == {"version", "python_version"}


def test_the_process_is_measured(page: str) -> None:
    """With the names of every Prometheus client."""
    names = {family.name for family in families(page)}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= names


def test_a_publisher_exports_no_family_of_requests() -> None:
    """Only holders, pods and itself."""
    names = {family.name for family in families(generate_latest(PublisherMetrics().registry).decode())}
    of_pods = {"warmroute_kv_events", "warmroute_kv_stream_gaps", "warmroute_kv_stream_complete", "warmroute_pod_state"}
    assert all(re.match("warmroute_publisher_|warmroute_build_info|process_", name) for name in names - of_pods)


def test_what_only_grows_is_a_counter() -> None:
    """Otherwise `rate()` would be wrong after a restart."""
    pages = [generate_latest(registry).decode() for registry in (of_router(), PublisherMetrics().registry)]
    counters = {family.name for page in pages for family in families(page) if family.type == "counter"}
    assert {
        "warmroute_index_holders_read",
        "warmroute_index_dropped_blocks",
        "warmroute_discovery_resync_differences",
        "warmroute_publisher_written_blocks",
        "warmroute_publisher_reloads",
        "warmroute_publisher_orphans",
    } <= counters
