"""The API server in memory, over HTTP: what a router that is a process gets from it."""

from __future__ import annotations

import asyncio

import pytest

from router.config.discovery_schema import KubernetesApi, KubernetesPods
from router.feeds.discovery.deletion_costs import ANNOTATION, DeletionCosts, KubeLease
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.source_status import SourceStatus
from router.wiring.pod_sources import api_server
from tests.feeds.discovery.fake_kubernetes import PODS, FakeKubernetes
from tests.feeds.discovery.kubernetes_server import served

pytestmark = [pytest.mark.anyio, pytest.mark.net]
DEADLINE_S = 20.0


async def test_pods_are_listed_watched_and_written() -> None:
    cluster = FakeKubernetes()
    cluster.put_pod("a")
    async with asyncio.timeout(DEADLINE_S), served(cluster) as url:
        entry = KubernetesPods(selector="app=vllm", namespaces=("ns",), node_labels=False)
        api = KubeApi(KubernetesApi(url=url, token_file="/none"), api_server)
        source = KubernetesSource(entry, api, {"ns": SourceStatus("pods")})
        found = aiter(source)
        assert [pod.uid for pod in await anext(found)] == ["uid-1"]
        cluster.put_pod("b")
        assert [pod.uid for pod in await anext(found)] == ["uid-1", "uid-2"]

        async def costs() -> dict[str, int]:
            return {"uid-1": 5, "uid-2": 7}

        await DeletionCosts(api, KubeLease(api, "ns", "lease", "me"), source.living_pods, costs).write()
        await found.aclose()
    written = [pod["metadata"]["annotations"] for (kind, *_), pod in cluster.objects.items() if kind == PODS]
    assert written == [{ANNOTATION: "5"}, {ANNOTATION: "7"}]
