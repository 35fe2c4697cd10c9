"""The pods of an InferencePool, while it changes, cannot be read and is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from pydantic import ValidationError

from router.config.pod_schema import KubernetesApi, KubernetesPods
from router.feeds.discovery.inference_pool import POOL_S, PoolPods, PoolTarget, read_pool
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import ListedPod, SourceStatus
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

ENTRY = KubernetesPods(inference_pool="models", api=KubernetesApi(url="http://kube", token_file="/none"))


class FollowedPool:
    """A pool and the pods that are found by it."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self.sets: list[Sequence[ListedPod]] = []
        self.targets: list[PoolTarget] = []
        self.status = SourceStatus("InferencePool models in ns")
        self._api = KubeApi(ENTRY.api, cluster.connect)
        self._source = PoolPods("models", "ns", self._api, self.status, self._follow)

    def _follow(self, target: PoolTarget) -> KubernetesSource:
        self.targets.append(target)
        entry = ENTRY.model_copy(update={"selector": target.selector})
        return KubernetesSource(entry, self._api, {"ns": SourceStatus("pods")}, target.ports)

    async def follow(self) -> None:
        async for pods in self._source:
            self.sets.append(pods)

    def urls(self) -> list[str]:
        return sorted(pod.config.url.removeprefix("http://") for pod in self.sets[-1])


@asynccontextmanager
async def following(cluster: FakeKubernetes) -> AsyncIterator[FollowedPool]:
    found = FollowedPool(cluster)
    task = asyncio.create_task(found.follow())
    await asyncio.sleep(1)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def a_pool() -> FakeKubernetes:
    cluster = FakeKubernetes()
    cluster.put_pool("models", 8000, app="vllm", tier="gpu")
    cluster.put_pod("a")
    return cluster


async def test_each_port_of_a_pod_is_an_engine_and_a_label_may_exclude_some() -> None:
    cluster = a_pool()
    cluster.put_pool("models", 8000, 8001, 8002, app="vllm")
    cluster.put_pod("b", annotations={"inference.networking.k8s.io/active-ports": "8001,9000"})
    async with following(cluster) as found:
        assert found.urls() == ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:8002", "10.0.0.2:8001"]
        assert {pod.config.id for pod in found.sets[-1]} == {"a:8000", "a:8001", "a:8002", "b"}


async def test_pods_are_watched_and_a_changed_pool_is_followed() -> None:
    cluster = a_pool()
    async with following(cluster) as found:
        assert found.targets == [PoolTarget("app=vllm,tier=gpu", (8000,))] and found.urls() == ["10.0.0.1:8000"]
        cluster.put_pod("b")
        await asyncio.sleep(1)
        assert found.urls() == ["10.0.0.1:8000", "10.0.0.2:8000"]
        cluster.put_pool("models", 9000, app="vllm")
        await asyncio.sleep(POOL_S + 1)
        assert found.targets[1:] == [PoolTarget("app=vllm", (9000,))]
        assert found.urls() == ["10.0.0.1:9000", "10.0.0.2:9000"]
        cluster.delete("b")
        await asyncio.sleep(1)
        assert found.urls() == ["10.0.0.1:9000"]


async def test_the_last_pods_stay_while_the_pool_cannot_be_read() -> None:
    cluster = a_pool()
    async with following(cluster) as found:
        cluster.delete("models", resource="inferencepools")
        await asyncio.sleep(POOL_S + 1)
        assert "404" in found.status.error and found.urls() == ["10.0.0.1:8000"]
        cluster.put_pod("b")
        await asyncio.sleep(1)
        assert found.urls() == ["10.0.0.1:8000", "10.0.0.2:8000"], "and are still watched"
        cluster.put_pool("models", 8000, app="vllm", tier="gpu")
        await asyncio.sleep(POOL_S + 1)
        assert not found.status.error and len(found.targets) == 1


async def test_a_pool_that_may_not_be_read_says_which_permission_is_missing() -> None:
    cluster = a_pool()
    cluster.faults.denied = frozenset({"get inferencepools"})
    async with following(cluster) as found:
        assert 'apiGroups: ["inference.networking.k8s.io"], resources: ["inferencepools"]' in found.status.error
        assert not found.sets
        cluster.faults.denied = frozenset()
        await asyncio.sleep(POOL_S + 1)
        assert found.urls() == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"spec":{"selector":{"matchLabels":{}},"targetPorts":[{"number":1}]}}',
        b'{"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[{"number":70000}]}}',
        b'{"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[%b]}}' % b",".join([b'{"number":1}'] * 9),
        b'{"status":[%b1],"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[{"number":1}]}}' % (b"1," * 9000),
        b'{"status":%b%b,"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[]}}' % (b"[" * 2000, b"]" * 2000),
    ],
)
def test_what_is_no_pool_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_pool(body)


@pytest.mark.parametrize("more", [{"selector": "app=vllm"}, {"namespaces": ["*"]}, {"namespaces": ["a", "b"]}])
def test_a_pool_is_in_one_namespace_and_selects_its_own_pods(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="inference_pool"):
        KubernetesPods.model_validate({"inference_pool": "models", **more})
