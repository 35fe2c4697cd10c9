"""A rolling update of routers and engines at once; clients arrive at a fixed rate, through a plain balancer."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.live_k8s.cut_proxy import Address, CutProxy
from tests.live_k8s.release import Release, values
from tests.live_k8s.traffic import arrivals

pytestmark = [pytest.mark.net, pytest.mark.anyio]

RATE_PER_S = float(os.environ.get("LIVE_K8S_RATE", "100"))
LAG_S = 1.0
"""Until a node's balancer follows a change of endpoints; the chart's `preStop` must be longer."""
UPDATE_S = 600.0
STEADY_S = 10
"""Before and after the update."""


def stopping_as_by_default(**limits: int) -> dict[str, Any]:
    """Values with the pauses of the chart's own: 5 s until SIGTERM, and 5 s in which responses close connections. httpx
    keeps unused connections for 5 s, so it uses none that a router closes."""
    config = {**values()["config"], "limits": {"drain_delay_s": 5, "drain_timeout_s": 60, **limits}}
    return {"preStopSeconds": 5, "config": config}


@asynccontextmanager
async def balancer(release: Release) -> AsyncIterator[str]:
    """The URL of what a Service is: each connection goes to a router that was ready a moment ago, and stays there."""
    targets: list[Address] = []

    async def follow() -> None:
        while True:
            targets[:] = [(one.container.address, 8080) for one in release.routers]
            await asyncio.sleep(LAG_S)

    following = asyncio.create_task(follow())
    proxy = CutProxy(lambda: random.choice(targets) if targets else None)
    await proxy.start()
    try:
        yield f"http://127.0.0.1:{proxy.port}"
    finally:
        following.cancel()
        await proxy.close()


async def test_a_rolling_update_of_routers_and_engines_fails_and_cuts_no_answer(
    cluster: Release, record_property: Callable[[str, object], None]
) -> None:
    await cluster.upgrade(**stopping_as_by_default())
    await cluster.settled()
    before = {one.name for one in cluster.node.running.values()}
    now_s = asyncio.get_running_loop().time
    async with balancer(cluster) as url, arrivals(cluster, RATE_PER_S, url) as clients:
        began_s = now_s()
        await clients.more(int(RATE_PER_S * STEADY_S))
        await cluster.upgrade(arguments=["--time-scale=1.1"], **stopping_as_by_default(max_in_flight=5000))
        await cluster.eventually(lambda: not before & {one.name for one in cluster.node.running.values()}, UPDATE_S)
        await cluster.settled()
        await clients.more(int(RATE_PER_S * STEADY_S))
        took_s = now_s() - began_s
    record_property("complete streams", clients.answers)
    record_property("streams per second", round(clients.answers / took_s, 1))
    assert clients.failures == []
    assert set(clients.pods) & before
    assert set(clients.pods) - before
