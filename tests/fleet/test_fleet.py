"""The fleet owns the facts and states of pods and notifies listeners of changes; a table has the transitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.fleet import TRANSITIONS, Fleet, PodEvent, transition
from router.types import Link, Links, Pod, PodLoad, PodSpeed, PodState, PrefixTrust, Role
from tests.kit.scenes import make_pod

Change = tuple[str, PodState, PodState]


def states(fleet: Fleet) -> dict[str, PodState]:
    return {status.pod.id: status.state for status in fleet.snapshot.pods}


def listening(fleet: Fleet) -> list[Change]:
    changes: list[Change] = []
    fleet.listen(lambda pod, old, new: changes.append((pod.id, old, new)))
    return changes


def test_a_complete_set_adds_and_removes() -> None:
    """New pods join, missing ones are gone, the order is by id."""
    fleet = Fleet()
    changes = listening(fleet)
    fleet.sync([make_pod("b"), make_pod("a")])
    assert list(states(fleet).items()) == [("a", PodState.JOINING), ("b", PodState.JOINING)]
    fleet.sync([make_pod("c"), make_pod("b")])
    assert list(states(fleet)) == ["b", "c"]
    assert changes[-2:] == [("a", PodState.JOINING, PodState.GONE), ("c", PodState.GONE, PodState.JOINING)]
    assert fleet.status("a") is None


class CountedId(str):
    """Counts comparisons."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        CountedId.compared += 1
        return str.__lt__(self, other)


def test_many_pods_are_added_at_once() -> None:
    """Sorted once, not once for each."""
    CountedId.compared, many = 0, 512
    fleet = Fleet()
    fleet.sync([make_pod(CountedId(f"pod-{number * 7 % many:04}")) for number in range(many)])
    assert [status.pod.id for status in fleet.snapshot.pods] == [f"pod-{number:04}" for number in range(many)]
    assert CountedId.compared <= 10 * many


def test_what_is_learnt_survives_discovery() -> None:
    """State, load, facts, trust and epoch stay; what discovery owns follows it."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    facts: dict[str, Any] = {"max_model_len_tokens": 4096, "block_size_tokens": 32, "capacity_tokens": 1600}
    fleet.describe("a", models=("m",), version="0.32.0", **facts)
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.trust("a", PrefixTrust.TRUSTED, "tokens agree")
    fleet.observe_load("a", PodLoad(3, 1, 0.5, 9.0))
    before = fleet.snapshot.pods[0]
    fleet.sync([make_pod("a", role=Role.DECODE, zone="z")])
    after = fleet.snapshot.pods[0]
    assert (after.state, after.load) == (PodState.READY, PodLoad(3, 1, 0.5, 9.0))
    assert (after.pod.role, after.pod.zone) == (Role.DECODE, "z")
    assert (after.pod.models, after.pod.capacity_tokens, after.pod.version) == (("m",), 1600, "0.32.0")
    assert (after.pod.trust, after.pod.epoch) == (PrefixTrust.TRUSTED, before.pod.epoch)
    assert fleet.trust_reason("a") == "tokens agree"


def test_links_are_in_every_snapshot() -> None:
    """Also after pods are added."""
    links = Links(elsewhere=Link(1.0, 10.0))
    fleet = Fleet(links)
    assert fleet.snapshot.links is links
    fleet.sync([make_pod("a")])
    assert fleet.snapshot.links is links


@pytest.mark.parametrize("changed", [{"url": "http://elsewhere:1"}, {"socket": "/s"}, {"bearer_file": "/key"}])
def test_another_process_under_the_same_id_is_another_pod(changed: dict[str, str]) -> None:
    """Nothing of the old one holds: no block, no connection."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    fleet.event("a", PodEvent.PROBE_OK)
    old = fleet.snapshot.pods[0].pod
    changes = listening(fleet)
    fleet.sync([make_pod("a", **changed)])
    new = fleet.snapshot.pods[0]
    assert changes == [("a", PodState.READY, PodState.GONE), ("a", PodState.GONE, PodState.JOINING)]
    assert new.state is PodState.JOINING
    assert new.pod.epoch > old.epoch


def test_no_two_lives_share_an_epoch() -> None:
    """Lost and found again, or restarted: the epoch only grows."""
    fleet = Fleet()
    epochs = []
    for _ in range(2):
        fleet.sync([make_pod("a"), make_pod("b")])
        fleet.restarted("a")
        epochs += [status.pod.epoch for status in fleet.snapshot.pods]
        fleet.sync([])
    assert len(set(epochs)) == 4
    assert all(epoch > 0 for epoch in epochs)


def test_a_restart_resets_trust_and_load_but_not_the_models() -> None:
    """It goes on serving, untested and with no load; listeners see the new epoch."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    fleet.describe("a", models=("m",))
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.trust("a", PrefixTrust.TRUSTED, "fine")
    fleet.observe_load("a", PodLoad(5, 5, 1.0, 1.0))
    epoch = fleet.snapshot.pods[0].pod.epoch
    epochs: list[int] = []
    fleet.listen(lambda pod, old, new: epochs.append(pod.epoch))
    before = fleet.snapshot.pods[0].pod
    assert fleet.same_epoch(before) == fleet.snapshot.pods[0]
    fleet.restarted("a")
    assert fleet.same_epoch(before) is None
    status = fleet.snapshot.pods[0]
    assert (status.state, status.load) == (PodState.READY, PodLoad())
    assert (status.pod.models, status.pod.trust) == (("m",), PrefixTrust.UNTESTED)
    assert fleet.trust_reason("a") == ""
    assert epochs == [status.pod.epoch]
    assert status.pod.epoch > epoch


def test_the_snapshot_is_rebuilt_on_change_only() -> None:
    """The same object until something is different; then a higher version."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    first = fleet.snapshot
    fleet.sync([make_pod("a")])
    fleet.event("a", PodEvent.EJECT)
    fleet.describe("a", models=())
    assert fleet.snapshot is first
    fleet.observe_load("a", PodLoad(1, 0, 0.0, 1.0))
    assert fleet.snapshot.version > first.version
    assert first.pods[0].load == PodLoad()


def test_late_updates_of_a_removed_pod_are_ignored() -> None:
    """Answers may arrive after the pod was removed."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    fleet.sync([])
    changes = listening(fleet)
    fleet.describe("a", models=("m",))
    fleet.observe_load("a", PodLoad(1))
    fleet.trust("a", PrefixTrust.TRUSTED, "")
    fleet.restarted("a")
    assert fleet.event("a", PodEvent.PROBE_OK) is PodState.GONE
    assert (fleet.snapshot.pods, changes, fleet.resolve("m")) == ((), [], None)


def test_listeners_are_called_once_per_change_until_they_are_removed() -> None:
    """A listener that has been removed is not called."""
    fleet = Fleet()
    changes: list[PodState] = []
    fleet.sync([make_pod("a")])
    unlisten = fleet.listen(lambda pod, old, new: changes.append(new))
    assert fleet.event("a", PodEvent.PROBE_OK) is PodState.READY
    assert fleet.event("a", PodEvent.PROBE_OK) is PodState.READY
    unlisten()
    fleet.event("a", PodEvent.DRAIN)
    assert changes == [PodState.READY]


def test_a_name_resolves_to_a_base_model_and_an_adapter() -> None:
    """Base names stand for themselves, adapters for their pod's base; unknown and forgotten names for nothing."""
    fleet = Fleet()
    fleet.sync([make_pod("a"), make_pod("b")])
    assert fleet.resolve("m") is None
    fleet.describe("a", models=("m", "m-alias"), adapters=("sql", "b-base"))
    fleet.describe("b", models=("b-base",))
    assert fleet.resolve("m-alias") == ("m-alias", "")
    assert fleet.resolve("sql") == ("m", "sql")
    assert fleet.resolve("b-base") == ("b-base", "")
    fleet.sync([make_pod("b")])
    assert fleet.resolve("sql") is None


events = st.lists(
    st.one_of(
        st.tuples(st.just("sync"), st.sets(st.sampled_from("abcd"))),
        st.tuples(st.sampled_from(PodEvent), st.sampled_from("abcd")),
        st.tuples(st.just("restarted"), st.sampled_from("abcd")),
    ),
    max_size=30,
)


@given(history=events)
def test_listeners_alone_can_rebuild_the_fleet(history: list[tuple[str, str]]) -> None:
    """A mirror built from the notifications alone always equals the snapshot."""
    fleet = Fleet()
    mirror: dict[str, tuple[int, PodState]] = {}

    def follow(pod: Pod, old: PodState, new: PodState) -> None:
        assert mirror.get(pod.id, (0, PodState.GONE))[1] is old
        mirror[pod.id] = (pod.epoch, new)
        if new is PodState.GONE:
            del mirror[pod.id]

    fleet.listen(follow)
    for what, subject in history:
        if what == "sync":
            fleet.sync([make_pod(pod_id) for pod_id in subject])
        elif what == "restarted":
            fleet.restarted(subject)
        else:
            fleet.event(subject, PodEvent(what))
        snapshot = [(s.pod.id, (s.pod.epoch, s.state)) for s in fleet.snapshot.pods]
        assert snapshot == sorted(mirror.items())


def test_the_time_of_becoming_ready_is_recorded() -> None:
    """Each time that it becomes ready; later configuration does not change it."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    seen: list[float | None] = []
    fleet.listen(lambda pod, old, new: seen.append(pod.ready_since_s) if new is PodState.READY else None)
    fleet.event("a", PodEvent.PROBE_OK, 5.0)
    fleet.event("a", PodEvent.PROBE_OK, 6.0)
    fleet.sync([make_pod("a")])
    status = fleet.status("a")
    assert status is not None and status.pod.ready_since_s == 5.0
    fleet.event("a", PodEvent.EJECT, 7.0)
    fleet.event("a", PodEvent.PROBE_OK, 8.0)
    assert seen == [5.0, 8.0]


def test_a_learnt_speed_is_in_the_next_snapshot() -> None:
    """Other pods, and everything else of this pod, stay as they are."""
    fleet = Fleet()
    fleet.sync([make_pod("a"), make_pod("b")])
    fleet.observe_load("a", PodLoad(3))
    before = fleet.snapshot
    learnt = replace(before.pods[0].pod.speed, c1_ms_per_token=9.0)
    fleet.calibrate({"a": learnt, "gone": learnt}, fleet.snapshot.links)
    after = fleet.snapshot
    assert after.version > before.version
    assert after.pods[0] == replace(before.pods[0], pod=replace(before.pods[0].pod, speed=learnt))
    assert after.pods[1:] == before.pods[1:]


@pytest.mark.parametrize(("factor", "renewed"), [(1.0, False), (1.0019, False), (0.9981, False), (1.003, True)])
@pytest.mark.parametrize("coefficient", ["c0_ms", "c1_ms_per_token"])
def test_a_speed_that_hardly_changes_makes_no_new_snapshot(coefficient: str, factor: float, renewed: bool) -> None:
    """Less than 0.2 % of each coefficient."""
    fleet = Fleet()
    speed = PodSpeed(10.0, 0.5, 0.0)
    fleet.sync([make_pod("a", speed=speed)])
    before = fleet.snapshot
    fleet.calibrate({"a": replace(speed, **{coefficient: getattr(speed, coefficient) * factor})}, before.links)
    assert (fleet.snapshot is not before) is renewed


def test_learnt_links_are_in_the_next_snapshot() -> None:
    """The same links make no new one."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    links = Links(elsewhere=Link(1.0, 10.0))
    fleet.calibrate({}, links)
    assert fleet.snapshot.links is links
    before = fleet.snapshot
    fleet.calibrate({}, Links(elsewhere=Link(1.0, 10.0)))
    assert fleet.snapshot is before


# --- transitions ---


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([PodEvent.FOUND], PodState.JOINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK], PodState.READY),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.EJECT], PodState.EJECTED),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.EJECT, PodEvent.PROBE_OK], PodState.READY),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.PROBE_OK], PodState.DRAINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.EJECT], PodState.DRAINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.UNDRAIN], PodState.JOINING),
        ([PodEvent.FOUND, PodEvent.LOST, PodEvent.PROBE_OK], PodState.GONE),
    ],
)
def test_events_lead_to_the_states_of_the_table(events: list[PodEvent], state: PodState) -> None:
    """From before it was found, event by event."""
    now = PodState.GONE
    for event in events:
        now = transition(now, event)
    assert now is state


def test_a_pair_outside_the_table_changes_nothing() -> None:
    """Illegal events are no error: probes and operators race."""
    outside = [(s, e) for s in PodState for e in PodEvent if (s, e) not in TRANSITIONS]
    assert outside
    assert all(transition(state, event) is state for state, event in outside)


def test_only_a_successful_probe_makes_a_pod_ready() -> None:
    """No other event leads to READY, wherever it comes from."""
    assert {event for (_, event), after in TRANSITIONS.items() if after is PodState.READY} == {PodEvent.PROBE_OK}


def test_every_state_can_be_lost_and_gone_ends_the_life() -> None:
    """LOST leads from everywhere to GONE, and only being found anew leads out of it."""
    assert all(transition(state, PodEvent.LOST) is PodState.GONE for state in PodState)
    assert {event for state, event in TRANSITIONS if state is PodState.GONE} == {PodEvent.FOUND}
