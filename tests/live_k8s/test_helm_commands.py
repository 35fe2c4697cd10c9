"""Helm's commands against a real API server, with clients at work."""

from __future__ import annotations

import pytest

from tests.live_k8s.api_server import CORE, checked
from tests.live_k8s.release import NAME, Release, values
from tests.live_k8s.traffic import traffic

pytestmark = [pytest.mark.net, pytest.mark.anyio]


def with_limits(**limits: int) -> dict[str, object]:
    config = values()["config"]
    return {**config, "limits": {**config["limits"], **limits}}


async def test_helm_test_finds_the_second_turn_in_a_cache(cluster: Release) -> None:
    assert "Phase:          Succeeded" in await cluster.helm("test", NAME, "--timeout", "2m")


async def test_upgrade_and_rollback_of_the_configuration_replace_routers_without_a_failed_answer(
    cluster: Release,
) -> None:
    first = {one.name for one in cluster.routers}
    async with traffic(cluster) as clients:
        await cluster.upgrade(config=with_limits(max_in_flight=5000))
        await cluster.eventually(lambda: not first & {one.name for one in cluster.node.running.values()}, 300)
        await cluster.settled()
        second = {one.name for one in cluster.routers}
        await cluster.helm("rollback", NAME, "--server-side=false")
        await cluster.eventually(lambda: not second & {one.name for one in cluster.node.running.values()}, 300)
        await cluster.settled()
        await clients.more(10)
    assert not clients.failures


async def test_a_changed_policy_takes_effect_without_a_restart(cluster: Release) -> None:
    before = {one.name for one in cluster.routers}
    nightly = {"name": "nightly", "about": "Batch work at night may wait.", "extends": "batch", "match": {"class": "x"}}

    async def active() -> bool:
        return all(["nightly" in str(await cluster.read_admin(one, "policies")) for one in cluster.routers])

    assert not await active()
    await cluster.upgrade(policies={"nightly": nightly})
    await cluster.eventually(active)
    assert {one.name for one in cluster.routers} == before


async def test_uninstall_completes_the_streams_and_leaves_nothing(cluster: Release) -> None:
    async with traffic(cluster, clients=4, answer_tokens=1600) as clients:
        await cluster.eventually(lambda: clients.running.total() == 4)
        await cluster.helm("uninstall", NAME)
        await cluster.eventually(lambda: not cluster.routers)
        assert clients.running.total() == 4
        await cluster.eventually(lambda: not cluster.node.running, 200)
        assert (clients.running.total(), clients.answers, clients.failures) == (0, 4, [])
    with cluster.server.client() as client:
        for kind in ("pods", "configmaps", "secrets", "services", "serviceaccounts"):
            left = checked(client.get(f"{CORE}/namespaces/{cluster.namespace}/{kind}"))["items"]
            assert [one["metadata"]["name"] for one in left if NAME in one["metadata"]["name"]] == []
