"""Pods whose health checks time out: those that send anything else stay ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PROBES = {"health_timeout_s": 0.3, "load_timeout_s": 0.3}
LATE = "3 health checks in a row failed"


def hang(deployment: Deployment, *kinds: FaultKind) -> None:
    for engine in deployment.engines:
        for kind in kinds:
            engine.inject(Fault(kind=kind, count=None, then="hang"))


@asynccontextmanager
async def streaming(deployment: Deployment) -> AsyncIterator[None]:
    """A long answer runs on each pod."""
    body = {"model": "demo", "max_tokens": 5000, "stream": True}
    asked = [
        asyncio.create_task(
            deployment.client.post("/v1/chat/completions", json={**body, "messages": opening(f"seas {n}")})
        )
        for n in range(8)
    ]
    await deployment.until(lambda: all(engine.load.running for engine in deployment.engines))
    try:
        yield
    finally:
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)


async def reasons(deployment: Deployment, state: str) -> list[str]:
    return [pod["state_reason"] for pod in await deployment.pods() if pod["state"] == state]


async def test_pods_that_stream_stay_ready_although_their_health_checks_time_out(deploy: Deploy) -> None:
    """And are given new requests, while the reason is on show."""
    async with deploy(pods=2, engine={"time_scale": 1.0}, probes=PROBES) as deployment, streaming(deployment):
        hang(deployment, FaultKind.UNHEALTHY, FaultKind.NO_METRICS)

        async def all_are_late() -> bool:
            assert deployment.ready() == 2
            return all(LATE in reason for reason in await reasons(deployment, "ready"))

        await deployment.until(all_are_late)
        assert (await deployment.chat(opening("winds"))).status_code == 200
        assert deployment.ready() == 2


async def test_of_pods_that_send_nothing_at_all_the_last_one_stays(deploy: Deploy) -> None:
    """It is named in the log once, and well again after a health check that succeeds."""
    with capture_logs() as logs:
        async with deploy(pods=2, probes={**PROBES, "self_test": False}, wait=False) as deployment:
            await deployment.until(lambda: deployment.ready() == 2)
            hang(deployment, FaultKind.UNHEALTHY, FaultKind.NO_METRICS)
            await deployment.until(lambda: deployment.ready() == 1)

            async def is_kept() -> bool:
                return any("last ready pod" in reason for reason in await reasons(deployment, "ready"))

            await deployment.until(is_kept)
            for engine in deployment.engines:
                await engine.heal()
            await deployment.until(lambda: deployment.ready() == 2)

            async def is_well() -> bool:
                return await reasons(deployment, "ready") == ["", ""]

            await deployment.until(is_well)
    kept = [log["event"] for log in logs if "last ready pod" in log.get("reason", "")]
    assert kept == ["pod fails its health checks"]
