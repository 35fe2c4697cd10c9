"""Rendering of metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.fleet.scaling import PoolKey, PoolSignals, Resource
from router.observe.declared import of_pods, of_process, of_requests
from router.observe.fast_metrics import PIECE_SAMPLES
from router.observe.metrics import KNOWN_STATES, Metrics, replace_pools
from router.types import FleetSnapshot, InFlight, PodLoad, PodSpeed, PodState, PodStatus
from tests.bench.metrics_bench import MAX_BODY_BYTES, render
from tests.kit.scenes import pod, snapshot_of

pytestmark = pytest.mark.anyio


async def test_rendering_in_turns_gives_the_same_text() -> None:
    """Family by family, in the same order."""
    metrics = Metrics()
    metrics.requests.labels("chat", "demo", "ok").inc()
    metrics[of_process.LOOP_LAG_S].labels().observe(0.003)
    metrics[of_pods.POD_IN_FLIGHT].replace({(f"pod-{number}",): number for number in range(2 * PIECE_SAMPLES + 1)})
    assert await metrics.render_in_turns() == metrics.render()


async def test_other_tasks_run_while_metrics_are_rendered() -> None:
    """Also in a family with the samples of many pods."""
    turns = 0

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    metrics = Metrics()
    metrics[of_pods.POD_IN_FLIGHT].replace({(f"pod-{number}",): 0.0 for number in range(100 * PIECE_SAMPLES)})
    serving = asyncio.create_task(serve())
    await metrics.render_in_turns()
    assert turns > 120
    serving.cancel()


def test_metrics_of_a_large_router_are_bounded() -> None:
    """500 pods, 50 tenants, all combinations of labels that can occur: in small pieces, below 3 MB."""
    text, turns_ms = render()
    assert text.count(b"\nwarmroute_pod_state{") == 500 * len(KNOWN_STATES)
    assert 1_000_000 < len(text) < MAX_BODY_BYTES
    assert len(turns_ms) > 20_000 / PIECE_SAMPLES


def test_the_series_of_a_pod_leave_with_it() -> None:
    """Also those of results that arrive late."""
    metrics = Metrics()
    fleet = snapshot_of(pod("stays"), pod("joins"))
    for name in ("stays", "gone"):
        metrics.sent.labels(name, "ok").inc()
        metrics.kv.events.labels(name).inc()
        metrics.kv.complete.labels(name).set(1)
        metrics.pod_ttft_s.labels(name).observe(0.2)
        metrics[of_pods.EJECTIONS_REFUSED].labels(name).inc()
    metrics.observe_fleet(fleet, {}, 0)
    assert b"gone" not in metrics.render()
    metrics.sent.labels("gone", "ok").inc()
    metrics.observe_fleet(fleet, {}, 0)
    text = metrics.render()
    assert b"gone" not in text and b'warmroute_pod_requests_total{pod="stays",result="ok"} 1.0' in text


def test_what_a_queue_has_learnt_is_in_seconds() -> None:
    metrics = Metrics()
    metrics.queue_learnt("m", 0.25, 40.0)
    assert metrics[of_requests.QUEUE_ERROR].labels("m").value == 0.25
    assert metrics[of_requests.QUEUE_REST_S].labels("m").value == 0.04


def test_every_state_of_a_pod_is_a_series() -> None:
    """1 for the current one, 0 for the others, so that an alert can count."""
    metrics = Metrics()
    metrics.observe_fleet(FleetSnapshot(1, (PodStatus(pod("a"), PodState.EJECTED),)), {}, 0)
    found = {
        (sample.labels["state"], sample.value)
        for family in metrics[of_pods.POD_STATE].collect()
        for sample in family.samples
    }
    assert found == {("joining", 0.0), ("ready", 0.0), ("draining", 0.0), ("ejected", 1.0)}
    trusts = [sample.value for family in metrics[of_pods.POD_TRUST].collect() for sample in family.samples]
    assert sorted(trusts) == [0.0, 0.0, 1.0]


def test_the_scraped_load_of_a_pod() -> None:
    """With its age. A pod that was never scraped has no series."""
    metrics = Metrics()
    load = PodLoad(running=3, waiting=2, kv_usage=0.25, scraped_at_s=90.0)
    pods = (PodStatus(pod("a"), PodState.READY, load), PodStatus(pod("new"), PodState.READY))
    metrics.observe_loads(FleetSnapshot(1, pods), now_s=100.0)
    lines = metrics.render().decode().splitlines()
    assert {
        'warmroute_pod_running_requests{pod="a"} 3.0',
        'warmroute_pod_waiting_requests{pod="a"} 2.0',
        'warmroute_pod_kv_usage_ratio{pod="a"} 0.25',
        'warmroute_pod_load_age_seconds{pod="a"} 10.0',
    } <= set(lines)
    assert not [line for line in lines if line.startswith("warmroute_pod_load_age_seconds{") and "new" in line]


def test_the_need_of_a_pool_and_what_is_unknown_of_it() -> None:
    """A value that is not known has no series, also where there was one; never a 0."""
    metrics, key = Metrics(), PoolKey("p", "m", "both")
    known = PoolSignals(
        key=key,
        ready_replicas=2,
        running=3.0,
        kv_free_tokens=4.0,
        queued_tokens=5,
        backlog_s=6.0,
        prefill_load=0.5,
        desired_replicas={Resource.PREFILL: 1.0, Resource.KV_CACHE: 1.5},
    )
    unknown = replace(known, running=None, kv_free_tokens=None, desired_replicas={})
    needs = 'warmroute_pool_desired_replicas{model="m",pool="p",resource="kv_cache",role="both"}'
    by_pods = ("ready_replicas", 2.0), ("running_requests", 3.0), ("kv_free_tokens", 4.0), ("saturation_ratio", 0.75)
    by_us = ("queued_prompt_tokens", 5.0), ("prefill_backlog_seconds", 6.0), ("prefill_load_ratio", 0.5)
    for seen, blind in ((known, False), (unknown, True)):
        replace_pools(metrics.registry, [seen])
        series = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line[0] != "#")
        assert series.get(needs) == (None if blind else "1.5")
        for name, value in (*by_pods, *by_us):
            is_unknown = blind and name in ("running_requests", "kv_free_tokens", "saturation_ratio")
            shown = series.get(f'warmroute_pool_{name}{{model="m",pool="p",role="both"}}')
            assert shown == (None if is_unknown else str(value)), name


def test_tokens_that_were_evicted_too_soon_are_priced_by_the_speed_of_their_time() -> None:
    """So that the counter never falls."""
    metrics = Metrics()
    for tokens, ms_per_token in ((1000.0, 0.1), (1500.0, 0.2)):
        status = PodStatus(replace(pod("a"), speed=PodSpeed(5.0, ms_per_token, 0.0)), PodState.READY)
        metrics.observe_evicted({"m": tokens}, FleetSnapshot(1, (status,)))
    value = metrics.registry.get_sample_value
    assert value("warmroute_evicted_soon_tokens_total", {"model": "m"}) == 1500
    assert value("warmroute_evicted_soon_recompute_seconds_total", {"model": "m"}) == pytest.approx(0.1 + 0.1)


def test_ejections_are_counted_and_pods_described() -> None:
    """A restart in the same state is no ejection. A pod without one has a 0, so that rates see the first one."""
    metrics = Metrics()
    one = pod("a")
    metrics.observe_change(one, PodState.READY, PodState.EJECTED)
    metrics.observe_change(one, PodState.EJECTED, PodState.EJECTED)
    metrics.observe_change(one, PodState.EJECTED, PodState.READY)
    pods = (PodStatus(one, PodState.READY), PodStatus(pod("b"), PodState.READY))
    metrics.observe_fleet(FleetSnapshot(1, pods), {"a": InFlight(2, pulls=1)}, 0)
    lines = metrics.render().decode().splitlines()
    assert 'warmroute_ejections_total{pod="a"} 1.0' in lines
    assert {'warmroute_pod_restarts_total{pod="a"} 1.0', 'warmroute_pod_restarts_total{pod="b"} 0.0'} <= set(lines)
    assert 'warmroute_pod_info{engine="vllm",model="m",pod="a",role="both",version=""} 1.0' in lines
    assert 'warmroute_pod_transfers{pod="a"} 1.0' in lines
