"""Leases and their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Lease
from router.fleet.ledger import Ledger
from router.types import InFlight, StepBegan
from tests.kit.scenes import make_pod


def counts(rows: Mapping[str, InFlight]) -> dict[str, InFlight]:
    """The rows without the rates of prompts, which `test_congestion_estimator.py` tests."""
    return {pod: structs.replace(work, prompts_per_s=0.0) for pod, work in rows.items()}


def test_a_lease_counts_from_booking_to_release() -> None:
    """Its uncached tokens stand in the queue until the first token, its context until the end."""
    ledger, pod = Ledger(), make_pod("a")
    lease = ledger.book(pod, 1000, 600, 0.0)
    expected_ms = pod.speed.compute_ms(600, 1000)
    assert counts(ledger.inflight()) == {"a": InFlight(1, 1, 400, expected_ms, 1000, head_ms=expected_ms)}
    ledger.first_token(lease, 0.0)
    assert counts(ledger.inflight()) == {"a": InFlight(1, 0, 0, 0.0, 1000, decode_tokens=1000)}
    ledger.release(lease, 0.0)
    assert ledger.inflight() == {}


def test_an_empty_queue_is_exactly_empty() -> None:
    """Sums of floats that are taken apart again leave a rest, which would grow for as long as the pod is busy."""
    ledger, pod = Ledger(), make_pod("a")
    leases = [ledger.book(pod, tokens, 0, 0.0) for tokens in (100, 333, 777)]
    a, b, c = (lease.prefill_ms for lease in leases)
    assert a + b + c - a - b - c != 0.0
    for lease in leases:
        ledger.first_token(lease, 0.0)
    assert ledger.inflight()["a"].prefill_ms == 0.0


def test_a_reading_does_not_change_under_its_reader() -> None:
    """A decision sees one moment."""
    ledger, pod = Ledger(), make_pod("a")
    before = ledger.inflight()
    lease = ledger.book(pod, 100, 0, 0.0)
    during = ledger.inflight()
    ledger.release(lease, 0.0)
    assert (before, during["a"].requests) == ({}, 1)


def test_sums_are_built_once_per_change() -> None:
    """Only those of the pods that changed; the same for steps."""
    ledger = Ledger()
    ledger.book(make_pod("a"), 100, 0, 1.0)
    ledger.stepped("a", 1.0)
    first, step = ledger.inflight()["a"], ledger.steps()["a"]
    ledger.book(make_pod("b"), 100, 0, 1.0)
    assert ledger.inflight()["a"] is first and ledger.steps()["a"] is step
    lease = ledger.book(make_pod("a"), 50, 0, 2.0)
    assert ledger.inflight()["a"] != first
    ledger.release(lease, 3.0)
    assert counts(ledger.inflight())["a"] == counts({"a": first})["a"]


def test_what_other_replicas_have_in_flight_is_added() -> None:
    """Theirs to one another's and to our own, pod by pod; `own` is without them."""
    ledger = Ledger()
    lease = ledger.book(make_pod("a"), 1000, 600, 0.0)
    own = ledger.inflight()["a"]
    replicas = [{"a": InFlight(2, 1, 30, 4.0, 500)}, {"a": InFlight(1, 1, 10, 1.0, 50), "b": InFlight(3, 0, 0, 0.0, 9)}]
    ledger.apply_replicas(replicas, 0.0)
    assert counts(ledger.inflight()) == {
        "a": InFlight(4, 3, 440, own.prefill_ms + 5.0, 1550, head_ms=own.prefill_ms),
        "b": InFlight(3, 0, 0, 0.0, 9),
    }
    assert ledger.own() == {"a": own}
    ledger.release(lease, 0.0)
    assert ledger.inflight() == {"a": InFlight(3, 2, 40, 5.0, 550), "b": InFlight(3, 0, 0, 0.0, 9)}
    assert ledger.own() == {}


def test_rows_of_replicas_are_replaced_as_a_whole() -> None:
    """A replica that is not mentioned has nothing in flight any longer."""
    ledger = Ledger()
    ledger.book(make_pod("a"), 100, 0, 0.0)
    ledger.apply_replicas([{"a": InFlight(5, 0, 0, 0.0, 100), "b": InFlight(1, 0, 0, 0.0, 10)}], 0.0)
    ledger.apply_replicas([{"c": InFlight(2, 0, 0, 0.0, 20)}], 0.0)
    assert ledger.inflight() == {**ledger.own(), "c": InFlight(2, 0, 0, 0.0, 20)}
    ledger.apply_replicas([], 0.0)
    assert ledger.inflight() == ledger.own()


def test_rows_of_replicas_are_not_modified() -> None:
    """Neither their report nor an earlier reading changes with our own leases."""
    ledger, report = Ledger(), {"a": InFlight(1, 0, 0, 0.0, 10)}
    ledger.apply_replicas([report], 0.0)
    before = ledger.inflight()
    ledger.book(make_pod("a"), 100, 0, 0.0)
    ledger.apply_replicas([report, report], 0.0)
    assert before == report == {"a": InFlight(1, 0, 0, 0.0, 10)}
    assert ledger.inflight()["a"].requests == 3


# --- the head of the queue ---


def test_the_queue_shrinks_while_its_head_is_computed() -> None:
    """At the pace of the clock, down to nothing and not below; who comes behind it changes nothing of that."""
    ledger, pod = Ledger(), make_pod("a")
    head, behind = ledger.book(pod, 1000, 0, now_s=5.0), ledger.book(pod, 500, 0, now_s=5.01)
    for now_s, done_ms in ((5.0, 0.0), (5.01, 10.0), (5.02, 20.0), (9.0, head.prefill_ms)):
        left_ms = head.prefill_ms + behind.prefill_ms - done_ms
        assert ledger.inflight()["a"].queue_ms(now_s) == pytest.approx(left_ms)


def test_rows_of_replicas_have_no_head() -> None:
    """Their queues count in full, by their report, however their clocks go."""
    theirs = InFlight(1, 1, 100, 80.0, 100, head_ms=80.0, head_since_s=1.0)
    alone, with_others = Ledger(), Ledger()
    for ledger in (alone, with_others):
        ledger.book(make_pod("a"), 1000, 0, 5.0)
    with_others.apply_replicas([{"a": theirs, "b": theirs}, {"a": theirs}], 0.0)
    alone_ms = alone.inflight()["a"].queue_ms(5.01)
    assert with_others.inflight()["a"].queue_ms(5.01) == pytest.approx(alone_ms + 160.0)
    assert with_others.inflight()["b"].queue_ms(5.01) == 80.0


# --- what is not a whole request ---


def test_a_pod_that_only_decodes_has_nothing_to_compute() -> None:
    """The request and its context count, no prefill does, and nobody waits behind it."""
    ledger, pod = Ledger(), make_pod("a")
    lease = ledger.book(pod, 1000, 0, 5.0, prefills=False)
    assert ledger.inflight() == {"a": InFlight(1, 0, 0, 0.0, 1000, decode_tokens=1000)}
    behind = ledger.book(pod, 500, 0, 6.0)
    ledger.first_token(lease, 7.0)
    assert ledger.inflight()["a"].queue_ms(6.01) == pytest.approx(behind.prefill_ms - 10.0)
    ledger.release(lease, 7.0)
    ledger.release(behind, 7.0)
    assert ledger.inflight() == {}


def test_a_holder_counts_what_it_is_sending() -> None:
    """Also one that serves nothing; and it is forgotten when the last transfer and the last request are over."""
    ledger, pod = Ledger(), make_pod("a")
    ledger.pull_began("a")
    ledger.pull_began("a")
    assert counts(ledger.inflight()) == {"a": InFlight(pulls=2)}
    lease = ledger.book(pod, 100, 0, 0.0)
    ledger.apply_replicas([{"a": InFlight(pulls=3)}], 0.0)
    assert ledger.inflight()["a"].pulls == 5
    ledger.apply_replicas([], 0.0)
    ledger.pull_ended("a")
    ledger.release(lease, 0.0)
    assert counts(ledger.inflight()) == {"a": InFlight(pulls=1)}
    ledger.pull_ended("a")
    assert ledger.inflight() == {}


steps = st.lists(
    st.tuples(st.sampled_from(["book", "decode", "first_token", "release"]), st.integers(0, 20)), max_size=60
)


@given(steps=steps, prompts=st.lists(st.integers(1, 200_000), min_size=1, max_size=5))
def test_sums_are_those_of_the_open_leases_and_return_to_zero(steps: list[tuple[str, int]], prompts: list[int]) -> None:
    """Under any interleaving of finish, cancel and fail, each of which may come twice or late. The first prompt in the
    queue is computed from when it was the first."""
    ledger, pods = Ledger(), [make_pod(name) for name in "ab"]
    booked: list[Lease] = []
    prefilling: set[int] = set()
    open_leases: set[int] = set()
    heads: dict[str, tuple[Lease, float]] = {}
    for at, (what, number) in enumerate(steps):
        now_s = at / 50
        if what in ("book", "decode"):
            tokens = prompts[number % len(prompts)]
            lease = ledger.book(pods[number % 2], tokens, tokens // 3, now_s, prefills=what == "book")
            booked.append(lease)
            open_leases.add(lease.id)
            if what == "book":
                prefilling.add(lease.id)
        elif booked:
            lease = booked[number % len(booked)]
            prefilling.discard(lease.id)
            if what == "first_token":
                ledger.first_token(lease, now_s)
            else:
                open_leases.discard(lease.id)
                ledger.release(lease, now_s)
        for pod in pods:
            here = [lease for lease in booked if lease.pod == pod.id and lease.id in open_leases]
            queued = [lease for lease in here if lease.id in prefilling]
            now = ledger.inflight().get(pod.id, InFlight())
            assert (now.requests, now.prefill_requests) == (len(here), len(queued))
            assert now.prefill_tokens == sum(lease.prefill_tokens for lease in queued)
            assert now.prefill_ms == pytest.approx(sum(lease.prefill_ms for lease in queued), abs=1e-6)
            assert now.context_tokens == sum(lease.context_tokens for lease in here)
            head = queued[0] if queued else None
            if head is None:
                heads.pop(pod.id, None)
            elif pod.id not in heads or heads[pod.id][0] is not head:
                heads[pod.id] = head, now_s
            done_ms = min((now_s + 0.01 - heads[pod.id][1]) * 1000, head.prefill_ms) if head else 0.0
            assert now.head_ms == (head.prefill_ms if head else 0.0)
            assert now.queue_ms(now_s + 0.01) == pytest.approx(now.prefill_ms - done_ms, abs=1e-6)
    for lease in booked:
        ledger.release(lease, 0.0)
    assert ledger.inflight() == {}


_CHANGES = ["book", "decode", "first_token", "release", "release", "stepped", "pull", "pulled", "replica"]


@given(st.lists(st.tuples(st.sampled_from(_CHANGES), st.integers(0, 2)), max_size=30), st.integers(1, 30))
def test_sums_do_not_depend_on_when_they_are_read(changes: list[tuple[str, int]], every: int) -> None:
    """In the same order of pods too, since they are written down."""
    often, seldom = Ledger(), Ledger()
    leases: list[tuple[Lease, Lease]] = []
    pulls = {"a": 0, "b": 0}
    for now_s, (what, number) in enumerate(changes):
        name = "ab"[number % 2]
        if what in ("book", "decode"):
            of = [ledger.book(make_pod(name), 100, 30, now_s, prefills=what == "book") for ledger in (often, seldom)]
            leases.append((of[0], of[1]))
        elif what in ("first_token", "release") and leases:
            for ledger, lease in zip((often, seldom), leases[number % len(leases)], strict=True):
                (ledger.first_token if what == "first_token" else ledger.release)(lease, now_s)
        elif what in ("pull", "pulled") and (what == "pull" or pulls[name]):
            pulls[name] += 1 if what == "pull" else -1
            for ledger in (often, seldom):
                (ledger.pull_began if what == "pull" else ledger.pull_ended)(name)
        for ledger in (often, seldom):
            if what == "stepped":
                ledger.stepped(name, now_s)
            elif what == "replica":
                ledger.apply_replicas([{name: InFlight(number, number)}] if number else [], 0.0)
        _read(often)
        if now_s % every == 0:
            assert _read(seldom) == _read(often)
    assert _read(seldom) == _read(often)


def _read(ledger: Ledger) -> list[object]:
    """All that can be read, in its order."""
    alone = [(ledger.on(name), ledger.decoding(name)) for name in "ab"]
    return [list(ledger.inflight().items()), list(ledger.own().items()), list(ledger.steps().items()), alone]


def test_decoding_counts_the_same_requests_as_the_sums() -> None:
    """They belong to this process and to others; a pod that nobody uses has none."""
    ledger = Ledger()
    ledger.first_token(ledger.book(make_pod("a"), 100, 0, 1.0), 2.0)
    ledger.book(make_pod("a"), 1000, 0, 3.0)
    ledger.apply_replicas(
        [{"a": InFlight(3, 1, 10, 1.0, 50, decode_tokens=40), "b": InFlight(2, 1, decode_tokens=5)}], 0.0
    )
    assert [ledger.decoding(name) for name in "abc"] == [(3, 140, -math.inf), (1, 5, -math.inf), (0, 0, -math.inf)]


# --- steps ---


def test_a_step_begins_when_tokens_came_out_last() -> None:
    """With what waited then; nobody knows before, nor once the pod is idle."""
    ledger, pod = Ledger(), make_pod("a")
    assert (ledger.steps(), ledger.decoding("a")) == ({}, (0, 0, -math.inf))
    decoding = ledger.book(pod, 1000, 0, 5.0)
    ledger.first_token(decoding, 6.0)
    ledger.stepped("a", 6.0)
    assert ledger.steps() == {"a": StepBegan(6.0, 0.0)}
    waiting = ledger.book(pod, 500, 0, 6.01)
    ledger.stepped("a", 6.02)
    assert ledger.steps()["a"] == StepBegan(6.02, waiting.prefill_ms)
    assert ledger.decoding("a") == (1, 1000, 6.02)
    for lease in (decoding, waiting):
        ledger.release(lease, 7.0)
    assert (ledger.steps(), ledger.decoding("a")) == ({}, (0, 0, -math.inf))


def test_a_prompt_of_several_steps_keeps_the_first_of_them() -> None:
    """Its end is reckoned from there; the next prompt's from when that becomes first in line."""
    ledger, pod = Ledger(), make_pod("a")
    ledger.first_token(ledger.book(pod, 10, 0, 4.0), 5.0)
    long, behind = ledger.book(pod, 30_000, 0, 5.0), ledger.book(pod, 10, 0, 5.0)
    for now_s in (5.1, 5.2, 5.3):
        ledger.stepped("a", now_s)
    assert ledger.steps()["a"] == StepBegan(5.1, long.prefill_ms + behind.prefill_ms)
    ledger.first_token(long, 5.4)
    ledger.stepped("a", 5.4)
    assert ledger.steps()["a"].at_s == 5.4
    assert ledger.steps()["a"].prefill_ms == pytest.approx(behind.prefill_ms)


def test_a_pod_without_requests_has_no_step() -> None:
    """A late piece of an answer leaves nothing behind."""
    ledger = Ledger()
    ledger.release(ledger.book(make_pod("a"), 10, 0, 1.0), 2.0)
    ledger.stepped("a", 3.0)
    assert ledger.steps() == {}


def test_the_sums_of_one_pod_can_be_read() -> None:
    """As the sums of all pods have it."""
    ledger = Ledger()
    ledger.book(make_pod("a"), 1000, 600, 5.0)
    assert ledger.on("a") == ledger.inflight()["a"]
    ledger.apply_replicas([{"a": InFlight(1, 0, 0, 0.0, 50, decode_tokens=50), "b": InFlight(1)}], 0.0)
    assert {name: ledger.on(name) for name in "ab"} == ledger.inflight()
    assert ledger.on("c") == InFlight()


def test_own_changes_are_added_to_the_work_of_others() -> None:
    """A lease that is booked or released while others work there changes the sum at once."""
    ledger, pod = Ledger(), make_pod("a")
    ledger.apply_replicas([{"a": InFlight(2, 0, 0, 0.0, 20)}], 0.0)
    lease = ledger.book(pod, 100, 0, 0.0)
    assert ledger.inflight()["a"].requests == ledger.on("a").requests == 3
    ledger.release(lease, 1.0)
    assert ledger.inflight() == {"a": InFlight(2, 0, 0, 0.0, 20)}


# --- a watch ---

_HAPPENS = st.lists(
    st.tuples(st.sampled_from(["book", "book", "token", "release", "replica"]), st.integers(0, 3)),
    max_size=20,
)


@given(_HAPPENS, _HAPPENS)
def test_a_watch_records_the_maximum_number_of_prompts(
    before: list[tuple[str, int]], during: list[tuple[str, int]]
) -> None:
    """From its beginning to its end, of this router and the others together."""
    ledger, pod, leases = Ledger(), make_pod("a"), list[Lease]()

    def happens(what: str, number: int) -> int:
        row = {"a": InFlight(number, number)}
        if what == "book":
            leases.append(ledger.book(pod, 100, 0, 0.0))
            ledger.book(make_pod("b"), 100, 0, 0.0)
        elif what in ("token", "release") and leases:
            change = Ledger.first_token if what == "token" else Ledger.release
            change(ledger, leases[number % len(leases)], 0.0)
        elif what == "replica":
            ledger.apply_replicas([row], 0.0)
        return ledger.on("a").prefill_requests

    for event in before:
        happens(*event)
    with ledger.watching("a") as watch:
        seen = [ledger.on("a").prefill_requests, *(happens(*event) for event in during)]
    for event in before:
        happens(*event)
    assert watch.max_prompts == max(seen)


@pytest.mark.parametrize(("prompts", "expected"), [(0, False), (1, True), (2, True)])
def test_prompts_of_others_without_a_first_token_are_reported(prompts: int, expected: bool) -> None:
    """The others are another router's; decoding requests do not count."""
    ledger = Ledger()
    assert not ledger.others_prefill("a")
    ledger.apply_replicas([{"a": InFlight(requests=3, prefill_requests=prompts)}], 0.0)
    assert ledger.others_prefill("a") is expected
