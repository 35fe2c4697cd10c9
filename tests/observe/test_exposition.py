"""The two text formats of `/metrics`, and which one a scraper gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as plain_families

from router.observe.fast_metrics import OPEN_METRICS, PLAIN, accepted_format
from router.observe.metrics import Metrics
from tests.bench.metrics_bench import MAX_BODY_BYTES, full_metrics, render

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def openmetrics_families(text: str) -> Iterator[Metric]:
    """By the strict parser."""
    return openmetrics_parser.text_string_to_metric_families(text)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text; version=0.0.1",
        ",;=,q",
    ],
)
def test_a_plain_scraper_gets_the_plain_format(accept: str) -> None:
    assert accepted_format(accept) is PLAIN


@pytest.mark.parametrize("accept", [PROMETHEUS_2, "Application/OpenMetrics-Text", "application/openmetrics-text;q=.1"])
def test_a_scraper_that_asks_for_openmetrics_gets_it(accept: str) -> None:
    assert accepted_format(accept) is OPEN_METRICS


def test_both_formats_have_the_same_series() -> None:
    """The second is valid for the strict parser, and ends once."""
    metrics = full_metrics()
    text = metrics.render(text_format=OPEN_METRICS).decode()
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    plain = metrics.render().decode()
    found, expected = (
        {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}
        for families in (openmetrics_families(text), plain_families(plain))
    )
    assert found == expected and len(found) > 10_000
    assert "trace_id" not in plain


def test_a_latency_has_the_latest_recorded_trace_of_each_bucket() -> None:
    """At most one for each bucket; a request whose trace is not recorded leaves none."""
    metrics = Metrics()
    seconds = metrics.ttft_s.labels("m", "chat", "p")
    for value, trace_id in [(0.4, "a" * 32), (0.3, "b" * 32), (0.3, ""), (1000.0, "c" * 32)]:
        seconds.observe(value, trace_id)
    families = openmetrics_families(metrics.render(text_format=OPEN_METRICS).decode())
    samples = [(one.labels.get("le"), one.exemplar) for family in families for one in family.samples]
    found = [(bound, one.labels["trace_id"][0], one.value) for bound, one in samples if one]
    assert found == [("0.5", "b", 0.3), ("+Inf", "c", 1000.0)]


def test_a_large_router_is_bounded_with_all_exemplars() -> None:
    text, _ = render(OPEN_METRICS)
    assert 1_000_000 < len(text) < MAX_BODY_BYTES
