"""An autoscaler's view of a fleet under load, at rest, and while loads are unknown."""

from __future__ import annotations

import asyncio
from math import ceil

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

REQUESTS = 24
TIGHT = {"time_scale": 1.0, "num_blocks": 512, "max_model_len": 4096}
"""Engines in real time, whose KV cache a few chats fill."""
POOL = {"pool": "p", "model": "demo", "role": "both"}


async def signals(deployment: Deployment) -> dict[str, dict[str, float]]:
    """Values of the pool's metrics, by name and resource."""
    page = (await deployment.admin.get("/metrics")).text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("warmroute_pool_"):
                assert POOL.items() <= sample.labels.items()
                found.setdefault(sample.name, {})[sample.labels.get("resource", "")] = sample.value
    return found


def desired_of(page: dict[str, dict[str, float]]) -> float | None:
    """What the autoscaler reads; None without series."""
    found = page.get("warmroute_pool_desired_replicas")
    return max(found.values()) if found else None


async def desired(deployment: Deployment) -> float | None:
    return desired_of(await signals(deployment))


async def test_desired_replicas_follow_the_load_and_are_absent_while_it_is_unknown(deploy: Deploy) -> None:
    """More chats than two caches hold need more than two replicas; without chats the minimum is enough. While no load
    can be scraped, ready pods have no number instead of 0."""
    async with deploy(pods=2, engine=TIGHT, reach=lambda engine: {"url": engine.url, "pool": "p"}) as deployment:

        async def needs(replicas: int) -> bool:
            found = await desired(deployment)
            return found is not None and max(ceil(found), 1) == replicas

        busy: dict[str, dict[str, float]] = {}

        async def needs_more_than_it_has() -> bool:
            busy.update(await signals(deployment))
            return (desired_of(busy) or 0.0) > 2 and busy["warmroute_pool_running_requests"][""] > 0

        async def is_unknown() -> bool:
            return await desired(deployment) is None

        await deployment.until(lambda: needs(1))
        chats = [
            asyncio.create_task(deployment.chat(opening(f"{number} birds"), max_tokens=1000))
            for number in range(REQUESTS)
        ]
        await deployment.until(needs_more_than_it_has)
        assert busy["warmroute_pool_saturation_ratio"][""] == 1.0
        for chat in chats:
            chat.cancel()
        await asyncio.wait(chats)
        await deployment.until(lambda: needs(1))
        rest = await signals(deployment)
        assert rest["warmroute_pool_desired_replicas"]["kv_cache"] == 0
        assert rest["warmroute_pool_queued_prompt_tokens"][""] == 0
        assert rest["warmroute_pool_kv_free_tokens"][""] > 0

        for engine in deployment.engines:
            engine.inject(Fault(kind=FaultKind.NO_METRICS, count=None))
        await deployment.until(is_unknown)
        blind = await signals(deployment)
        assert blind["warmroute_pool_ready_replicas"][""] == 2
        assert not {name for name in blind if name.endswith(("running_requests", "kv_free_tokens", "saturation_ratio"))}
        for engine in deployment.engines:
            await engine.heal()
        await deployment.until(lambda: needs(1))
