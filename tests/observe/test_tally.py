"""Counting cheaply, against what `prometheus_client` would expose."""

from __future__ import annotations

import prometheus_client as theirs
from hypothesis import given
from hypothesis import strategies as st

from router.observe import tally as ours

BOUNDS = (0, 0.5, 1, 10)


def exposed(registry: theirs.CollectorRegistry) -> list[str]:
    """The exposition, without the times at which things began."""
    lines = theirs.generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(-2, 20) | st.sampled_from(BOUNDS)), max_size=5))
def test_rows_are_as_if_each_value_was_added_alone(rows: list[dict[str, float]]) -> None:
    """However many are held when somebody reads, and only to what they name."""
    expected, found = theirs.CollectorRegistry(), theirs.CollectorRegistry()
    alone = ours.Histogram("took", "Took.", ["phase"], buckets=BOUNDS, registry=expected)
    together = ours.RowHistogram("took", "Took.", "phase", "ab", buckets=BOUNDS, registry=found)
    alone.labels("a"), alone.labels("b")
    for row in rows * ours.MOST_ROWS:
        together.observe_row(row)
        for phase, value in row.items():
            alone.labels(phase).observe(value)
    assert exposed(found) == exposed(expected)
    assert exposed(found) == exposed(expected)


def test_a_series_is_there_from_when_it_is_first_asked_for() -> None:
    """With a call or without, it is the same one; what is not counted any more begins anew."""
    registry = theirs.CollectorRegistry()
    counter = ours.Counter("sent", "Sent.", ["pod", "result"], registry=registry)
    assert registry.get_sample_value("sent_total", {"pod": "a", "result": "ok"}) is None
    counter.of["a", "ok"].value += 2
    counter.labels("a", "ok").inc()
    assert registry.get_sample_value("sent_total", {"pod": "a", "result": "ok"}) == 3
    counter.remove("a", "ok")
    assert counter.labels("a", "ok").value == 0


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\n']), st.floats(-2, 20) | st.sampled_from(BOUNDS))))
def test_what_is_exposed_is_what_prometheus_client_would_expose(seen: list[tuple[str, float]]) -> None:
    """Names, labels, buckets, sums; values on a bound too."""
    expected, found = theirs.CollectorRegistry(), theirs.CollectorRegistry()
    counters = (
        theirs.Counter("sent", "Sent.", ["pod"], registry=expected),
        ours.Counter("sent", "Sent.", ["pod"], registry=found),
    )
    histograms = (
        theirs.Histogram("took", "Took.", ["pod"], buckets=BOUNDS, registry=expected),
        ours.Histogram("took", "Took.", ["pod"], buckets=BOUNDS, registry=found),
    )
    states = (
        theirs.Gauge("state", "Is so.", ["pod"], registry=expected),
        ours.Readings("state", "Is so.", ["pod"], registry=found),
    )
    states[1].take({("gone",): 1.0})
    states[1].take({(pod,): value for pod, value in seen})
    for pod, value in seen:
        states[0].labels(pod).set(value)
        for counter in counters:
            counter.labels(pod).inc(abs(value))
        for histogram in histograms:
            histogram.labels(pod).observe(value)
    assert exposed(found) == exposed(expected)
