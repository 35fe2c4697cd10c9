"""Which pods exist, by the configuration, other sources and admin calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from router.config.pod_schema import KvEvents, PodAuth, PodConfig
from router.engines.adapter import KvEventSource
from router.errors import ConfigError
from router.feeds.discovery.membership import ConfiguredPods, ListedPod, Membership, PodSource, configured_pods
from router.feeds.supervise import STEP
from router.fleet.drains import Drain
from router.fleet.fleet import Fleet, PodEvent
from router.types import PodSpeed, PodState, Role
from tests.kit.scenes import SPEED


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (PodConfig(url="http://10.0.0.7:8000"), ["10.0.0.7:8000"]),
        (PodConfig(url="https://gate.svc/pods/3/"), ["gate.svc/pods/3"]),
        (PodConfig(url="http://10.0.0.7:8000", dp_size=2), ["10.0.0.7:8000#0", "10.0.0.7:8000#1"]),
        (PodConfig(url="http://10.0.0.7:8000", id="left", dp_size=2), ["left#0", "left#1"]),
    ],
)
def test_a_definition_yields_one_pod_per_rank(config: PodConfig, ids: list[str]) -> None:
    """The default id comes from the URL."""
    found = configured_pods(config, SPEED)
    assert [pod.id for pod in found] == ids
    assert [pod.dp_rank for pod in found] == ([None] if config.dp_size == 1 else [0, 1])
    assert {pod.url for pod in found} == {config.url}


def test_a_pod_has_the_engine_role_and_topology_of_its_definition() -> None:
    """Its speed is the prior."""
    config = PodConfig(
        url="http://p:1", engine="sglang", role=Role.PREFILL, handoff="bootstrap", host="h", rack="r", zone="z"
    )
    (pod,) = configured_pods(config, SPEED)
    assert (pod.engine, pod.role, pod.speed) == ("sglang", Role.PREFILL, SPEED)
    assert (pod.host, pod.rack, pod.zone) == ("h", "r", "z")


def test_pods_with_different_configured_speeds_do_not_share_a_calibration() -> None:
    """Each observation of one would reset the fit of the other."""
    slower = replace(SPEED, c1_ms_per_token=SPEED.c1_ms_per_token * 2)
    first, same, other, plain = (
        configured_pods(PodConfig(url=f"http://p:{number}", hardware="h100x4", speed=speed), speed or SPEED)[0].hardware
        for number, speed in enumerate((SPEED, SPEED, slower, None))
    )
    assert first == same and len({first, other, plain}) == 3 and plain == "h100x4"


def test_a_pod_has_the_kv_dialects_of_its_definition() -> None:
    """On every rank. KV bytes per token are unknown by default."""
    config = PodConfig(url="http://p:1", dp_size=2, handoff="nixl", pulls="p2p")
    for pod in configured_pods(config, SPEED, 131_072):
        assert (pod.handoff, pod.pulls, pod.kv_bytes_per_token) == ("nixl", "p2p", 131_072)
    (plain,) = configured_pods(PodConfig(url="http://p:1"), SPEED)
    assert (plain.handoff, plain.pulls, plain.kv_bytes_per_token) == ("", "", 0)


PRIORS = {"": (SPEED, 0), "big": (replace(SPEED, c0_ms=9.0), 500)}


def prior(config: PodConfig, models: tuple[str, ...]) -> tuple[PodSpeed, int]:
    if config.hardware == "wrong":
        raise ConfigError("hardware: no prior")
    return PRIORS[models[0] if models else ""]


def configs(*names: str, zone: str = "") -> list[PodConfig]:
    return [PodConfig(url=f"http://{name}", zone=zone) for name in names]


def listed(pods: list[PodConfig], uid: str = "", drain_reason: str = "") -> list[ListedPod]:
    return [ListedPod(pod, uid, drain_reason) for pod in pods]


def membership(*sources: PodSource) -> tuple[Fleet, Membership]:
    fleet = Fleet()
    return fleet, Membership(fleet, prior, {str(number): source for number, source in enumerate(sources)})


def ids(fleet: Fleet) -> list[str]:
    return [status.pod.id for status in fleet.snapshot.pods]


class ChangingPods:
    """A source whose sets the test provides."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[list[PodConfig]] = asyncio.Queue()

    async def __aiter__(self) -> AsyncGenerator[list[ListedPod], None]:
        while True:
            yield listed(await self.sets.get())


def test_two_pods_with_one_id_are_rejected_and_the_old_set_stays() -> None:
    """Also when two sources list them."""
    fleet, members = membership(ConfiguredPods(()), ConfiguredPods(()))
    members.replace("0", listed(configs("a")))
    twin = PodConfig(url="http://b", id="a")
    with pytest.raises(ConfigError, match="duplicate id a"):
        members.replace("0", listed([*configs("a"), twin]))
    with pytest.raises(ConfigError, match="duplicate id a"):
        members.replace("1", listed([twin]))
    with pytest.raises(ConfigError, match="duplicate id a"):
        members.add(twin)
    assert ids(fleet) == ["a"]


@pytest.mark.anyio
async def test_the_fleet_follows_the_union_of_all_sources() -> None:
    """A later source wins where two list one URL; a pod with an error is skipped."""
    changing = ChangingPods()
    fleet, members = membership(ConfiguredPods(configs("a")), changing)
    tasks = [asyncio.ensure_future(run()) for run in members.feeds.values()]
    try:
        for pods, expected in (
            (configs("b", "c"), ["a", "b", "c"]),
            ([PodConfig(url="http://x", id="a"), *configs("b")], ["a", "b"]),
            ([*configs("d"), PodConfig(url="http://x", hardware="wrong")], ["a", "d"]),
            (configs("a", zone="z"), ["a"]),
            ([], ["a"]),
        ):
            changing.sets.put_nowait(pods)
            for _ in range(5):
                await asyncio.sleep(0)
            assert ids(fleet) == expected
            assert fleet.snapshot.pods[0].pod.zone == ("z" if pods == configs("a", zone="z") else "")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_admin_calls_win_over_sources() -> None:
    """A removed pod is ignored while its source lists it, and returns when it is added."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a", "b")))
    members.add(configs("b", zone="z")[0])
    assert [status.pod.zone for status in fleet.snapshot.pods] == ["", "z"]
    assert members.remove("a")
    assert not members.remove("a")
    members.replace("0", listed(configs("a", "b", "c")))
    assert ids(fleet) == ["b", "c"]
    members.add(configs("a")[0])
    assert ids(fleet) == ["a", "b", "c"]


def test_a_removed_pod_returns_after_its_source_did_not_list_it() -> None:
    """The URL may belong to another pod by then."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a")))
    assert members.remove("a")
    members.replace("0", listed([]))
    members.replace("0", listed(configs("a")))
    assert ids(fleet) == ["a"]


def test_removal_covers_all_ranks_of_a_url() -> None:
    """They are one process."""
    fleet, members = membership()
    members.add(PodConfig(url="http://a", dp_size=2))
    assert ids(fleet) == ["a#0", "a#1"]
    assert members.remove("a#1")
    assert ids(fleet) == []


def test_a_pod_gets_the_prior_of_the_model_that_it_reports() -> None:
    """Before that, the default prior."""
    fleet, members = membership()
    members.add(configs("a")[0])
    fleet.describe("a", models=("big",))
    members.refresh_prior(members.pods[0])
    (status,) = fleet.snapshot.pods
    assert (status.pod.speed, status.pod.kv_bytes_per_token, status.pod.models) == (*PRIORS["big"], ("big",))
    assert members.pods[0].speed == PRIORS["big"][0]


@pytest.mark.parametrize(
    ("kv_events", "expected"),
    [
        ("auto", KvEventSource("tcp://engine", None)),
        ("off", None),
        (KvEvents(endpoint="tcp://own:1"), KvEventSource("tcp://own:1", None)),
    ],
)
def test_configured_kv_events_win_over_reported_ones(
    kv_events: KvEvents | Literal["auto", "off"], expected: KvEventSource | None
) -> None:
    """`off` wins as well; a pod that is gone has none."""
    _, members = membership()
    members.add(PodConfig(url="http://a", kv_events=kv_events))
    pod = members.pods[0]
    assert members.kv_events_of(pod, KvEventSource("tcp://engine", None)) == expected
    assert members.remove(pod.id)
    assert members.kv_events_of(pod, KvEventSource("tcp://engine", None)) is None


def test_admin_calls_can_only_name_credential_files_of_the_configuration() -> None:
    """Otherwise a caller could have any file of the router sent to a server of its own."""
    auth = PodAuth(bearer_file="/run/secrets/key")
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed([PodConfig(url="http://a", auth=auth)]))
    members.add(PodConfig(url="http://b", auth=auth))
    with pytest.raises(ConfigError, match="bearer_file"):
        members.add(PodConfig(url="http://c", auth=PodAuth(bearer_file="/etc/shadow")))
    assert [status.pod.bearer_file for status in fleet.snapshot.pods] == [auth.bearer_file] * 2


DRAIN = Drain(1_764_590_400.0, "ada", "new power supply")


def state(fleet: Fleet, pod_id: str = "a") -> PodState | None:
    status = fleet.status(pod_id)
    return status.state if status else None


def test_a_new_uid_at_the_same_url_is_a_new_epoch() -> None:
    """The old process is gone, with its cache."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a"), uid="1"))
    fleet.event("a", PodEvent.PROBE_OK, 1.0)
    epoch = fleet.snapshot.pods[0].pod.epoch
    members.replace("0", listed(configs("a"), uid="1"))
    assert (state(fleet), fleet.snapshot.pods[0].pod.epoch) == (PodState.READY, epoch)
    members.replace("0", listed(configs("a"), uid="2"))
    assert state(fleet) is PodState.JOINING
    assert fleet.snapshot.pods[0].pod.epoch > epoch


def test_a_pod_that_its_source_drains_keeps_its_epoch_and_joins_again_afterwards() -> None:
    """Its index entries belong to the epoch."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a")))
    fleet.event("a", PodEvent.PROBE_OK, 1.0)
    epoch = fleet.snapshot.pods[0].pod.epoch
    members.replace("0", listed(configs("a"), drain_reason="not ready"))
    assert (state(fleet), fleet.state_reason("a")) == (PodState.DRAINING, "not ready")
    fleet.event("a", PodEvent.PROBE_OK, 2.0)
    assert state(fleet) is PodState.DRAINING
    members.replace("0", listed(configs("a")))
    assert (state(fleet), fleet.snapshot.pods[0].pod.epoch) == (PodState.JOINING, epoch)


async def drain(members: Membership, selector: str, change: Drain | None) -> None:
    """As an admin call does."""
    members.drains.change(selector, change)
    await members.follow_drains()


@pytest.mark.anyio
@pytest.mark.parametrize("first_by_admin", [True, False])
async def test_a_pod_is_drained_while_its_source_or_an_admin_call_drains_it(first_by_admin: bool) -> None:
    """In any order."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a")))
    if first_by_admin:
        await drain(members, "pod=a", DRAIN)
    members.replace("0", listed(configs("a"), drain_reason="not ready"))
    await drain(members, "pod=a", DRAIN)
    if first_by_admin:
        members.replace("0", listed(configs("a")))
        assert state(fleet) is PodState.DRAINING
        await drain(members, "pod=a", None)
        assert state(fleet) is PodState.JOINING
    else:
        await drain(members, "pod=a", None)
        assert (state(fleet), fleet.state_reason("a")) == (PodState.DRAINING, "not ready")
        members.replace("0", listed(configs("a")))
        assert state(fleet) is PodState.JOINING


@pytest.mark.anyio
async def test_a_pod_that_returns_is_not_drained_for_its_predecessor() -> None:
    """Both kinds of drain end with the process."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a"), uid="1", drain_reason="terminating"))
    await drain(members, "pod=a", DRAIN)
    members.replace("0", listed(configs("a"), uid="2"))
    assert state(fleet) is PodState.JOINING


def test_a_pod_that_an_admin_call_removes_here_stays_drained_for_other_routers() -> None:
    _, members = membership(ConfiguredPods(()))
    members.replace("0", listed(configs("a")))
    members.drains.change("pod=a", DRAIN)
    assert members.remove("a") and members.drains.unshared == {"pod=a": DRAIN}


@pytest.mark.anyio
async def test_a_drain_by_label_holds_for_pods_that_come_later() -> None:
    """And for a pod that gets the label; it ends with the drain alone, not when another feed undrains the pod."""
    fleet, members = membership(ConfiguredPods(()))
    await drain(members, "rack=r12", DRAIN)
    members.replace("0", listed([PodConfig(url="http://a", id="a", rack="r12"), PodConfig(url="http://b", id="b")]))
    assert (state(fleet, "a"), state(fleet, "b")) == (PodState.DRAINING, PodState.JOINING)
    assert fleet.state_reason("a") == "drained by ada, 2025-12-01 12:00 UTC, rack=r12: new power supply"
    members.replace("0", listed([PodConfig(url=f"http://{name}", id=name, rack="r12") for name in "ab"], uid="2"))
    assert {state(fleet, "a"), state(fleet, "b")} == {PodState.DRAINING}
    fleet.event("a", PodEvent.UNDRAIN)  # as the load feed does after a pod was scaled
    assert state(fleet, "a") is PodState.DRAINING
    await drain(members, "rack=r12", None)
    assert {state(fleet, "a"), state(fleet, "b")} == {PodState.JOINING}


@pytest.mark.anyio
async def test_the_loop_runs_while_many_pods_are_drained_and_a_caller_that_leaves_stops_nothing() -> None:
    """500 pods by one label take 18 ms."""
    fleet, members = membership(ConfiguredPods(()))
    members.replace("0", listed([PodConfig(url=f"http://{n}", id=f"{n}", rack="r12") for n in range(500)]))
    members.drains.change("rack=r12", DRAIN)
    following = asyncio.ensure_future(members.follow_drains())
    drained: list[int] = []
    while len(drained) < 2 or drained[-1] < 500:
        await asyncio.sleep(0)
        drained.append(sum(status.state is PodState.DRAINING for status in fleet.snapshot.pods))
        following.cancel()
    assert max(later - before for before, later in pairwise(drained)) <= STEP


@pytest.mark.anyio
async def test_a_mistake_in_a_pod_is_logged_once_while_it_lasts() -> None:
    """Sets follow each other quickly."""
    changing = ChangingPods()
    _, members = membership(changing)
    task = asyncio.ensure_future(*[run() for run in members.feeds.values()])
    wrong = PodConfig(url="http://x", hardware="wrong")
    with capture_logs() as logs:
        for pods in ([wrong], [wrong, *configs("a")], configs("a"), [wrong]):
            changing.sets.put_nowait(pods)
            for _ in range(5):
                await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [(line["event"], line["url"]) for line in logs] == [("pod rejected", "http://x")] * 2


# --- what pods report about themselves ---


def reported(config: PodConfig, engine: str, dp_size: int, uid: str = "u") -> tuple[Membership, Fleet, bool]:
    """A pod that was found and has answered its first probe."""
    fleet = Fleet()
    members = Membership(fleet, lambda *_: (SPEED, 0), {"source": ConfiguredPods([])})
    members.replace("source", [ListedPod(config, uid)])
    return members, fleet, members.report(fleet.snapshot.pods[0].pod, engine, dp_size)


@pytest.mark.parametrize(
    ("definition", "engine", "dp_size", "expected"),
    [
        ({}, "sglang", 1, [("p", "sglang")]),
        ({}, "", 2, [("p#0", "vllm"), ("p#1", "vllm")]),
        ({}, "sglang", 2, [("p#0", "sglang"), ("p#1", "sglang")]),
        ({"engine": "vllm"}, "sglang", 1, [("p", "vllm")]),
        ({"dp_size": 1}, "vllm", 2, [("p", "vllm")]),
        ({}, "vllm", 1, [("p", "vllm")]),
    ],
)
def test_engine_and_ranks_are_what_the_pod_reports_where_its_definition_is_silent(
    definition: dict[str, Any], engine: str, dp_size: int, expected: list[tuple[str, str]]
) -> None:
    """A pod that is another because of that joins anew."""
    _, fleet, is_another = reported(PodConfig(url="http://p:1", id="p", **definition), engine, dp_size)
    assert [(status.pod.id, status.pod.engine) for status in fleet.snapshot.pods] == expected
    assert is_another is (expected != [("p", "vllm")])
    assert {status.state for status in fleet.snapshot.pods} == {PodState.JOINING}


def test_reported_facts_last_as_long_as_the_process() -> None:
    """The next set of the source changes nothing, another uid is asked again."""
    config = PodConfig(url="http://p:1", id="p")
    members, fleet, _ = reported(config, "sglang", 2)
    epochs = [status.pod.epoch for status in fleet.snapshot.pods]
    members.replace("source", [ListedPod(config, "u")])
    first = fleet.snapshot.pods[0].pod
    assert members.report(first, "sglang", 2) is False
    assert [status.pod.epoch for status in fleet.snapshot.pods] == epochs
    members.replace("source", [ListedPod(config, "another")])
    assert [(status.pod.id, status.pod.engine) for status in fleet.snapshot.pods] == [("p", "vllm")]


def test_a_default_handoff_follows_the_reported_engine() -> None:
    """One that the definition names stays."""
    for handoff, expected in (("nixl", "bootstrap"), ("mooncake", "mooncake")):
        config = PodConfig(url="http://p:1", id="p", role=Role.PREFILL, handoff=handoff)
        _, fleet, _ = reported(config, "sglang", 1)
        assert fleet.snapshot.pods[0].pod.handoff == expected


def test_reported_ranks_whose_ids_are_taken_are_not_used() -> None:
    """The pod stays as it was."""
    fleet = Fleet()
    members = Membership(fleet, lambda *_: (SPEED, 0), {"source": ConfiguredPods([])})
    pods = [PodConfig(url="http://p:1", id="p"), PodConfig(url="http://q:1", id="p#1")]
    members.replace("source", [ListedPod(pod) for pod in pods])
    with capture_logs() as logs:
        assert members.report(fleet.snapshot.pods[0].pod, "vllm", 2) is False
    assert [status.pod.id for status in fleet.snapshot.pods] == ["p", "p#1"]
    assert "duplicate id p#1" in logs[0]["error"]
