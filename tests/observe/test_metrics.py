"""Metrics are exposed whole, however they are rendered."""

from __future__ import annotations

import asyncio

import pytest

from router.observe.metrics import PIECE_SAMPLES, Metrics
from router.observe.metrics_merge import dump_metrics

pytestmark = pytest.mark.anyio


async def test_rendered_in_turns_it_is_the_same_text() -> None:
    """Family by family, in the same order."""
    metrics = Metrics()
    metrics.requests.labels("chat", "demo", "ok").inc()
    metrics.loop_lag_s.labels().observe(0.003)
    metrics.pod_in_flight.replace({(f"pod-{number}",): number for number in range(2 * PIECE_SAMPLES + 1)})
    assert await metrics.render_in_turns() == metrics.render()


async def test_others_have_their_turn_while_it_is_rendered() -> None:
    """Requests among them; also where another worker asks for it, and where a family has a hundred pods' samples."""
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
