"""Which pods exist, by the configuration, other sources and admin calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from router.config.pod_schema import KvEvents, PodAuth, PodConfig
from router.engines.adapter import KvEventSource
from router.errors import ConfigError
from router.feeds.discovery.membership import ADMIN, ConfiguredPods, ListedPod, Membership, PodSource, configured_pods
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


async def drain(members: Membership, selector: str, change: Drain | None) -> None:
    """As an admin call does."""
    members.drains.change(selector, change)
    await members.follow_drains()


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


def test_a_default_handoff_follows_the_reported_engine() -> None:
    """One that the definition names stays."""
    for handoff, expected in (("nixl", "bootstrap"), ("mooncake", "mooncake")):
        fleet, members = membership(ConfiguredPods(()))
        members.replace("0", listed([PodConfig(url="http://p:1", id="p", role=Role.PREFILL, handoff=handoff)]))
        assert members.report(members.pods[0], "sglang", 1)
        assert fleet.snapshot.pods[0].pod.handoff == expected


# --- any history ---

HOSTS = st.sampled_from("abc")
WRITTEN = st.fixed_dictionaries(
    {"url": HOSTS.map("http://{}".format), "zone": st.sampled_from(["", "z"])},
    optional={
        "id": st.sampled_from(["a", "twin"]),
        "dp_size": st.sampled_from([1, 2]),
        "rack": st.just("r12"),
        "engine": st.sampled_from(["vllm", "sglang"]),
        "hardware": st.just("wrong"),
    },
).map(PodConfig.model_validate)
LISTED = st.builds(ListedPod, WRITTEN, st.sampled_from(["", "1", "2"]), st.sampled_from(["", "", "not ready"]))
SETS = st.lists(LISTED, max_size=3, unique_by=lambda pod: pod.config.url)
SOURCES = ("file", "cluster")
IDS = st.sampled_from(["a", "b", "c", "twin", "a#1", "twin#0"])


class AnyMembers(RuleBasedStateMachine):
    """Sets of two sources, admin calls, reports of pods and drains, in any order. What should be follows from all that
    was said: the last set of each source, what admin calls added and removed, and the drains in force."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.members = Membership(self.fleet, prior, {name: ConfiguredPods(()) for name in SOURCES})
        self.said: dict[str, list[ListedPod]] = {name: [] for name in (*SOURCES, ADMIN)}
        self.removed: set[str] = set()
        self.reported: dict[str, tuple[str, str, int]] = {}
        self.drains: set[str] = set()
        self.expected: dict[str, tuple[ListedPod, PodState]] = {}
        self.epochs: dict[str, int] = {}
        self.gone: set[int] = set()
        """Epochs of pods that are gone."""

    def listed(self, said: Mapping[str, list[ListedPod]], removed: set[str]) -> list[ListedPod]:
        """The pods that exist then: by URL, the one that was said by the last source, with what it reported itself."""
        by_url = {pod.config.url: pod for pods in said.values() for pod in pods if pod.config.url not in removed}
        return [self.with_reports(pod) for pod in by_url.values()]

    def with_reports(self, pod: ListedPod) -> ListedPod:
        uid, engine, dp_size = self.reported.get(pod.config.url, (None, "", 1))
        if uid != pod.uid:
            return pod
        facts = {"engine": engine, "dp_size": dp_size}
        written = pod.config.model_fields_set
        own = {name: value for name, value in facts.items() if name not in written}
        return replace(pod, config=pod.config.model_copy(update=own))

    def apply(self, said: dict[str, list[ListedPod]], removed: set[str], call: Callable[[], object]) -> None:
        """The call makes this set the current one, or raises and changes nothing."""
        pods = self.listed(said, removed)
        if is_wrong(pods):
            with pytest.raises(ConfigError):
                call()
            return
        call()
        known = {pod.config.url for pods in said.values() for pod in pods}
        self.said, self.removed = said, removed & known
        self.reported = {url: facts for url, facts in self.reported.items() if url in known}
        new = {pod_id: pod for pod in pods for pod_id in pod.config.ids}
        for pod_id, (old, _) in list(self.expected.items()):
            if pod_id not in new or not same_process(old, new[pod_id]):
                del self.expected[pod_id]
                self.gone.add(self.epochs.pop(pod_id))
                if old.config.url not in self.removed:
                    self.drains.discard(f"pod={pod_id}")
        for pod_id, pod in new.items():
            _, state = self.expected.get(pod_id, (pod, PodState.JOINING))
            self.expected[pod_id] = pod, state
        self.follow_drains()

    def follow_drains(self) -> None:
        for pod_id, (pod, was) in self.expected.items():
            is_drained = pod.drain_reason or self.drains & {f"pod={pod_id}", f"rack={pod.config.rack}"}
            undrained = PodState.JOINING if was is PodState.DRAINING else was
            self.expected[pod_id] = pod, PodState.DRAINING if is_drained else undrained

    @rule(source=st.sampled_from(SOURCES), pods=SETS)
    def a_source_has_another_set(self, source: str, pods: list[ListedPod]) -> None:
        self.apply({**self.said, source: pods}, self.removed, lambda: self.members.replace(source, pods))

    @rule(config=WRITTEN)
    def an_admin_call_adds(self, config: PodConfig) -> None:
        others = [pod for pod in self.said[ADMIN] if pod.config.url != config.url]
        said = {**self.said, ADMIN: [*others, ListedPod(config)]}
        self.apply(said, self.removed - {config.url}, lambda: self.members.add(config))

    @rule(pod_id=IDS)
    def an_admin_call_removes(self, pod_id: str) -> None:
        """The pod and all ranks of its URL: they are one process."""
        if pod_id not in self.expected:
            assert not self.members.remove(pod_id)
            return
        url = self.expected[pod_id][0].config.url
        said = {**self.said, ADMIN: [pod for pod in self.said[ADMIN] if pod.config.url != url]}
        self.apply(said, self.removed | {url}, lambda: self.members.remove(pod_id))

    @rule(pod_id=IDS, engine=st.sampled_from(["", "sglang"]), dp_size=st.sampled_from([1, 2]))
    def a_pod_reports_its_engine_and_ranks(self, pod_id: str, engine: str, dp_size: int) -> None:
        """Used where the definition is silent, unless two pods would have one id."""
        if (status := self.fleet.status(pod_id)) is None:
            return
        known, pod = self.reported, self.expected[pod_id][0]
        self.reported = {**known, pod.config.url: (pod.uid, engine or pod.config.engine, dp_size)}
        if is_wrong(self.listed(self.said, self.removed)):
            self.reported = known
        answer = list[bool]()
        with capture_logs():
            self.apply(self.said, self.removed, lambda: answer.append(self.members.report(status.pod, engine, dp_size)))
        assert answer == [pod_id not in self.expected or not same_process(pod, self.expected[pod_id][0])]

    @rule(selector=st.one_of(IDS.map("pod={}".format), st.just("rack=r12")), begins=st.booleans())
    def operators_drain_or_end_it(self, selector: str, begins: bool) -> None:
        (self.drains.add if begins else self.drains.discard)(selector)
        self.members.drains.change(selector, DRAIN if begins else None)
        asyncio.run(self.members.follow_drains())
        self.follow_drains()

    @rule(pod_id=IDS)
    def a_probe_succeeds(self, pod_id: str) -> None:
        self.fleet.event(pod_id, PodEvent.PROBE_OK)
        if (known := self.expected.get(pod_id)) and known[1] is PodState.JOINING:
            self.expected[pod_id] = known[0], PodState.READY

    @rule(pod_id=IDS)
    def another_feed_undrains(self, pod_id: str) -> None:
        """A drained pod stays drained."""
        self.fleet.event(pod_id, PodEvent.UNDRAIN)

    @invariant()
    def the_fleet_has_these_pods_in_these_states(self) -> None:
        statuses = {status.pod.id: status for status in self.fleet.snapshot.pods}
        assert statuses.keys() == self.expected.keys()
        for pod_id, (listed, state) in self.expected.items():
            pod, config = statuses[pod_id].pod, listed.config
            assert (statuses[pod_id].state, pod.url, pod.uid) == (state, config.url, listed.uid)
            assert (pod.engine, pod.zone, pod.rack) == (config.engine, config.zone, config.rack)
            assert pod.dp_rank == (config.ids.index(pod_id) if config.dp_size > 1 else None)
            assert self.epochs.setdefault(pod_id, pod.epoch) == pod.epoch and pod.epoch not in self.gone
        assert set(self.members.drains.current) == self.drains


def same_process(one: ListedPod, other: ListedPod) -> bool:
    return (one.config.url, one.uid, one.config.engine) == (other.config.url, other.uid, other.config.engine)


def is_wrong(pods: list[ListedPod]) -> bool:
    """Whether two pods have one id, or one has no prior."""
    ids = [pod_id for pod in pods for pod_id in pod.config.ids]
    return len(set(ids)) < len(ids) or any(pod.config.hardware == "wrong" for pod in pods)


TestAnyMembers = AnyMembers.TestCase
