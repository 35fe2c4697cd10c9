"""Fast metrics, compared with what `prometheus_client` exposes."""

from __future__ import annotations

import prometheus_client as theirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe import fast_metrics as ours
from router.observe.metrics import Metrics
from router.types import InFlight
from tests.kit.scenes import make_pod, snapshot_of

BOUNDS = (0, 0.5, 1, 10)


def exposed(registry: theirs.CollectorRegistry) -> list[str]:
    """The exposition without creation times."""
    lines = theirs.generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_a_series_exists_from_its_first_use() -> None:
    """A removed series starts again at 0."""
    registry = theirs.CollectorRegistry()
    counter = ours.Counter(registry, ours.counter("sent", "Sent.", "pod result"))
    assert registry.get_sample_value("sent_total", {"pod": "a", "result": "ok"}) is None
    counter.labels("a", "ok").inc(2)
    counter.labels("b", "ok").inc()
    counter.labels("a", "ok").inc()
    assert registry.get_sample_value("sent_total", {"pod": "a", "result": "ok"}) == 3
    counter.remove_where(lambda labels: labels[0] == "a")
    assert registry.get_sample_value("sent_total", {"pod": "a", "result": "ok"}) is None
    assert counter.labels("a", "ok").value == 0
    assert counter.labels("b", "ok").value == 1


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\n']), st.floats(-2, 20) | st.sampled_from(BOUNDS))))
def test_the_exposition_equals_that_of_prometheus_client(seen: list[tuple[str, float]]) -> None:
    """Names, labels, buckets, sums; also for values on a bound."""
    expected, found = theirs.CollectorRegistry(), theirs.CollectorRegistry()
    counters = (
        theirs.Counter("sent", "Sent.", ["pod"], registry=expected),
        ours.Counter(found, ours.counter("sent", "Sent.", "pod")),
    )
    histograms = (
        theirs.Histogram("took", "Took.", ["pod"], buckets=BOUNDS, registry=expected),
        ours.Histogram(found, ours.histogram("took", "Took.", "pod", buckets=BOUNDS)),
    )
    states = (
        theirs.Gauge("state", "Is so.", ["pod"], registry=expected),
        ours.Gauge(found, ours.gauge("state", "Is so.", "pod")),
    )
    states[1].replace({("gone",): 1.0})
    states[1].replace({(pod,): value for pod, value in seen})
    for pod, value in seen:
        states[0].labels(pod).set(value)
        for counter in counters:
            counter.labels(pod).inc(abs(value))
        for histogram in histograms:
            histogram.labels(pod).observe(value)
    assert exposed(found) == exposed(expected)


# --- the text ---

FLEET = snapshot_of(make_pod())


def test_the_text_is_that_of_prometheus_client() -> None:
    """Byte for byte."""
    metrics = Metrics()
    metrics.requests.labels("chat", "m", "ok").inc(2)
    metrics.ttft_s.labels("m", "chat", "p").observe(0.1)
    metrics.observe_fleet(FLEET, {"a": InFlight(1)}, 7)
    assert metrics.render() == theirs.generate_latest(metrics.registry)


def test_the_number_of_series_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further label values are counted together."""
    monkeypatch.setattr(ours, "MAX_SERIES", 3)
    counter = ours.Counter(theirs.CollectorRegistry(), ours.counter("sent", "Sent.", "pod result"))
    for pod in "abcdef":
        counter.labels(pod, "ok").inc()
    values = {values: child.value for values, child in counter.children.items()}
    assert values == {("a", "ok"): 1, ("b", "ok"): 1, ("c", "ok"): 1, (ours.OTHER, ours.OTHER): 3}
