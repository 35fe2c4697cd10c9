"""Five minutes without the API server, while engine pods come and go. A file of its own, to run next to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.live_k8s.fake_node import RunningPod
from tests.live_k8s.release import Release
from tests.live_k8s.traffic import traffic

RecordProperty = Callable[[str, object], None]
pytestmark = [pytest.mark.net, pytest.mark.anyio]

AWAY_S = 300.0
AGAIN_RIGHT_S = 5.0
"""After the API server is back."""
LAST_ATTEMPTS_S = 5.0
"""After which a pod that was ejected has got its last attempts."""
DRAINS = ("--drain-timeout=60",)
"""Engines that complete their streams on SIGTERM."""


async def test_five_minutes_without_the_api_server(cluster: Release, record_property: RecordProperty) -> None:
    """Routers cannot know which pods are new or stop. A pod that is killed cuts the streams that it has. One that is
    stopped gets requests until it refuses them, and cuts none. Nothing else fails, and a pod that is known to be dead
    gets no request."""
    now_s, node, engines = asyncio.get_running_loop().time, cluster.node, 4
    await cluster.upgrade(engines, DRAINS)
    await cluster.settled()
    crashing, lost, stopping, _ = cluster.engines
    before = {one.name for one in cluster.engines}
    async with traffic(cluster) as clients:
        await clients.more(10)
        cluster.proxy.refuse = True
        cluster.proxy.cut()
        back_s, killed_s = now_s() + AWAY_S, {lost.name: now_s()}
        await node.lose(lost)
        await node.delete(stopping)
        await cluster.upgrade(engines + 1, DRAINS)
        await cluster.eventually(lambda: stopping not in node.running.values())
        await cluster.eventually(lambda: [one.ready for one in cluster.engines] == [True] * (engines + 1))
        cluster.server.kill()
        for dead in (lost, stopping):
            await cluster.eventually(ejected(cluster, dead))
        await asyncio.sleep(LAST_ATTEMPTS_S)
        earlier = [await cluster.attempts(one) for one in cluster.routers]
        killed_s[crashing.name] = now_s()
        crashing.kill()
        await asyncio.sleep(max(0.0, back_s - now_s()))
        assert all([set(await cluster.known_pods(one)) == before for one in cluster.routers])
        for router, then in zip(cluster.routers, earlier, strict=True):
            now = await cluster.attempts(router)
            assert {one.name: now[one.name] for one in (lost, stopping)} == {
                one.name: then[one.name] for one in (lost, stopping)
            }
            assert now[crashing.name] > then[crashing.name]  # it has been started again
        await asyncio.to_thread(cluster.server.start)
        cluster.proxy.refuse = False
        again_s = await cluster.seconds_until_right()
        await clients.more(10)
    record_property("right again after, in seconds", round(again_s, 1))
    record_property("streams, cut by killed pods, complete", (len(clients.failures), clients.answers))
    assert [one for one in clients.failures if one.began_s > killed_s.get(one.pod, 0.0)] == []
    assert again_s < AGAIN_RIGHT_S


def ejected(release: Release, pod: RunningPod) -> Callable[[], Awaitable[bool]]:
    async def is_ejected() -> bool:
        return all([(await release.known_pods(one))[pod.name] == "ejected" for one in release.routers])

    return is_ejected
