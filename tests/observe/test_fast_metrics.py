"""Fast metrics, compared with what `prometheus_client` exposes, and merged over several workers."""

from __future__ import annotations

import re

import prometheus_client as theirs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.observe.worker_metrics import dump_metrics

from router.observe import fast_metrics as ours
from router.observe.declared import declaration as declared
from router.observe.metrics import Metrics
from router.observe.process_metrics import add_process_metrics
from router.types import FleetSnapshot, InFlight, Pod, PodSpeed, PodState, PodStatus

BOUNDS = (0, 0.5, 1, 10)


def exposed(registry: theirs.CollectorRegistry) -> list[str]:
    """The exposition without creation times."""
    lines = theirs.generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_a_series_exists_from_its_first_use() -> None:
    """A removed series starts again at 0."""
    registry = theirs.CollectorRegistry()
    counter = ours.Counter(registry, declared.counter("sent", "Sent.", "pod result"))
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
        ours.Counter(found, declared.counter("sent", "Sent.", "pod")),
    )
    histograms = (
        theirs.Histogram("took", "Took.", ["pod"], buckets=BOUNDS, registry=expected),
        ours.Histogram(found, declared.histogram("took", "Took.", "pod", buckets=BOUNDS)),
    )
    states = (
        theirs.Gauge("state", "Is so.", ["pod"], registry=expected),
        ours.Gauge(found, declared.gauge("state", "Is so.", "pod")),
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


@given(st.lists(st.floats(-2, 20) | st.sampled_from(BOUNDS)))
def test_values_that_are_added_at_once_count_the_same(values: list[float]) -> None:
    """The sum up to rounding."""
    one_by_one, at_once = ours.Buckets(BOUNDS), ours.Buckets(BOUNDS)
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values)
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(one_by_one.total)


# --- several workers ---

FLEET = FleetSnapshot(
    1, (PodStatus(Pod(id="a", url="http://a", engine="vllm", speed=PodSpeed(1.0, 1.0, 0.0)), PodState.READY),)
)


def lines(text: bytes) -> set[str]:
    return set(text.decode().splitlines())


def worker(requests: int, took_s: float, leases: int, *, complete: bool = True, events: int = 5) -> Metrics:
    """A worker that served this many requests and sees the shared fleet."""
    metrics = Metrics()
    metrics.requests.labels("chat", "m", "ok").inc(requests)
    metrics.ttft_s.labels("m", "chat", "p").observe(took_s)
    metrics.observe_fleet(FLEET, {"a": InFlight(leases)}, 7)
    metrics.kv.complete.labels("a").set(complete)
    metrics.kv.events.labels("a").inc(events)
    metrics.prompt_cache_bytes.replace({("m",): 100.0 * requests})
    return metrics


@pytest.mark.anyio
async def test_counters_and_buckets_are_added() -> None:
    """Also series that only another worker has."""
    one, two = worker(2, 0.004, 0), worker(3, 0.3, 0)
    two.retries.labels("connect_failed").inc()
    found = lines(one.render([await dump_metrics(two.registry)]))
    assert found >= {
        'warmroute_requests_total{endpoint="chat",model="m",result="ok"} 5.0',
        'warmroute_retries_total{reason="connect_failed"} 1.0',
        'warmroute_time_to_first_token_seconds_bucket{class="chat",le="0.005",model="m",policy="p"} 1.0',
        'warmroute_time_to_first_token_seconds_bucket{class="chat",le="0.5",model="m",policy="p"} 2.0',
        'warmroute_time_to_first_token_seconds_count{class="chat",model="m",policy="p"} 2.0',
        'warmroute_time_to_first_token_seconds_sum{class="chat",model="m",policy="p"} 0.304',
    }


@pytest.mark.anyio
async def test_own_gauges_are_added_and_shared_ones_are_not() -> None:
    """Leases and prompt caches belong to one worker; states, blocks and KV events to the shared fleet."""
    one, two = worker(1, 1.0, 2, events=3), worker(2, 1.0, 3, complete=False)
    found = lines(one.render([await dump_metrics(two.registry)]))
    assert found >= {
        'warmroute_pod_in_flight_requests{pod="a"} 5.0',
        'warmroute_pod_state{pod="a",state="ready"} 1.0',
        'warmroute_pod_state{pod="a",state="ejected"} 0.0',
        "warmroute_index_block_holders 7.0",
        'warmroute_prompt_cache_bytes{model="m"} 300.0',
        'warmroute_kv_events_total{pod="a"} 5.0',
        'warmroute_kv_stream_complete{pod="a"} 0.0',
    }


@pytest.mark.anyio
async def test_each_worker_has_its_own_process_series() -> None:
    """CPU seconds of two processes, not their sum: one worker may use a whole core while the other is idle."""
    one, two = worker(0, 1.0, 0), worker(0, 1.0, 0)
    for number, metrics in enumerate((one, two)):
        add_process_metrics(metrics.registry, number)
    text = one.render([await dump_metrics(two.registry)]).decode()
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes"):
        assert sorted(re.findall(rf'^{name}{{worker="(.)"}} \d', text, re.MULTILINE)) == ["0", "1"]
    assert text.count("warmroute_build_info{") == 1


def test_a_single_worker_has_the_usual_text() -> None:
    """Byte for byte that of `prometheus_client`."""
    metrics = worker(2, 0.1, 1)
    assert metrics.render([]) == theirs.generate_latest(metrics.registry)


def test_an_invalid_dump_is_refused() -> None:
    """For example of a worker of another version."""
    with pytest.raises(ValueError):
        Metrics().render([b"\xc1"])


def test_the_number_of_series_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further label values are counted together."""
    monkeypatch.setattr(ours, "MAX_SERIES", 3)
    counter = ours.Counter(theirs.CollectorRegistry(), declared.counter("sent", "Sent.", "pod result"))
    for pod in "abcdef":
        counter.labels(pod, "ok").inc()
    values = {values: child.value for values, child in counter._children.items()}
    assert values == {("a", "ok"): 1, ("b", "ok"): 1, ("c", "ok"): 1, (ours.OTHER, ours.OTHER): 3}
