"""The pods of a cluster, while its API server is watched and misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from router.config.pod_schema import KubernetesApi, KubernetesPods
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kube_watch import LATE_S, WATCH_S
from router.feeds.discovery.kubernetes_pods import TERMINATING, KubernetesSource
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.fleet.fleet import NOT_READY
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes, Faults

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

RESYNC_S = 300.0
CONVERGED_S = RESYNC_S + WATCH_S[1] + LATE_S + 10
"""A lost event is found by the next list, which waits for the end of a watch that may be dead."""


class Observed:
    """A cluster and the pods that a source finds in it."""

    def __init__(self, cluster: FakeKubernetes, token: str = "/none", **entry: Any) -> None:
        self.cluster = cluster
        self.pods: Sequence[ListedPod] | None = None
        self.sets = 0
        keys = {"selector": "app=vllm", "namespaces": ("ns",), **entry}
        settings = KubernetesPods(api=KubernetesApi(url="http://kube", token_file=token), **keys)
        self.statuses = {name: SourceStatus(f"kubernetes in {name}") for name in settings.namespaces}
        self._source = KubernetesSource(settings, KubeApi(settings.api, cluster.connect), self.statuses)

    @property
    def status(self) -> SourceStatus:
        return next(iter(self.statuses.values()))

    def chosen(self) -> set[str]:
        """Uids of pods that get new requests."""
        return {pod.uid for pod in self.pods or () if not pod.drain_reason}

    def urls(self) -> list[str]:
        return sorted(pod.config.url for pod in self.pods or ())

    def reasons(self) -> dict[str, str]:
        return {pod.config.id: pod.drain_reason for pod in self.pods or ()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Observed]:
        async def follow() -> None:
            async for pods in self._source:
                self.pods = pods
                self.sets += 1

        task = asyncio.create_task(follow())
        await asyncio.sleep(0.5)
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def three_pods() -> FakeKubernetes:
    cluster = FakeKubernetes()
    for name in "abc":
        cluster.put_pod(name)
    return cluster


# --- the rows of the table of failures that really happened ---


@pytest.mark.parametrize(
    "fault",
    [
        Faults(drop=1),
        Faults(silent=True),
        Faults(down=True),
        Faults(status=500),
        Faults(status=429, retry_after_s=3),
        Faults(forget=True),
        Faults(forget=True, forget_in_stream=True),
        Faults(close_old=True),
    ],
    ids=["lost event", "silent", "down", "500", "429", "410 status", "410 in stream", "closed early"],
)
async def test_a_deletion_that_a_fault_hides_is_found(fault: Faults) -> None:
    """A full list follows at the latest `CONVERGED_S` after the fault is over."""
    async with Observed(three_pods()).running() as observed:
        cluster = observed.cluster
        cluster.faults = fault
        cluster.delete("b")
        cluster.put_pod("d")
        cluster.close_watches()
        await asyncio.sleep(100)
        cluster.faults = Faults()
        await asyncio.sleep(CONVERGED_S)
        assert observed.chosen() == cluster.ready_uids()


@pytest.mark.parametrize("form", [Faults(forget=True), Faults(forget=True, forget_in_stream=True)])
async def test_an_expired_version_is_replaced_by_a_list_within_two_seconds(form: Faults) -> None:
    """In both forms."""
    async with Observed(three_pods()).running() as observed:
        observed.cluster.faults = form
        observed.cluster.close_watches()
        observed.cluster.put_pod("d")
        await asyncio.sleep(2)
        assert observed.chosen() == observed.cluster.ready_uids()


async def test_a_proxy_that_closes_watches_of_old_versions_does_not_hide_changes() -> None:
    """Two quick ends without an event lead to a list from scratch."""
    async with Observed(three_pods()).running() as observed:
        observed.cluster.faults.close_old = True
        observed.cluster.close_watches()
        observed.cluster.delete("b")
        await asyncio.sleep(3)
        assert observed.chosen() == observed.cluster.ready_uids()


async def test_the_last_pods_stay_while_the_api_server_is_away_and_are_right_five_seconds_after() -> None:
    """Their age is known."""
    with capture_logs() as logs:
        async with Observed(three_pods()).running() as observed:
            cluster = observed.cluster
            before = observed.chosen()
            cluster.faults.down = True
            cluster.close_watches()
            for name in "ab":
                cluster.delete(name)
            cluster.put_pod("d")
            await asyncio.sleep(300)
            assert observed.chosen() == before
            assert 299 < observed.status.age_s < 302
            cluster.faults.down = False
            await asyncio.sleep(5)
            assert observed.chosen() == cluster.ready_uids()
            assert observed.status.age_s < 5
    assert [line["event"] for line in logs] == [
        "pod source unavailable; its last pods stay in use",
        "pod source available again",
    ]


async def test_a_selector_that_matches_no_pod_is_logged_once() -> None:
    """It is most likely wrong, and the router is not ready until it matches one."""
    with capture_logs() as logs:
        async with Observed(FakeKubernetes()).running() as observed:
            await asyncio.sleep(3 * RESYNC_S)
            observed.cluster.put_pod("a")
            await asyncio.sleep(1)
            assert observed.chosen()
    assert [line["event"] for line in logs] == ["no pods found"]
    assert logs[0]["selector"] == "app=vllm"
    assert logs[0]["path"] == "/api/v1/namespaces/ns/pods"


async def test_a_silent_watch_is_replaced_after_a_minute() -> None:
    """Without an error of the connection."""
    async with Observed(three_pods()).running() as observed:
        observed.cluster.faults.silent = True
        observed.cluster.close_watches()
        await asyncio.sleep(1)
        observed.cluster.delete("b")
        observed.cluster.faults.silent = False
        await asyncio.sleep(WATCH_S[1] + LATE_S + 2)
        assert observed.chosen() == observed.cluster.ready_uids()


async def test_a_terminating_pod_is_drained_at_once_and_gone_after_its_deletion() -> None:
    """The first event comes a grace period before the second."""
    async with Observed(three_pods()).running() as observed:
        observed.cluster.terminate("b")
        await asyncio.sleep(0.3)
        assert observed.reasons() == {"a": "", "b": TERMINATING, "c": ""}
        observed.cluster.delete("b")
        await asyncio.sleep(0.3)
        assert observed.reasons() == {"a": "", "c": ""}


async def test_a_pod_that_is_not_ready_is_drained_and_dropped_after_the_grace_period() -> None:
    """It returns when it is ready again, also after that. A pod that was never ready is not used."""
    async with Observed(three_pods(), not_ready_grace_s=30.0).running() as observed:
        cluster = observed.cluster
        for ready, wait_s, expected in [
            (False, 29, {"b": NOT_READY}),
            (True, 1, {"b": ""}),
            (False, 29, {"b": NOT_READY}),
            (False, 2, {}),
            (True, 1, {"b": ""}),
        ]:
            cluster.put_pod("b", ready=ready)
            await asyncio.sleep(wait_s)
            assert observed.reasons() == {"a": "", "c": "", **expected}
        cluster.put_pod("d", ready=False)
        await asyncio.sleep(1)
        assert "d" not in observed.reasons()


async def test_a_pod_with_a_known_name_and_a_new_uid_is_another_pod() -> None:
    """Although the deletion of the old one was lost."""
    async with Observed(three_pods()).running() as observed:
        cluster = observed.cluster
        old = observed.chosen()
        cluster.faults.drop = 1
        cluster.delete("b")
        new = cluster.put_pod("b")["metadata"]["uid"]
        await asyncio.sleep(0.3)
        assert new in observed.chosen() - old
        assert observed.chosen() == cluster.ready_uids()


async def test_of_two_pods_with_one_address_the_newer_one_is_used() -> None:
    """The API keeps the address of a pod that has ended."""
    async with Observed(three_pods()).running() as observed:
        cluster = observed.cluster
        cluster.terminate("b")
        new = cluster.put_pod("d", ip="10.0.0.2")
        cluster.put_pod("a", phase="Failed")
        await asyncio.sleep(0.3)
        assert (observed.pods or ())[-1].uid == new["metadata"]["uid"]
        assert "a" not in observed.reasons()


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_missing_permission_is_named_once_with_verb_resource_and_namespace(verb: str) -> None:
    """The verb is the one that was refused. The pods that are known stay."""
    with capture_logs() as logs:
        async with Observed(three_pods()).running() as observed:
            faults = observed.cluster.faults
            faults.status, faults.refused_verb = 403, verb
            observed.cluster.close_watches()
            await asyncio.sleep(RESYNC_S + 200)
            assert len(observed.chosen()) == 3
            assert len(observed.cluster.requests) < 110
    errors = [line["error"] for line in logs]
    assert len(errors) == 1
    assert f"{verb} is not permitted" in errors[0] and 'resources: ["pods"], verbs: ["list", "watch"]' in errors[0]
    assert "namespace ns" in errors[0] and f'cannot {verb} resource "pods"' in errors[0]


async def test_a_rotated_token_is_used_within_a_watch(tmp_path: Path) -> None:
    """The kubelet replaces the file."""
    token = tmp_path / "token"
    token.write_text("first\n")
    async with Observed(three_pods(), token=str(token)).running() as observed:
        token.write_text("second\n")
        await asyncio.sleep(WATCH_S[1] + 1)
        sent = [request.headers["authorization"] for request in observed.cluster.requests]
        assert (sent[0], sent[-1]) == ("Bearer first", "Bearer second")


async def test_lost_changes_are_counted_and_status_writes_cause_no_new_sets() -> None:
    """A kubelet writes the status of a pod often."""
    async with Observed(three_pods()).running() as observed:
        sets = observed.sets
        for _ in range(50):
            observed.cluster.put_pod("a")
        await asyncio.sleep(CONVERGED_S)
        assert (observed.sets, observed.status.resync_differences) == (sets, 0)
        observed.cluster.faults.drop = 1
        observed.cluster.delete("b")
        await asyncio.sleep(CONVERGED_S)
        assert observed.status.resync_differences == 1


async def test_many_events_at_once_are_applied_within_a_second() -> None:
    """Reading events together does not delay a rolling update."""
    async with Observed(three_pods()).running() as observed:
        for number in range(500):
            observed.cluster.put_pod(f"new-{number}", ip=f"10.1.{number // 250}.{number % 250}")
        await asyncio.sleep(1)
        assert observed.chosen() == observed.cluster.ready_uids()
        assert observed.sets < 10


async def test_long_lists_are_read_in_pages_and_namespaces_separately() -> None:
    """A namespace whose pods cannot be read does not hide the others."""
    cluster = three_pods()
    cluster.page = 2
    cluster.put_pod("a", namespace="other")
    for namespaces in (("ns", "other"), ("*",)):
        async with Observed(cluster, namespaces=namespaces).running() as observed:
            assert sorted(observed.reasons()) == ["ns/a", "ns/b", "ns/c", "other/a"]


async def test_zones_come_from_nodes_where_permissions_allow_it() -> None:
    """They are read once a node, and never delay the pods."""
    cluster = three_pods()
    cluster.nodes["node-1"] = {"topology.kubernetes.io/zone": "z1", "rack": "r1"}
    async with Observed(cluster, rack_label="rack").running() as observed:
        cluster.put_pod("d")
        await asyncio.sleep(1)
        assert {(pod.config.zone, pod.config.rack, pod.config.host) for pod in observed.pods or ()} == {
            ("z1", "r1", "node-1")
        }
        assert sum("nodes" in request.url.path for request in cluster.requests) == 1


# --- any history ---

NAMES = st.sampled_from("abcdef")
TRUE_CHANGES = st.one_of(
    st.tuples(st.just("put"), NAMES, st.booleans()),
    st.tuples(st.just("terminate"), NAMES, st.just(True)),
    st.tuples(st.just("delete"), NAMES, st.just(True)),
)
HARMLESS = st.tuples(st.sampled_from(["close", "repeat"]), NAMES, st.booleans())
HARMFUL = st.tuples(
    st.sampled_from(
        ["drop", "lie DELETED", "lie MODIFIED", "garbage", "silent", "down", "410", "410 in stream", "500"]
    ),
    NAMES,
    st.booleans(),
)


def step(cluster: FakeKubernetes, kind: str, name: str, on: bool) -> None:
    """One step of a history."""
    faults, exists = cluster.faults, ("pods", "ns", name) in cluster.objects
    if kind == "put":
        cluster.put_pod(name, ready=on)
    elif kind == "terminate" and exists:
        cluster.terminate(name)
    elif kind == "delete":
        cluster.delete(name)
    elif kind == "close":
        cluster.close_watches()
    elif kind == "drop":
        faults.drop = 1
    elif kind == "garbage":
        cluster.garbage()
    elif kind.startswith("lie"):
        cluster.lie(kind.removeprefix("lie "), name)
    elif kind in ("repeat", "silent", "down"):
        setattr(faults, kind, on)
    elif kind.startswith("410"):
        faults.forget, faults.forget_in_stream = on, "stream" in kind
    elif kind == "500":
        faults.status = 500 if on else 0


@given(st.lists(st.tuples(st.one_of(TRUE_CHANGES, HARMLESS, HARMFUL), st.sampled_from([0, 0.3, 5, 90])), max_size=25))
async def test_after_any_history_the_pods_converge_to_the_list(
    history: list[tuple[tuple[str, str, bool], float]],
) -> None:
    """Within `CONVERGED_S` after the faults are over."""
    async with Observed(three_pods()).running() as observed:
        for (kind, name, on), wait_s in history:
            step(observed.cluster, kind, name, on)
            await asyncio.sleep(wait_s)
        observed.cluster.faults = Faults()
        await asyncio.sleep(CONVERGED_S)
        assert observed.chosen() == observed.cluster.ready_uids()
        known = {pod["metadata"]["uid"] for pod in observed.cluster.objects.values()}
        assert {pod.uid for pod in observed.pods or ()} <= known


@given(st.lists(st.one_of(TRUE_CHANGES, HARMLESS), max_size=25))
async def test_while_the_watch_works_a_change_takes_less_than_a_second(history: list[tuple[str, str, bool]]) -> None:
    """Also if events are repeated in another order, and watches end. No other pod is chosen, and none is missing."""
    async with Observed(three_pods()).running() as observed:
        for kind, name, on in history:
            step(observed.cluster, kind, name, on)
            await asyncio.sleep(1)
            assert observed.chosen() == observed.cluster.ready_uids()
