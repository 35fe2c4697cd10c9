"""Objects of a Kubernetes collection, event by event."""

from __future__ import annotations

import pytest
from msgspec import structs

from router.config.pod_schema import PodConfig
from router.feeds.discovery.kube_api import KubePod, WatchEvent
from router.feeds.discovery.kube_watch import PodTable, WatchPlan
from router.feeds.discovery.kubernetes_pods import Presence

KEY = ("ns", "a")


def pod(uid: str = "1", *, ready: bool = True) -> KubePod:
    return KubePod(key=KEY, uid=uid, ready=ready)


def table() -> PodTable:
    found: PodTable = PodTable()
    found.replace([(pod(), "10")], "20")
    return found


def test_an_event_does_not_bring_back_what_was_deleted() -> None:
    """Uids are never used again. A list may, because the deletion may have been wrong."""
    known = table()
    assert known.apply(WatchEvent("21", KubePod(key=KEY, uid="1"), is_deleted=True))
    assert not known.apply(WatchEvent("22", pod()))
    assert known.pods == {}
    assert known.apply(WatchEvent("23", pod("2")))
    known.replace([(pod(), "10")], "24")
    assert known.pods == {KEY: pod()}
    assert known.apply(WatchEvent("25", pod(ready=False)))


@pytest.mark.parametrize("version", ["9", "x"])
def test_an_older_version_of_an_object_is_ignored(version: str) -> None:
    """Versions that are not numbers cannot be compared."""
    assert table().apply(WatchEvent(version, pod(ready=False))) is (version == "x")


def test_a_deletion_of_an_earlier_object_with_that_name_changes_nothing() -> None:
    """A pod of a StatefulSet has the name of its predecessor."""
    known = table()
    assert not known.apply(WatchEvent("21", KubePod(key=KEY, uid="0"), is_deleted=True))
    assert known.pods == {KEY: pod()}


def test_a_watch_continues_from_the_latest_version() -> None:
    """The version is that of an event or a bookmark, which come in any order."""
    known = table()
    for event in (WatchEvent("30"), WatchEvent("29", pod()), WatchEvent("28")):
        assert not known.apply(event)
    assert known.version == "30"


def test_a_list_returns_how_many_objects_were_different() -> None:
    """Added, removed or changed."""
    other = KubePod(key=("ns", "b"), uid="2")
    assert table().replace([(pod(), "11")], "30") == 0
    assert table().replace([(pod(ready=False), "11"), (other, "12")], "30") == 2
    assert table().replace([(other, "12")], "30") == 2


def test_pauses_grow_to_three_seconds_and_follow_the_server() -> None:
    """After a success they are short again."""
    plan = WatchPlan(300.0, lambda: 1.0)
    assert [plan.failed(0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert plan.failed(429, 20.0) == 20.0
    assert plan.failed(429, 9999.0) == 30.0
    plan.watch_ended(60.0, 0)
    assert plan.failed(0) == 0.5


def test_an_expired_watch_of_a_server_that_is_back_does_not_continue_its_pauses() -> None:
    """The list that follows waits as after a first failure. Lists that expire as well wait longer and longer."""
    plan = WatchPlan(300.0, lambda: 1.0)
    plan.listed(0.0)
    assert [plan.failed(0) for _ in range(5)][-1] == 3.0
    assert [plan.failed(410) for _ in range(3)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_pods_with_one_address_the_one_that_listens_there_is_last(first: int) -> None:
    """Not the terminating one, and of two others the newer one."""
    config = PodConfig(url="http://a")
    old, new, latest = (KubePod(key=KEY, uid=uid, ready=True, created=f"2026-0{uid}") for uid in "123")
    presence = Presence(60.0)
    presence.update([(config, latest)], 0.0)
    seen = [(config, each) for each in (new, structs.replace(latest, terminating=True), old)][:: 1 if first else -1]
    assert [listed.uid for listed in presence.update(seen, 1.0)] == ["3", "1", "2"]
