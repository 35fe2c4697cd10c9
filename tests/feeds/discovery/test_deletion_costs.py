"""Deletion costs of pods, written to a cluster of which one router at a time is in charge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.config.discovery_schema import KubernetesApi
from router.feeds.discovery.deletion_costs import (
    ANNOTATION,
    LEASE_S,
    MAX_WRITES,
    POD_INTERVAL_S,
    ROUND_S,
    WARM_UP_S,
    DeletionCosts,
    KubeLease,
)
from router.feeds.discovery.kube_api import KubeApi
from tests.feeds.discovery.fake_kubernetes import LEASES, PODS, FakeKubernetes
from tests.virtual_time import run_virtually

FIRST_ROUND_S = WARM_UP_S + 10


class Writer:
    """A router that writes `costs` while `running`."""

    def __init__(self, cluster: FakeKubernetes, name: str, costs: dict[str, int] | None) -> None:
        self.costs = costs
        self.cluster = cluster
        self.also: dict[str, tuple[str, str]] = {}
        """Pods that the router believes to exist."""
        api = KubeApi(KubernetesApi(url="http://kube", token_file="/none"), cluster.connect)

        async def current() -> dict[str, int] | None:
            return self.costs

        self._costs = DeletionCosts(api, KubeLease(api, "ns", "lease", name), self.pods, current)
        self._task: asyncio.Task[None] | None = None

    def pods(self) -> dict[str, tuple[str, str]]:
        return {
            one["metadata"]["uid"]: (namespace, name)
            for (resource, namespace, name), one in self.cluster.objects.items()
            if resource == PODS
        } | self.also

    def start(self) -> None:
        self._task = asyncio.create_task(self._costs.run())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def cluster_of(pods: int) -> FakeKubernetes:
    cluster = FakeKubernetes()
    for number in range(pods):
        cluster.put_pod(f"pod-{number}")
    return cluster


def written_costs(cluster: FakeKubernetes) -> dict[str, str]:
    """The costs in the cluster, by pod."""
    return {
        name: one["metadata"]["annotations"][ANNOTATION]
        for (resource, _, name), one in cluster.objects.items()
        if resource == PODS and ANNOTATION in (one["metadata"]["annotations"] or {})
    }


def patches(cluster: FakeKubernetes) -> list[httpx.Request]:
    """The requests that change pods."""
    return [one for one in cluster.requests if one.method == "PATCH" and "/pods/" in one.url.path]


def virtually(cluster: FakeKubernetes, story: Callable[[Writer], Awaitable[None]], **costs: int) -> FakeKubernetes:
    """Run `story` with one router in charge."""

    async def main() -> None:
        writer = Writer(cluster, "a", {uid.replace("_", "-"): cost for uid, cost in costs.items()})
        writer.start()
        await story(writer)
        await writer.stop()

    run_virtually(main())
    return cluster


async def first_round(_writer: Writer) -> None:
    await asyncio.sleep(FIRST_ROUND_S)


def test_each_pod_gets_its_cost() -> None:
    cluster = virtually(cluster_of(3), first_round, uid_1=5000, uid_2=70, uid_3=0)
    assert written_costs(cluster) == {"pod-0": "5000", "pod-1": "70", "pod-2": "0"}


def test_other_annotations_stay() -> None:
    cluster = FakeKubernetes()
    cluster.put_pod("pod-0", annotations={"mine": "yes"})
    virtually(cluster, first_round, uid_1=7)
    assert cluster.objects[PODS, "ns", "pod-0"]["metadata"]["annotations"] == {"mine": "yes", ANNOTATION: "7"}


def test_nothing_is_written_before_the_router_knows_its_traffic() -> None:
    async def story(_writer: Writer) -> None:
        await asyncio.sleep(WARM_UP_S - 1)

    assert not virtually(cluster_of(1), story, uid_1=5000).requests


def test_a_cost_that_hardly_changes_is_not_written_again() -> None:
    async def story(writer: Writer) -> None:
        for cost in (1000, 1100, 900, 1190, 1000):
            writer.costs = {"uid-1": cost}
            await asyncio.sleep(FIRST_ROUND_S)

    assert len(patches(virtually(cluster_of(1), story, uid_1=1000))) == 1


def test_a_pod_is_written_at_most_once_a_minute() -> None:
    minutes = 10

    async def story(writer: Writer) -> None:
        for number in range(minutes * 60):
            writer.costs = {"uid-1": 1000 * (number % 2 + 1) * 2 ** (number // 10)}
            await asyncio.sleep(1)

    assert 2 <= len(patches(virtually(cluster_of(1), story, uid_1=1000))) <= minutes * 60 / POD_INTERVAL_S


def test_a_large_fleet_is_written_in_several_rounds() -> None:
    cluster, number = cluster_of(250), 250

    async def story(writer: Writer) -> None:
        writer.costs = {f"uid-{each}": 100 * each for each in range(1, number + 1)}
        await asyncio.sleep(FIRST_ROUND_S + 5)
        assert len(patches(cluster)) == MAX_WRITES
        await asyncio.sleep(3 * ROUND_S)

    virtually(cluster, story)
    assert written_costs(cluster) == {f"pod-{each}": str(100 * (each + 1)) for each in range(number)}


def test_nothing_is_written_while_the_index_is_incomplete() -> None:
    async def story(writer: Writer) -> None:
        writer.costs = None
        await first_round(writer)

    assert not patches(virtually(cluster_of(1), story))


def test_a_new_pod_with_the_name_of_another_one_is_not_written() -> None:
    cluster = cluster_of(1)

    async def story(writer: Writer) -> None:
        writer.also = {"uid-old": ("ns", "pod-0"), "uid-gone": ("ns", "gone")}
        await asyncio.sleep(FIRST_ROUND_S)

    with capture_logs() as logs:
        virtually(cluster, story, uid_old=5, uid_gone=6)
    assert len(patches(cluster)) == 2
    assert (written_costs(cluster), logs) == ({}, [])


# --- several routers ---


def writers(cluster: FakeKubernetes) -> set[int]:
    """Costs that were written: each router of a test has one of its own."""
    return {int(json.loads(one.content)["metadata"]["annotations"][ANNOTATION]) for one in patches(cluster)}


def test_one_of_two_routers_writes_and_the_other_takes_over() -> None:
    """The cost stays when a router ends, until another one has taken the Lease."""
    cluster = cluster_of(1)

    async def main() -> None:
        one, two = Writer(cluster, "one", {"uid-1": 1000}), Writer(cluster, "two", {"uid-1": 5000})
        one.start()
        await asyncio.sleep(1)
        two.start()
        await asyncio.sleep(1200)
        assert (writers(cluster), len(patches(cluster))) == ({1000}, 1)
        await one.stop()
        await asyncio.sleep(LEASE_S - ROUND_S)
        assert written_costs(cluster) == {"pod-0": "1000"}
        await asyncio.sleep(2 * ROUND_S + 5)
        assert written_costs(cluster) == {"pod-0": "5000"}
        await two.stop()

    run_virtually(main())


def test_of_two_routers_that_take_a_free_lease_at_once_one_gets_it() -> None:
    cluster = cluster_of(1)

    async def main() -> None:
        both = [Writer(cluster, name, {"uid-1": cost}) for name, cost in (("one", 1000), ("two", 5000))]
        for writer in both:
            writer.start()
        await asyncio.sleep(600)
        for writer in both:
            await writer.stop()

    run_virtually(main())
    assert len(patches(cluster)) == 1


@pytest.mark.parametrize("created", [True, False])
def test_a_lease_is_not_taken_by_a_write_that_came_second(created: bool) -> None:
    """The other router's write arrives between reading and writing."""
    cluster = cluster_of(0)

    async def main() -> bool:
        api = KubeApi(KubernetesApi(url="http://kube", token_file="/none"), cluster.connect)
        first, second = KubeLease(api, "ns", "lease", "first"), KubeLease(api, "ns", "lease", "second")
        if created:
            await first.hold()
            await second.hold()
            await asyncio.sleep(LEASE_S + 1)
        results = await asyncio.gather(first.hold(), second.hold())
        return sum(results) == 1

    assert run_virtually(main())


# --- failures ---


@pytest.mark.parametrize(
    ("denied", "hint"),
    [
        ("patch pods", 'apiGroups: [""], resources: ["pods"], verbs: ["patch"]'),
        ("get leases", 'resources: ["leases"], verbs: ["get", "create", "patch"]'),
        ("create leases", 'resources: ["leases"], verbs: ["get", "create", "patch"]'),
    ],
)
def test_a_missing_permission_is_named_once_and_writing_begins_when_it_is_granted(denied: str, hint: str) -> None:
    cluster = cluster_of(2)
    cluster.faults.denied = frozenset({denied})

    async def story(_writer: Writer) -> None:
        await asyncio.sleep(600)
        assert len(patches(cluster)) <= 600 / ROUND_S
        cluster.faults.denied = frozenset()
        await asyncio.sleep(2 * ROUND_S)

    with capture_logs() as logs:
        virtually(cluster, story, uid_1=100, uid_2=200)
    assert [log["event"] for log in logs] == ["deletion costs not written", "deletion costs written again"]
    assert hint in logs[0]["error"]
    assert "Role in namespace ns" in logs[0]["error"]
    assert written_costs(cluster) == {"pod-0": "100", "pod-1": "200"}


def test_an_api_server_that_is_away_is_waited_for() -> None:
    cluster = cluster_of(1)
    cluster.faults.down = True

    async def story(_writer: Writer) -> None:
        await asyncio.sleep(600)
        cluster.faults.down = False
        await asyncio.sleep(2 * ROUND_S)

    assert written_costs(virtually(cluster, story, uid_1=100)) == {"pod-0": "100"}


@pytest.mark.parametrize("stored", [{"spec": 5}, {"spec": {"holderIdentity": ["x"]}}, {"metadata": {}}])
def test_a_lease_of_another_shape_is_an_error_in_the_log(stored: dict[str, Any]) -> None:
    cluster = cluster_of(1)
    metadata = {"name": "lease", "namespace": "ns", "uid": "l", "resourceVersion": "1"}
    cluster.objects[LEASES, "ns", "lease"] = {"metadata": metadata, **stored}
    with capture_logs() as logs:
        virtually(cluster, first_round, uid_1=100)
    assert [log["event"] for log in logs] == ["deletion costs not written"]
    assert not patches(cluster)
