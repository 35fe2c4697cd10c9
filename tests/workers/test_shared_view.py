"""Workers that share one view of the fleet agree, whatever happens to them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision import Lease
from router.fleet.lifecycle import PodEvent
from router.observe.calibrator import MIN_INTERVAL_S, Calibrator
from router.policy.calibration import PrefillObservation
from router.types import InFlight, PodLoad, PodState
from router.workers.shared_view import FLUSH_INTERVAL_S
from tests.workers.fake_workers import PODS, SPEED, Town, pod, prefix

SEEN = PrefillObservation(1, 1000, 1_000_000, 300.0)

Step = tuple[str, int, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "token", "release", "tell", "deafen", "reconnect", "die"]),
        st.integers(0, 2),
        st.sampled_from(PODS),
        st.integers(1, 2000),
    ),
    max_size=60,
)


def rounded(inflight: dict[str, InFlight]) -> dict[str, tuple[float, ...]]:
    """Sums of floats depend on their order in the last digits."""
    names = InFlight.__struct_fields__
    return {name: tuple(round(getattr(work, one), 6) for one in names) for name, work in sorted(inflight.items())}


def play(town: Town, leases: dict[int, list[Lease]], step: Step) -> None:
    """One thing happens to one worker."""
    what, number, name, tokens = step
    ledger, mine = town.workers[number].owners.ledger, leases[number]
    town.now_s += 0.01
    if what == "book":
        mine.append(ledger.book(pod(name), tokens, 0, town.now_s))
    elif what == "token" and mine:
        ledger.first_token(mine[tokens % len(mine)], town.now_s)
    elif what == "release" and mine:
        ledger.release(mine.pop(tokens % len(mine)), town.now_s)
    elif what == "tell":
        town.settle()
    elif what == "deafen":
        town.deaf.add(number)
    elif what == "reconnect":
        town.reconnect()
    elif what == "die" and number not in town.deaf:
        town.replace(number)
        leases[number] = []


@given(STEPS)
def test_ledgers_agree_after_any_history(steps: list[Step]) -> None:
    """Of bookings, first tokens and releases, of workers that miss news or die: and they agree on what is true."""
    town, leases = Town(3), {number: list[Lease]() for number in range(3)}
    for step in steps:
        play(town, leases, step)
    town.settle()
    town.reconnect()
    seen = [rounded(worker.inflight()) for worker in town.workers]
    assert seen[0] == seen[1] == seen[2]
    requests = {name: sum(lease.pod == name for all_of in leases.values() for lease in all_of) for name in PODS}
    found = {name: work.requests for name, work in town.workers[0].inflight().items()}
    assert found == {name: count for name, count in requests.items() if count}


def test_a_worker_that_dies_leaves_no_lease_behind() -> None:
    """Its requests died with it; those of the others stay."""
    town = Town()
    dying, other = town.workers
    dying.owners.ledger.book(pod("a"), 100, 0, town.now_s)
    other.owners.ledger.book(pod("b"), 100, 0, town.now_s)
    town.settle()
    assert set(other.inflight()) == {"a", "b"}
    new = town.replace(0)
    assert set(other.inflight()) == set(new.inflight()) == {"b"}


def test_what_ended_while_a_worker_did_not_listen_is_over_for_it_too() -> None:
    """The whole takes the place of all that was told before."""
    town = Town()
    one, two = town.workers
    lease = one.owners.ledger.book(pod("a"), 100, 0, town.now_s)
    town.settle()
    town.deaf.add(1)
    one.owners.ledger.release(lease, town.now_s)
    town.settle()
    assert set(two.inflight()) == {"a"}
    town.reconnect()
    assert not two.inflight()


def test_a_pod_that_computes_for_another_worker_teaches_nothing_about_its_speed() -> None:
    """A window in which prompts of two workers met shows the time of both."""
    town = Town()
    one, two = town.workers
    clock = one.owners.calibrator.clock("a")
    clock.sent("r", 100, 0, town.now_s)
    two.owners.ledger.book(pod("a"), 5000, 0, town.now_s)
    town.settle()
    assert clock.first_token("r", town.now_s + 1.0) is None


def test_failures_add_up_over_workers_and_eject_for_all() -> None:
    """Two here and one there are three; the back-off is the same everywhere."""
    town = Town()
    for number in (0, 1, 0):
        town.workers[number].owners.breaker.failure("a", town.now_s)
        town.settle()
    for worker in town.workers:
        assert worker.state("a") is PodState.EJECTED
        assert worker.state("b") is PodState.READY
        assert not worker.owners.breaker.may_probe("a", town.now_s + 0.9)
        assert worker.owners.breaker.may_probe("a", town.now_s + 1.1)


def test_one_workers_success_settles_what_another_holds_against_a_pod() -> None:
    """Failures are counted one after another, over all workers."""
    town = Town()
    one, two = town.workers
    for worker in (one, one, two, one, one):
        if worker is two:
            worker.owners.breaker.success("a")
        else:
            worker.owners.breaker.failure("a", town.now_s)
        town.settle()
    assert one.state("a") is two.state("a") is PodState.READY


def test_an_old_ejection_does_not_eject_again_for_a_worker_that_begins() -> None:
    """What is held against the pod is known there, and the pod may serve."""
    town = Town()
    for _ in range(3):
        town.workers[0].owners.breaker.failure("a", town.now_s)
    town.settle()
    town.now_s += 60.0
    new = town.replace(1)
    assert new.state("a") is PodState.READY
    held = new.owners.breaker.record_of("a")
    assert held == town.workers[0].owners.breaker.record_of("a")


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["failure", "success", "late", "on time"])), max_size=40))
def test_breakers_agree_after_any_history(history: list[tuple[int, str]]) -> None:
    """Told in turn, they hold the same against the pod, and have ejected it or not, alike."""
    town = Town()
    for number, what in history:
        breaker = town.workers[number].owners.breaker
        town.now_s += 0.1
        if what == "failure":
            breaker.failure("a", town.now_s)
        elif what == "success":
            breaker.success("a")
        else:
            breaker.first_token("a", 1.0, 1e6 if what == "late" else 1.0, town.now_s)
        town.settle()
        one, two = town.workers
        assert one.owners.breaker.records() == two.owners.breaker.records()
        assert one.state("a") is two.state("a")


def test_what_one_worker_sent_counts_as_cached_for_all() -> None:
    """With the same life and capacity."""
    town = Town()
    one, two = town.workers
    one.owners.local.record("a", prefix(1, 2, 3), town.now_s, ttl_s=5.0, capacity_blocks=None)
    town.settle()
    assert two.owners.local.blocks(prefix(1, 2, 9), town.now_s) == {"a": (2, 0, 0, 0)}
    assert two.owners.local.blocks(prefix(1, 2, 9), town.now_s + 6.0) == {}


def test_workers_learn_from_what_any_of_them_sees() -> None:
    """And one that begins starts with it."""
    town = Town()
    one, two = town.workers
    for number in (0, 1, 1, 0, 0, 1):
        for learn in (lambda calibrator: calibrator.observe_prefill(pod("a"), SEEN, town.now_s), move):
            town.now_s += MIN_INTERVAL_S
            learn(town.workers[number].owners.calibrator)
            town.settle()
    new = town.replace(1)
    speeds = [each.owners.calibrator.calibration.speed("m/vllm/default", "a", SPEED) for each in (one, two, new)]
    assert speeds[0] == speeds[1] == speeds[2] != SPEED
    link = one.owners.calibrator.links.elsewhere
    assert link
    links = [each.owners.calibrator.calibration.link("rdma", link) for each in (one, two, new)]
    assert links[0] == links[1] == links[2] != link


def test_a_worker_that_begins_is_told_what_was_sent_lately() -> None:
    """But not to a pod that has lost its cache since."""
    town = Town()
    one, two = town.workers
    for name, blocks in (("a", (1, 2, 3)), ("b", (1, 2))):
        one.owners.local.record(name, prefix(*blocks), town.now_s, ttl_s=5.0, capacity_blocks=None)
    town.settle()
    for worker in (one, two):
        worker.owners.fleet.restarted("b")
    assert town.replace(1).owners.local.blocks(prefix(1, 2, 3), town.now_s) == {"a": (3, 0, 0, 0)}


def move(calibrator: Calibrator) -> None:
    calibrator.observe_transfer(pod("a"), pod("b"), 1000, 50.0, 0)


def test_of_many_lessons_the_others_are_told_those_that_were_learnt() -> None:
    """What all of them together see is too much for each to learn from."""
    town = Town()
    for _ in range(20):
        town.workers[0].owners.calibrator.observe_prefill(pod("a"), SEEN, town.now_s)
        town.now_s += MIN_INTERVAL_S / 10
    town.settle()
    one, two = (next(worker.owners.calibrator.calibration.rows()) for worker in town.workers)
    assert 0 < two.confidence == one.confidence


def test_a_load_that_one_worker_was_told_is_known_to_all_unless_they_know_better() -> None:
    """The latest counts."""
    town = Town()
    one, two = town.workers
    two.owners.fleet.observe_load("b", PodLoad(9, 9, 0.9, 20.0))
    one.view.add_load("a", PodLoad(1, 2, 0.5, 10.0, our_prompts=2))
    one.view.add_load("b", PodLoad(1, 2, 0.5, 10.0))
    town.settle()
    loads = {status.pod.id: status.load for status in two.owners.fleet.snapshot.pods}
    assert loads["a"] == PodLoad(1, 2, 0.5, 10.0, our_prompts=2)
    assert loads["b"] == PodLoad(9, 9, 0.9, 20.0)


def test_orders_are_obeyed_once_by_all_others_and_by_those_who_come_later() -> None:
    """Of two about the same pod the later one counts."""
    town = Town()
    one, two = town.workers
    one.view.add_command("drain a", "drain")
    town.settle()
    two.view.add_command("drain a", "undrain")
    town.settle()
    two.view.apply_remote(0, one.view.snapshot())
    assert (one.applied, two.applied) == ([("drain a", "undrain")], [("drain a", "drain")])
    assert town.replace(0).applied == [("drain a", "undrain")]
    assert [worker.view.command("drain a") for worker in town.workers] == ["undrain", "undrain"]


@pytest.mark.parametrize("first, second", [("drain", "undrain"), ("undrain", "drain")])
def test_of_two_orders_whose_workers_have_not_heard_of_each_other_the_later_counts(first: str, second: str) -> None:
    """Even if it came within the time in which news is gathered."""
    town = Town()
    one, two = town.workers
    one.view.add_command("drain a", first)
    town.now_s += FLUSH_INTERVAL_S / 2
    two.view.add_command("drain a", second)
    town.settle()
    assert one.view.command("drain a") == two.view.command("drain a") == second
    assert (one.applied, two.applied) == ([("drain a", second)], [])


def test_two_orders_at_once_end_alike_everywhere() -> None:
    """Which one counts does not depend on who hears what first."""
    town = Town()
    one, two = town.workers
    one.view.add_command("pod u", "this")
    two.view.add_command("pod u", "that")
    town.settle()
    assert one.view.command("pod u") == two.view.command("pod u") == "this"


def test_a_worker_that_begins_knows_whom_the_others_use() -> None:
    """So that it does not serve before it can use them, too."""
    town = Town()
    town.workers[0].owners.fleet.event("b", PodEvent.DRAIN)
    assert town.replace(1).view.remote_ready_pods == {"a", "c"}


def test_what_changes_is_told_together_and_at_once_after_a_pause() -> None:
    """Many changes within a millisecond are one message; after a quiet time the first goes at once."""
    town = Town(1)
    worker = town.workers[0]
    for _ in range(3):
        worker.owners.ledger.book(pod("a"), 1, 0, town.now_s)
    town.settle()
    worker.owners.ledger.book(pod("a"), 1, 0, town.now_s)
    assert town.waits == [0.0, pytest.approx(FLUSH_INTERVAL_S)]


def test_what_means_nothing_is_refused() -> None:
    """Whoever reads the connection ends it, and is told everything anew."""
    town = Town()
    below_zero = msgspec.msgpack.encode({"dispatched": [("a", bytes(16), 30.0, -5)]})
    for news in (b"", b"\xc1", b"\x81\xa4work\x01", below_zero):
        with pytest.raises(ValueError):
            town.workers[0].view.apply_remote(1, news)
