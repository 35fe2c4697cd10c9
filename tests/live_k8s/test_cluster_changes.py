"""What happens to pods and to the API server, and what clients and routers notice."""

from __future__ import annotations

import asyncio

import pytest

from tests.live_k8s.api_server import RBAC, checked
from tests.live_k8s.release import NAME, Release, traffic
from tests.live_k8s.rollout import is_terminating

pytestmark = [pytest.mark.net, pytest.mark.anyio]

AWAY_S = 60.0
AGAIN_RIGHT_S = 5.0
"""After the API server is back."""
WATCH_S = 100.0
"""A silent watch is replaced after at most 80 s."""


async def test_installed_pods_are_found_and_get_requests(cluster: Release) -> None:
    async with traffic(cluster) as clients:
        await clients.more(30)
    assert not clients.failures
    assert set(clients.pods) <= {one.name for one in cluster.engines}


async def test_a_rolling_update_of_engines_fails_and_cuts_no_answer(cluster: Release) -> None:
    before = {one.name for one in cluster.engines}
    async with traffic(cluster) as clients:
        await cluster.upgrade(arguments=["--time-scale=1.1"])
        await cluster.eventually(lambda: not before & {one.name for one in cluster.node.running.values()}, 300)
        await cluster.settled()
        await clients.more(20)
    assert not clients.failures
    assert set(clients.pods) & before
    assert set(clients.pods) - before


async def test_a_pod_that_terminates_is_drained_and_its_streams_end_in_peace(cluster: Release) -> None:
    async with traffic(cluster, clients=8) as clients:
        await clients.more(10)
        await cluster.upgrade(engines=2)
        await cluster.eventually(lambda: any(is_terminating(one.pod) for one in cluster.node.running.values()))
        [leaving] = [one.name for one in cluster.node.running.values() if is_terminating(one.pod)]

        async def drained() -> bool:
            return all([(await cluster.known_pods(one)).get(leaving) == "draining" for one in cluster.routers])

        await cluster.eventually(drained, 20)
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


async def test_pods_come_and_go_while_routers_cannot_reach_the_api_server(cluster: Release) -> None:
    """A router that cannot know that a pod stops sends it requests; its last streams may be cut, and nothing else."""
    loop, before = asyncio.get_running_loop(), {one.name for one in cluster.engines}
    async with traffic(cluster) as clients:
        cluster.proxy.refuse = True
        cluster.proxy.cut()
        back_s = loop.time() + AWAY_S
        await cluster.upgrade(engines=2)
        await cluster.eventually(lambda: len(cluster.node.pods("engine")) == 2)
        await clients.more(10)
        await cluster.upgrade(engines=4)
        await cluster.eventually(lambda: len(cluster.engines) == 4 and all(one.ready for one in cluster.engines))
        await cluster.eventually(lambda: not any(is_terminating(one.pod) for one in cluster.node.running.values()))
        await asyncio.sleep(max(0.0, back_s - loop.time()))
        assert all([set(await cluster.known_pods(one)) == before for one in cluster.routers])
        cluster.proxy.refuse = False
        await cluster.settled(AGAIN_RIGHT_S)
        stopped = before - {one.name for one in cluster.engines}
        failures = [*clients.failures]
        await clients.more(10)
    assert clients.failures == failures
    assert len(failures) <= 4
    assert all(one.partition(": 200 ")[0] in stopped for one in failures)


async def test_an_api_server_that_is_killed_costs_no_answer(cluster: Release) -> None:
    async with traffic(cluster) as clients:
        cluster.server.kill()
        await clients.more(40)
        await asyncio.to_thread(cluster.server.start)
        await cluster.settled(AGAIN_RIGHT_S)
        await cluster.upgrade(engines=2)
        await cluster.eventually(lambda: len(cluster.engines) == 2)
        await cluster.settled()
    assert not clients.failures


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
