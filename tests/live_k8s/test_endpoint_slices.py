"""Routers that may not read pods find them by the EndpointSlices of a Service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.live_k8s.api_server import APPS, CORE, ApiServer, checked
from tests.live_k8s.newer_slices import GROUP, newer_slices
from tests.live_k8s.release import NAME, Release, engines_of_others, release, values
from tests.live_k8s.traffic import traffic

SLICES_V1 = f"{GROUP}/v1"
pytestmark = [pytest.mark.net, pytest.mark.anyio]


def by_service() -> dict[str, object]:
    """Values of the chart without engines of its own."""
    given = values()
    source = {"service": "vllm", "node_labels": False}
    return {**given, "engines": {"pools": []}, "config": {**given["config"], "discovery": {"kubernetes": source}}}


@pytest.fixture
async def cluster(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    async with newer_slices(api_server), release(api_server, "endpoint-slices", folder) as found:
        with api_server.client() as client:
            for kind, body in engines_of_others(3).items():
                root = APPS if kind == "deployments" else CORE
                checked(client.post(f"{root}/namespaces/{found.namespace}/{kind}", json=body))
        await found.helm("install", NAME, found.chart(), "--server-side=false", values=by_service())
        await found.settled()
        yield found


def scale(release: Release, replicas: int) -> None:
    with release.server.client() as client:
        path = f"{APPS}/namespaces/{release.namespace}/deployments/vllm"
        headers = {"content-type": "application/merge-patch+json"}
        checked(client.patch(path, json={"spec": {"replicas": replicas}}, headers=headers))


async def test_pods_come_and_go_although_the_router_may_not_read_pods(cluster: Release) -> None:
    token = cluster.routers[0].container.token
    assert await cluster.api_status(token, "endpointslices", SLICES_V1) == 200
    assert await cluster.api_status(token, "pods") == 403
    before = {one.name for one in cluster.engines}
    async with traffic(cluster) as clients:
        scale(cluster, 5)
        await cluster.eventually(lambda: len(cluster.engines) == 5)
        await cluster.settled()
        cluster.proxy.cut()
        scale(cluster, 2)
        await cluster.eventually(lambda: len(cluster.engines) == 2)
        await cluster.settled()
        await clients.more(10)
    assert not clients.failures
    assert set(clients.pods) & before
