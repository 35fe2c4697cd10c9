"""Rendering of metrics."""

from __future__ import annotations

import asyncio

import pytest

from router.observe.fast_metrics import dump_metrics
from router.observe.metrics import PIECE_SAMPLES, Metrics
from router.types import FleetSnapshot, PodState, PodStatus
from tests.policy.scenes import pod

pytestmark = pytest.mark.anyio


async def test_rendering_in_turns_gives_the_same_text() -> None:
    """Family by family, in the same order."""
    metrics = Metrics()
    metrics.requests.labels("chat", "demo", "ok").inc()
    metrics.loop_lag_s.labels().observe(0.003)
    metrics.pod_in_flight.replace({(f"pod-{number}",): number for number in range(2 * PIECE_SAMPLES + 1)})
    assert await metrics.render_in_turns() == metrics.render()


async def test_other_tasks_run_while_metrics_are_rendered() -> None:
    """Also for another worker's dump, and in a family with the samples of many pods."""
    turns = 0

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    metrics = Metrics()
    metrics.pod_in_flight.replace({(f"pod-{number}",): 0.0 for number in range(100 * PIECE_SAMPLES)})
    serving = asyncio.create_task(serve())
    await metrics.render_in_turns()
    assert turns > 120
    turns = 0
    await dump_metrics(metrics.registry)
    assert turns > 20
    serving.cancel()


def test_the_series_of_a_pod_leave_with_it() -> None:
    """Also those of results that arrive late."""
    metrics = Metrics()
    fleet = FleetSnapshot(1, tuple(PodStatus(pod(name), PodState.READY) for name in ("stays", "joins")))
    for name in ("stays", "gone"):
        metrics.sent.labels(name, "ok").inc()
        metrics.kv_events.labels(name).inc()
        metrics.kv_stream.labels(name).set(1)
    metrics.observe_fleet(fleet, {}, 0)
    assert b"gone" not in metrics.render()
    metrics.sent.labels("gone", "ok").inc()
    metrics.observe_fleet(fleet, {}, 0)
    text = metrics.render()
    assert b"gone" not in text and b'warmroute_pod_requests_total{pod="stays",result="ok"} 1.0' in text
