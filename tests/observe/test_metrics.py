"""Metrics are exposed whole, however they are rendered."""

from __future__ import annotations

import asyncio

import pytest

from router.observe.metrics import Metrics

pytestmark = pytest.mark.anyio


async def test_rendered_in_turns_it_is_the_same_text() -> None:
    """Family by family, in the same order."""
    metrics = Metrics()
    metrics.requests.labels("chat", "demo", "ok").inc()
    metrics.loop_lag_s.labels().observe(0.003)
    metrics.pod_in_flight.labels("pod-0").set(2)
    assert await metrics.render_in_turns() == metrics.render()


async def test_others_have_their_turn_while_it_is_rendered() -> None:
    """Requests among them."""
    turns = 0

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    await Metrics().render_in_turns()
    serving.cancel()
    assert turns > 20
