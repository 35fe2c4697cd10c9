"""Workers agree on the shared state after any history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision import Lease
from router.fleet.fleet import PodEvent
from router.index.predicted import Prediction
from router.index.stored_responses import StoredResponse
from router.policy.calibrator import MIN_INTERVAL_S, Calibrator
from router.policy.prefill_clock import PrefillObservation
from router.stores.prefix_store import LocalStore
from router.types import InFlight, PodLoad, PodState
from router.workers.shared_view import FLUSH_INTERVAL_S, MAX_RECENT_BYTES, Dispatch, RecentDispatches
from tests.workers.fake_workers import PODS, SPEED, FakeWorkers, pod, prefix


def recent_dispatches(*sent: tuple[str, int, float]) -> RecentDispatches:
    """Dispatches by (pod, bytes of hashes, TTL), numbered from 1."""
    recent = RecentDispatches()
    for number, (name, size_bytes, ttl_s) in enumerate(sent, start=1):
        recent.add(Dispatch(number, name, b"x" * size_bytes, ttl_s, None))
    return recent


def pods_of(recent: RecentDispatches, now_s: float = 0.0) -> list[str]:
    return [dispatch.pod for dispatch in recent.unexpired(now_s)[0]]


def test_expired_dispatches_are_left_out() -> None:
    """Each has its own TTL, from its confirmation on."""
    recent = recent_dispatches(("a", 8, 10.0), ("b", 8, 100.0), ("c", 8, 1.0), ("d", 8, 1.0))
    recent.confirm(1, 0.0)
    recent.confirm(2, 1.0)
    recent.remove(4)
    recent.confirm(4, 1.0)
    assert (pods_of(recent, 9.0), recent.unexpired(9.0)[1]) == (["a", "b", "c"], [1, 2])
    assert pods_of(recent, 10.0) == ["b", "c"]


def test_dispatches_to_a_pod_with_a_lost_cache_are_left_out() -> None:
    """Dispatches to other pods stay."""
    recent = recent_dispatches(*((name, 8, 30.0) for name in "aba"))
    recent.forget("a")
    assert pods_of(recent) == ["b"]


def test_the_oldest_dispatches_are_evicted_above_the_limit() -> None:
    """By bytes, also after some were removed."""
    half = MAX_RECENT_BYTES // 2
    recent = recent_dispatches(("old", half, 30.0), ("gone", half, 30.0))
    recent.forget("gone")
    recent.add(Dispatch(3, "new", b"x" * half, 30.0, None))
    assert pods_of(recent) == ["old", "new"]
    recent.add(Dispatch(4, "newer", b"x" * 8, 30.0, None))
    assert pods_of(recent) == ["new", "newer"]


SEEN = PrefillObservation(1, 1000, 1_000_000, 300.0)

Step = tuple[str, int, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "token", "release", "flush", "disconnect", "reconnect", "die"]),
        st.integers(0, 2),
        st.sampled_from(PODS),
        st.integers(1, 2000),
    ),
    max_size=60,
)


def rounded(inflight: dict[str, InFlight]) -> dict[str, tuple[float, ...]]:
    """Rounded: the last digits of a sum of floats depend on the order."""
    names = InFlight.__struct_fields__
    return {name: tuple(round(getattr(work, one), 6) for one in names) for name, work in sorted(inflight.items())}


def play(group: FakeWorkers, leases: dict[int, list[Lease]], step: Step) -> None:
    """Apply one step to one worker."""
    what, number, name, tokens = step
    ledger, mine = group.workers[number].owners.ledger, leases[number]
    group.now_s += 0.01
    if what == "book":
        mine.append(ledger.book(pod(name), tokens, 0, group.now_s))
    elif what == "token" and mine:
        ledger.first_token(mine[tokens % len(mine)], group.now_s)
    elif what == "release" and mine:
        ledger.release(mine.pop(tokens % len(mine)), group.now_s)
    elif what == "flush":
        group.settle()
    elif what == "disconnect":
        group.disconnected.add(number)
    elif what == "reconnect":
        group.reconnect()
    elif what == "die" and number not in group.disconnected:
        group.replace(number)
        leases[number] = []


@given(STEPS)
def test_ledgers_agree_after_any_history(steps: list[Step]) -> None:
    """Of bookings, first tokens, releases, missed updates and worker deaths; the sums are also correct."""
    group, leases = FakeWorkers(3), {number: list[Lease]() for number in range(3)}
    for step in steps:
        play(group, leases, step)
    group.settle()
    group.reconnect()
    seen = [rounded(worker.inflight()) for worker in group.workers]
    assert seen[0] == seen[1] == seen[2]
    requests = {name: sum(lease.pod == name for all_of in leases.values() for lease in all_of) for name in PODS}
    found = {name: work.requests for name, work in group.workers[0].inflight().items()}
    assert found == {name: count for name, count in requests.items() if count}


def test_the_leases_of_a_dead_worker_are_dropped() -> None:
    """Those of the other workers stay."""
    group = FakeWorkers()
    dying, other = group.workers
    dying.owners.ledger.book(pod("a"), 100, 0, group.now_s)
    other.owners.ledger.book(pod("b"), 100, 0, group.now_s)
    group.settle()
    assert set(other.inflight()) == {"a", "b"}
    new = group.replace(0)
    assert set(other.inflight()) == set(new.inflight()) == {"b"}


def test_a_snapshot_repairs_missed_updates() -> None:
    """It replaces all in-flight work of its sender."""
    group = FakeWorkers()
    one, two = group.workers
    lease = one.owners.ledger.book(pod("a"), 100, 0, group.now_s)
    group.settle()
    group.disconnected.add(1)
    one.owners.ledger.release(lease, group.now_s)
    group.settle()
    assert set(two.inflight()) == {"a"}
    group.reconnect()
    assert not two.inflight()


def test_a_prefill_time_is_discarded_when_another_worker_has_a_prompt_on_the_pod() -> None:
    """It would cover both prompts."""
    group = FakeWorkers()
    one, two = group.workers
    clock = one.owners.calibrator.clock("a")
    clock.sent("r", 100, 0, group.now_s)
    two.owners.ledger.book(pod("a"), 5000, 0, group.now_s)
    group.settle()
    assert clock.first_token("r", group.now_s + 1.0) is None


def test_failures_of_all_workers_count_together_and_eject_everywhere() -> None:
    """With the same backoff."""
    group = FakeWorkers()
    for number in (0, 1, 0):
        group.workers[number].owners.breaker.failure("a", group.now_s)
        group.settle()
    for worker in group.workers:
        assert worker.state("a") is PodState.EJECTED
        assert worker.state("b") is PodState.READY
        assert not worker.owners.breaker.may_probe("a", group.now_s + 0.9)
        assert worker.owners.breaker.may_probe("a", group.now_s + 1.1)


def test_a_success_of_one_worker_resets_the_failures_of_all() -> None:
    """Failures must be consecutive over all workers."""
    group = FakeWorkers()
    one, two = group.workers
    for worker in (one, one, two, one, one):
        if worker is two:
            worker.owners.breaker.success("a")
        else:
            worker.owners.breaker.failure("a", group.now_s)
        group.settle()
    assert one.state("a") is two.state("a") is PodState.READY


def test_an_expired_ejection_does_not_eject_at_a_new_worker() -> None:
    """The new worker has the same failure record."""
    group = FakeWorkers()
    for _ in range(3):
        group.workers[0].owners.breaker.failure("a", group.now_s)
    group.settle()
    group.now_s += 60.0
    new = group.replace(1)
    assert new.state("a") is PodState.READY
    held = new.owners.breaker.record_of("a")
    assert held == group.workers[0].owners.breaker.record_of("a")


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["failure", "doubt", "success", "late", "on time"])), max_size=40
    )
)
def test_breakers_agree_after_any_history(history: list[tuple[int, str]]) -> None:
    """On records and on states, if each change is delivered before the next."""
    group = FakeWorkers()
    for number, what in history:
        breaker = group.workers[number].owners.breaker
        group.now_s += 0.1
        if what == "failure":
            breaker.failure("a", group.now_s)
        elif what == "doubt":
            breaker.doubt("a", f"client of {number}", group.now_s)
        elif what == "success":
            breaker.success("a")
        else:
            breaker.first_token("a", f"client of {number}", 1.0, 1e6 if what == "late" else 1.0, group.now_s)
        group.settle()
        one, two = group.workers
        assert one.owners.breaker.records() == two.owners.breaker.records()
        assert one.state("a") is two.state("a")


def test_a_dispatch_of_one_worker_counts_as_cached_for_all() -> None:
    """With the same TTL and capacity, which apply once its pod has computed it."""
    group = FakeWorkers()
    one, two = group.workers
    sent = one.owners.local.predict("a", prefix(1, 2, 3), ttl_s=5.0, capacity_blocks=None)
    group.settle()
    assert two.owners.local.blocks(prefix(1, 2, 9), group.now_s + 6.0) == {"a": (2, 0, 0, 0)}
    one.owners.local.confirm(sent, group.now_s)
    group.settle()
    assert two.owners.local.blocks(prefix(1, 2, 9), group.now_s) == {"a": (2, 0, 0, 0)}
    assert two.owners.local.blocks(prefix(1, 2, 9), group.now_s + 6.0) == {}


def test_the_dispatches_of_a_dead_worker_are_withdrawn() -> None:
    """Nobody reports their outcome."""
    group = FakeWorkers(3)
    one, two, three = group.workers
    one.owners.local.predict("a", prefix(1, 2), ttl_s=5.0, capacity_blocks=None)
    two.owners.local.predict("a", prefix(1), ttl_s=5.0, capacity_blocks=None)
    group.settle()
    assert three.owners.local.blocks(prefix(1, 2), group.now_s) == {"a": (2, 0, 0, 0)}
    group.replace(0)
    assert three.owners.local.blocks(prefix(1, 2), group.now_s) == {"a": (1, 0, 0, 0)}


dispatches = st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.sampled_from([(1,), (1, 2), (1, 2, 3), (1, 2, 4)]))
outcomes = st.tuples(st.sampled_from(["confirm", "withdraw"]), st.integers(0, 20))
deliveries = st.tuples(st.sampled_from(["settle", "disconnect", "reconnect", "forget"]), st.integers(0, 2))


@given(st.lists(dispatches | outcomes | deliveries, max_size=30))
def test_all_workers_know_the_same_dispatches(steps: list[tuple[Any, ...]]) -> None:
    """Also where updates are lost, until the next snapshot; and none is left once all have an outcome and the pods are
    forgotten."""
    group = FakeWorkers(3)
    begun: dict[int, tuple[LocalStore, Prediction]] = {}
    for number, (what, which, *facts) in enumerate(steps):
        if facts:
            local = group.workers[what].owners.local
            begun[number] = local, local.predict(which, prefix(*facts[0]), ttl_s=5.0, capacity_blocks=None)
        elif what in ("confirm", "withdraw") and which in begun:
            local, sent = begun.pop(which)
            local.confirm(sent, group.now_s) if what == "confirm" else local.withdraw(sent)
        elif what == "disconnect":
            group.disconnected.add(which)
        elif what == "reconnect":
            group.reconnect()
        elif what == "forget":
            group.settle()
            group.reconnect()
            for worker in group.workers:
                worker.owners.fleet.restarted("a")
                worker.owners.local.forget("a")
        elif what == "settle":
            group.settle()
    for local, sent in begun.values():
        local.withdraw(sent)
    group.settle()
    group.reconnect()
    for blocks in ((1, 2, 3), (1, 2, 4)):
        one, two, three = (worker.owners.local.blocks(prefix(*blocks), group.now_s) for worker in group.workers)
        assert one == two == three
    for worker in group.workers:
        assert not any(worker.view._pending.values())
        for name in "ab":
            worker.owners.local.forget(name)
        assert not worker.owners.local.predicted._runs


def test_workers_share_speed_observations() -> None:
    """A new worker starts with the current fits."""
    group = FakeWorkers()
    one, two = group.workers
    for number in (0, 1, 1, 0, 0, 1):
        for learn in (lambda calibrator: calibrator.observe_prefill(pod("a"), SEEN, group.now_s), move):
            group.now_s += MIN_INTERVAL_S
            learn(group.workers[number].owners.calibrator)
            group.settle()
    new = group.replace(1)
    speeds = [each.owners.calibrator.calibration.speed("m/vllm/default", "a", SPEED) for each in (one, two, new)]
    assert speeds[0] == speeds[1] == speeds[2] != SPEED
    link = one.owners.calibrator.links.elsewhere
    assert link
    links = [each.owners.calibrator.calibration.link("rdma", link) for each in (one, two, new)]
    assert links[0] == links[1] == links[2] != link


def test_a_new_worker_receives_recent_dispatches() -> None:
    """Except those to a pod that has lost its cache since."""
    group = FakeWorkers()
    one, two = group.workers
    for name, blocks in (("a", (1, 2, 3)), ("b", (1, 2))):
        sent = one.owners.local.predict(name, prefix(*blocks), ttl_s=5.0, capacity_blocks=None)
        one.owners.local.confirm(sent, group.now_s)
    group.settle()
    for worker in (one, two):
        worker.owners.fleet.restarted("b")
    assert group.replace(1).owners.local.blocks(prefix(1, 2, 3), group.now_s) == {"a": (3, 0, 0, 0)}


def move(calibrator: Calibrator) -> None:
    calibrator.observe_transfer(pod("a"), pod("b"), 1000, 50.0, 0)


def test_only_observations_that_were_used_are_shared() -> None:
    """The observations of all workers would be too many."""
    group = FakeWorkers()
    for _ in range(20):
        group.workers[0].owners.calibrator.observe_prefill(pod("a"), SEEN, group.now_s)
        group.now_s += MIN_INTERVAL_S / 10
    group.settle()
    one, two = (next(worker.owners.calibrator.calibration.rows()) for worker in group.workers)
    assert 0 < two.confidence == one.confidence


def test_a_scraped_load_is_shared_unless_another_worker_has_a_newer_one() -> None:
    """The latest scrape counts."""
    group = FakeWorkers()
    one, two = group.workers
    two.owners.fleet.observe_load("b", PodLoad(9, 9, 0.9, 20.0))
    one.view.add_load("a", PodLoad(1, 2, 0.5, 10.0, our_prompts=2))
    one.view.add_load("b", PodLoad(1, 2, 0.5, 10.0))
    group.settle()
    loads = {status.pod.id: status.load for status in two.owners.fleet.snapshot.pods}
    assert loads["a"] == PodLoad(1, 2, 0.5, 10.0, our_prompts=2)
    assert loads["b"] == PodLoad(9, 9, 0.9, 20.0)


def test_a_command_is_applied_once_by_each_other_worker_and_by_new_workers() -> None:
    """Of two on the same subject the later one counts."""
    group = FakeWorkers()
    one, two = group.workers
    one.view.add_command("drain a", "drain")
    group.settle()
    two.view.add_command("drain a", "undrain")
    group.settle()
    two.view.apply_remote(0, one.view.snapshot())
    assert (one.applied, two.applied) == ([("drain a", "undrain")], [("drain a", "drain")])
    assert group.replace(0).applied == [("drain a", "undrain")]
    assert [worker.view.command("drain a") for worker in group.workers] == ["undrain", "undrain"]


@pytest.mark.parametrize("first, second", [("drain", "undrain"), ("undrain", "drain")])
def test_the_later_of_two_commands_counts(first: str, second: str) -> None:
    """Even if they cross on the way."""
    group = FakeWorkers()
    one, two = group.workers
    group.disconnected = {0, 1}
    one.view.add_command("drain a", first)
    group.now_s += FLUSH_INTERVAL_S / 2
    two.view.add_command("drain a", second)
    group.reconnect()
    assert one.view.command("drain a") == two.view.command("drain a") == second
    assert (one.applied, two.applied) == ([("drain a", second)], [])


def test_a_command_is_sent_before_its_caller_has_an_answer() -> None:
    """A worker that is killed right after the answer loses no command."""
    group = FakeWorkers()
    one, two = group.workers
    one.view.add_load("a", PodLoad(running=1))
    one.view.add_command("drain a", "drain")
    assert two.applied == [("drain a", "drain")]
    group.settle()
    assert two.applied == [("drain a", "drain")]


def test_two_commands_at_the_same_time_give_the_same_result_everywhere() -> None:
    """The order of delivery does not matter."""
    group = FakeWorkers()
    one, two = group.workers
    group.disconnected = {0, 1}
    one.view.add_command("pod u", "this")
    two.view.add_command("pod u", "that")
    group.reconnect()
    assert one.view.command("pod u") == two.view.command("pod u") == "this"


def test_a_new_worker_receives_the_pods_that_others_use() -> None:
    """It serves only when it can use them as well."""
    group = FakeWorkers()
    group.workers[0].owners.fleet.event("b", PodEvent.DRAIN)
    assert group.replace(1).view.remote_ready_pods == {"a", "c"}


def test_changes_are_published_together_and_at_once_after_a_pause() -> None:
    """Many changes within the flush interval make one message."""
    group = FakeWorkers(1)
    worker = group.workers[0]
    for _ in range(3):
        worker.owners.ledger.book(pod("a"), 1, 0, group.now_s)
    group.settle()
    worker.owners.ledger.book(pod("a"), 1, 0, group.now_s)
    assert group.waits == [0.0, pytest.approx(FLUSH_INTERVAL_S)]


def test_a_malformed_message_raises() -> None:
    """The link is closed then, and the next one starts with a snapshot."""
    group = FakeWorkers()
    below_zero = msgspec.msgpack.encode({"dispatched": [(1, "a", bytes(16), 30.0, -5)]})
    for news in (b"", b"\xc1", b"\x81\xa4work\x01", below_zero):
        with pytest.raises(ValueError):
            group.workers[0].view.apply_remote(1, news)


def test_stored_responses_are_known_to_all_workers() -> None:
    """Also to a new one."""
    group = FakeWorkers(2)
    stored = StoredResponse("r", PODS[0], "m", group.now_s)
    group.workers[0].owners.responses.learn(stored, group.now_s)
    group.settle()
    assert group.workers[1].owners.responses.find("r", group.now_s) == stored
    assert group.replace(1).owners.responses.find("r", group.now_s) == stored
