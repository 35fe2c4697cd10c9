"""The chart grants exactly what discovery calls: no request is refused, and no permission is unused."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from functools import partial

import httpx
import pytest

from router.config.schema import RouterConfig
from router.feeds.discovery.inference_pool import PoolPods, PoolTarget
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import SourceStatus
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes
from tests.helm.charts import EXAMPLES, Rendered, example, minimal
from tests.kit.virtual_time import run_virtually

CALL = re.compile(
    r"/apis?(?:/(?P<group>[\w.]+))?/v1(?:/namespaces/(?P<namespace>[\w-]+))?/(?P<resource>\w+)(?P<name>/.+)?"
)
Permission = tuple[str, str, str, str]
"""Namespace or "*", API group, resource, verb."""
FOLLOWED_S = 120.0


def granted(rendered: Rendered) -> set[Permission]:
    return {
        (role["metadata"].get("namespace", "*"), group, resource, verb)
        for role in [*rendered.all("Role"), *rendered.all("ClusterRole")]
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(request: httpx.Request) -> Permission:
    """The permission that the API server asks for."""
    call = CALL.fullmatch(request.url.path)
    assert call is not None, request.url
    verb = "get" if call["name"] else "watch" if request.url.params.get("watch") else "list"
    return call["namespace"] or "*", call["group"] or "", call["resource"], verb


def called(rendered: Rendered) -> set[Permission]:
    """What the sources of the configuration call when there is a pod in each namespace."""
    cluster = FakeKubernetes()

    async def follow() -> None:
        found = RouterConfig.model_validate({**rendered.router_config, "models": []}).discovery.kubernetes
        async with asyncio.TaskGroup() as group:
            for entry in found:
                namespaces = entry.namespaces or ("llm",)
                for namespace in namespaces:
                    own = "llm" if namespace == "*" else namespace
                    cluster.put_pod("a", namespace=own)
                local = entry.model_copy(
                    update={"namespaces": namespaces, "api": entry.api.model_copy(update={"url": "http://kube"})}
                )
                statuses = {one: SourceStatus(one) for one in namespaces}
                api = KubeApi(local.api, cluster.connect)
                source = KubernetesSource(local, api, statuses)
                if entry.inference_pool:
                    cluster.put_pool(entry.inference_pool, 8000, namespace="llm", app="vllm")
                    pool = PoolPods(entry.inference_pool, "llm", api, SourceStatus("pool"), partial(followed, source))
                    group.create_task(run(pool))
                else:
                    group.create_task(run(source))

    run_virtually(follow())
    return {needed(request) for request in cluster.requests}


def followed(source: KubernetesSource, _target: PoolTarget) -> KubernetesSource:
    return source


async def run(source: KubernetesSource | PoolPods) -> None:
    async def pods() -> None:
        async for _ in source:
            pass

    with suppress(TimeoutError):
        await asyncio.wait_for(pods(), timeout=FOLLOWED_S)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_grants_what_its_discovery_calls(name: str) -> None:
    assert called(example(name)) == granted(example(name))


@pytest.mark.parametrize(
    "source",
    [
        {"selector": "app=vllm"},
        {"selector": "app=vllm", "node_labels": False},
        {"selector": "app=vllm", "namespaces": ["a", "b"]},
        {"selector": "app=vllm", "namespaces": ["*"]},
    ],
    ids=str,
)
def test_each_way_to_find_pods_has_its_permissions(source: dict[str, object]) -> None:
    rendered = minimal({"config": {"discovery": {"kubernetes": source}}})
    assert called(rendered) == granted(rendered)
