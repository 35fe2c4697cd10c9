"""What routers do when their tokens and the API server's certificate change."""

from __future__ import annotations

import asyncio

import pytest

from router.feeds.discovery.kube_api import NOT_ACCEPTED
from tests.live_k8s.certificates import make_chain
from tests.live_k8s.release import Release
from tests.live_k8s.traffic import traffic

pytestmark = [pytest.mark.net, pytest.mark.anyio]

NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"


async def test_a_token_that_is_replaced_before_it_expires_loses_nothing(cluster: Release) -> None:
    old = cluster.routers[0].container.token

    async def expired() -> bool:  # not at once: the API server remembers tokens that it has accepted
        return await cluster.api_status(old) == 401

    expiring, cluster.node.tokens = cluster.node.tokens, []
    await cluster.node.renew_accounts()
    renewed, cluster.node.tokens = cluster.node.tokens, expiring
    await cluster.node.expire_tokens()
    cluster.node.tokens = renewed
    await cluster.eventually(expired)
    before = logs(cluster)
    async with traffic(cluster) as clients:
        await cluster.upgrade(engines=4)  # seen by watches that began with the old token
        await cluster.eventually(lambda: len(cluster.engines) == 4)
        await cluster.settled()
        cluster.proxy.cut()
        await cluster.upgrade(engines=2)  # seen by watches that began with the new one
        await cluster.eventually(lambda: len(cluster.engines) == 2)
        await cluster.settled()
        await clients.more(10)
    assert not clients.failures
    assert NOT_ACCEPTED not in logs(cluster).removeprefix(before)


async def test_with_an_expired_token_a_router_keeps_its_pods_until_the_next_one(cluster: Release) -> None:
    async def not_accepted() -> bool:  # not at once, see above
        cluster.proxy.cut()
        await asyncio.sleep(1)
        return all(NOT_ACCEPTED in one.container.log.read_text() for one in cluster.routers)

    await cluster.node.expire_tokens()
    async with traffic(cluster) as clients:
        await cluster.eventually(not_accepted)
        await cluster.upgrade(engines=4)
        await cluster.eventually(lambda: len(cluster.engines) == 4 and all(one.ready for one in cluster.engines))
        assert all([len(await cluster.known_pods(one)) == 3 for one in cluster.routers])
        await cluster.node.renew_accounts()
        await cluster.settled()
        await clients.more(10)
    assert not clients.failures


async def test_a_new_authority_is_trusted_when_its_file_is_there(cluster: Release) -> None:
    async with traffic(cluster) as clients:
        cluster.server.kill()
        make_chain(cluster.server.certificates)
        await asyncio.to_thread(cluster.server.start)
        await cluster.eventually(lambda: NOT_TRUSTED in logs(cluster))
        await cluster.upgrade(engines=4)
        await cluster.node.renew_accounts()
        await cluster.eventually(lambda: len(cluster.engines) == 4)
        await cluster.settled()
        await clients.more(10)
    assert not clients.failures


def logs(release: Release) -> str:
    return "".join(one.container.log.read_text() for one in release.node.pods("router"))
