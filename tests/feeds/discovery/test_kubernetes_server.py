"""The API server in memory, over HTTP: what a router that is a process gets from it."""

from __future__ import annotations

import asyncio

import pytest

from router.config.pod_schema import KubernetesApi, KubernetesPods
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import SourceStatus
from router.wiring.kube_sources import api_server
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes
from tests.feeds.discovery.kubernetes_server import served
from tests.kit.deadlines import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.net]


async def test_pods_are_listed_and_watched() -> None:
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
        await found.aclose()
