"""What happens to pods and to the API server, and what clients and routers notice."""

from __future__ import annotations

import asyncio

import pytest

from tests.live_k8s.api_server import RBAC, checked
from tests.live_k8s.release import NAME, Release
from tests.live_k8s.rollout import is_terminating
from tests.live_k8s.traffic import traffic

pytestmark = [pytest.mark.net, pytest.mark.anyio]

WATCH_S = 100.0
"""A silent watch is replaced after at most 80 s."""


async def test_installed_pods_are_found_and_get_requests(cluster: Release) -> None:
    async with traffic(cluster) as clients:
        await clients.more(30)
    assert not clients.failures
    assert set(clients.pods) <= {one.name for one in cluster.engines}


async def test_a_pod_that_terminates_is_drained_and_its_streams_end_in_peace(cluster: Release) -> None:
    async with traffic(cluster, clients=8) as clients:
        await clients.more(10)
        await cluster.upgrade(engines=2)
        await cluster.eventually(lambda: any(is_terminating(one.pod) for one in cluster.node.running.values()))
        [leaving] = [one.name for one in cluster.node.running.values() if is_terminating(one.pod)]

        async def drained() -> bool:
            return all([(await cluster.known_pods(one)).get(leaving) == "draining" for one in cluster.routers])

        await cluster.eventually(drained)
        await clients.more(8)  # what was sent before
        sent = clients.pods.get(leaving, 0)
        await cluster.settled()
        assert clients.pods.get(leaving, 0) == sent
    assert not clients.failures


async def test_changes_are_seen_while_watches_are_cut_all_the_time(cluster: Release) -> None:
    async def cut() -> None:
        while True:
            cluster.proxy.cut()
            await asyncio.sleep(0.7)

    cutting = asyncio.create_task(cut())
    async with traffic(cluster) as clients:
        await cluster.upgrade(engines=4)
        await cluster.eventually(lambda: len(cluster.engines) == 4)
        await cluster.settled()
        await clients.more(10)
    cutting.cancel()
    assert not clients.failures


async def test_a_watch_that_is_silent_for_ever_is_replaced(cluster: Release) -> None:
    assert cluster.proxy.mute()
    await cluster.upgrade(engines=4)
    await cluster.eventually(lambda: len(cluster.engines) == 4)
    await cluster.settled(WATCH_S)


async def test_without_its_role_a_router_names_the_missing_verb_and_keeps_its_pods(cluster: Release) -> None:
    role = f"{RBAC}/namespaces/{cluster.namespace}/roles/{NAME}-warmroute"
    with cluster.server.client() as client:
        checked(client.delete(role))
    cluster.proxy.cut()

    def named() -> bool:
        logs = [one.container.log.read_text() for one in cluster.routers]
        return all("403" in log and 'cannot watch resource \\"pods\\"' in log for log in logs)

    await cluster.eventually(named)
    async with traffic(cluster) as clients:
        await clients.more(10)
    assert not clients.failures
    await cluster.upgrade(engines=2)  # Helm creates the Role again
    await cluster.eventually(lambda: len(cluster.engines) == 2)
    await cluster.settled()
