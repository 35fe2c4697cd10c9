"""Merged metrics of several workers."""

from __future__ import annotations

import pytest

from router.observe.metrics import Metrics
from router.observe.metrics_merge import dump_metrics, merge_metrics
from router.types import FleetSnapshot, InFlight, Pod, PodSpeed, PodState, PodStatus

pytestmark = pytest.mark.anyio

FLEET = FleetSnapshot(
    1, (PodStatus(Pod(id="a", url="http://a", engine="vllm", speed=PodSpeed(1.0, 1.0, 0.0)), PodState.READY),)
)


def lines(text: bytes) -> set[str]:
    return set(text.decode().splitlines())


def worker(requests: int, took_s: float, leases: int, *, complete: bool = True) -> Metrics:
    """A worker that served this many requests and sees the shared fleet."""
    metrics = Metrics()
    metrics.requests.labels("chat", "m", "ok").inc(requests)
    metrics.ttft_s.labels("m").observe(took_s)
    metrics.observe_fleet(FLEET, {"a": InFlight(leases)}, 7)
    metrics.kv_stream.labels("a").set(complete)
    metrics.kv_events.labels("a").inc(5)
    return metrics


async def test_counters_and_buckets_are_added() -> None:
    """Also series that only another worker has."""
    one, two = worker(2, 0.004, 0), worker(3, 0.3, 0)
    two.retries.labels("ConnectFailed").inc()
    found = lines(one.render(merge_metrics(one.registry, [await dump_metrics(two.registry)])))
    assert found >= {
        'warmroute_requests_total{endpoint="chat",model="m",result="ok"} 5.0',
        'warmroute_retries_total{reason="ConnectFailed"} 1.0',
        'warmroute_time_to_first_token_seconds_bucket{le="0.005",model="m"} 1.0',
        'warmroute_time_to_first_token_seconds_bucket{le="0.5",model="m"} 2.0',
        'warmroute_time_to_first_token_seconds_count{model="m"} 2.0',
        'warmroute_time_to_first_token_seconds_sum{model="m"} 0.304',
    }


async def test_own_gauges_are_added_and_shared_ones_are_not() -> None:
    """Leases belong to one worker; states, blocks and KV events to the shared fleet."""
    one, two = worker(0, 1.0, 2), worker(0, 1.0, 3, complete=False)
    found = lines(one.render(merge_metrics(one.registry, [await dump_metrics(two.registry)])))
    assert found >= {
        'warmroute_pod_in_flight_requests{pod="a"} 5.0',
        'warmroute_pod_state{pod="a",state="ready"} 1.0',
        "warmroute_index_block_holders 7.0",
        'warmroute_kv_events_total{pod="a"} 5.0',
        'warmroute_kv_stream_complete{pod="a"} 0.0',
    }


def test_a_single_worker_has_the_usual_text() -> None:
    """Byte for byte."""
    metrics = worker(2, 0.1, 1)
    assert metrics.render(merge_metrics(metrics.registry, [])) == metrics.render()


def test_an_invalid_dump_is_refused() -> None:
    """For example of a worker of another version."""
    with pytest.raises(ValueError):
        merge_metrics(Metrics().registry, [b"\xc1"])
