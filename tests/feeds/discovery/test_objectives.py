"""Priorities of requests from InferenceObjectives, while these change and cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.config.pod_schema import KubernetesApi
from router.feeds.discovery.inference_pool import POOL_S, PoolObjectives, read_objectives
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.membership import SourceStatus
from tests.feeds.discovery.fake_kubernetes import OBJECTIVES, FakeKubernetes

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

GIE, LLM_D = "inference.networking.x-k8s.io", "llm-d.ai"


@asynccontextmanager
async def following(cluster: FakeKubernetes) -> AsyncIterator[PoolObjectives]:
    api = KubeApi(KubernetesApi(url="http://kube", token_file="/none"), cluster.connect)
    found = PoolObjectives("models", "ns", api, SourceStatus("objectives"))
    task = asyncio.create_task(found.run())
    await asyncio.sleep(1)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("group", [GIE, LLM_D])
async def test_priorities_are_those_of_the_pool_and_follow_its_objectives(group: str) -> None:
    """No priority is 0; the other group's kind need not exist."""
    cluster = FakeKubernetes()
    cluster.put_objective("chat", "models", 10, group)
    cluster.put_objective("batch", "models", -5, group)
    cluster.put_objective("usual", "models", None, group)
    cluster.put_objective("foreign", "other-pool", 99, group)
    async with following(cluster) as found:
        assert found.priorities == {b"chat": 10, b"batch": -5, b"usual": 0}
        cluster.put_objective("chat", "models", 20, group)
        cluster.delete("batch", resource=f"{group}/{OBJECTIVES}")
        await asyncio.sleep(POOL_S)
        assert found.priorities == {b"chat": 20, b"usual": 0}
        assert not found.status.error


async def test_a_cluster_without_objectives_has_no_priorities_and_no_error() -> None:
    async with following(FakeKubernetes()) as found:
        assert (found.priorities, found.status.error) == ({}, "")


async def test_the_last_priorities_stay_while_objectives_cannot_be_read() -> None:
    cluster = FakeKubernetes()
    cluster.put_objective("chat", "models", 10, GIE)
    async with following(cluster) as found:
        cluster.faults.denied = frozenset({f"list {OBJECTIVES}"})
        await asyncio.sleep(POOL_S)
        assert found.priorities == {b"chat": 10}
        assert f'resources: ["{OBJECTIVES}"], verbs: ["list"]' in found.status.error
        cluster.faults.denied = frozenset()
        await asyncio.sleep(POOL_S)
        assert not found.status.error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"items":[{"metadata":{"name":"a"},"spec":{}}]}',
        b'{"items":[{"metadata":{"name":"a"},"spec":{"poolRef":{"name":"models"},"priority":"high"}}]}',
        b'{"items":[%b]}' % b",".join([b'{"metadata":{"name":"a"},"spec":{"poolRef":{"name":"models"}}}'] * 1001),
        b'{"items":[],"a":%b%b}' % (b"{" * 40_000, b"}" * 40_000),
        b'{"items":[{"metadata":{"name":"%b"},"spec":{"poolRef":{"name":"models"}}}]}' % (b"a" * (4 << 20)),
    ],
)
def test_what_is_no_list_of_objectives_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_objectives(body, "models")
