"""Who is ejected, and how long it stays out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.fleet.breaker import LONG_BACKOFF_FACTOR, MIN_EXPECTED_MS, Breaker, Probes, leaves_enough_ready
from router.fleet.fleet import Fleet, PodEvent, transition
from router.fleet.ledger import Ledger
from router.types import FleetSnapshot, Pod, PodState, Role
from tests.kit.scenes import fleet_of, make_pod


@pytest.fixture
def fleet() -> Fleet:
    """Two ready pods of one model."""
    return fleet_of(make_pod("a", models=("m",)), make_pod("b", models=("m",)))


def state(fleet: Fleet, pod_id: str) -> PodState:
    status = fleet.status(pod_id)
    assert status is not None
    return status.state


def serving(pod_id: str, models: str = "m", adapters: str = "", role: Role = Role.BOTH) -> Pod:
    """Models and adapters of one letter each."""
    return make_pod(pod_id, role=role, models=tuple(models), adapters=tuple(adapters))


# --- any history, against the rules of the module's table, computed from what has happened to each pod ---

FACTS = st.tuples(
    st.sampled_from(["m", "m", "m", "n", "mn"]), st.sampled_from(["", "", "", "s"]), st.sampled_from([Role.BOTH, *Role])
)
RULES = st.builds(
    Probes,
    failures_to_eject=st.integers(1, 3),
    clients_to_eject=st.integers(1, 3),
    min_ready_share=st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0]),
    slow_ttfts_to_eject=st.integers(0, 3),
    doubt_window_s=st.sampled_from([0.0, 2.0]),
)
NAMES = st.sampled_from("aaabcde")
TIMES = st.integers(1, 4)
APART_S = st.sampled_from([0.0, 0.0, 1.0])
RETRIES = (1.0, 4.0)


@dataclass
class History:
    """What has happened to a pod since it was found. Requests since the last served one, first tokens since the last
    one on time: each with its time and its client, "-" if the pod alone is the cause. Both begin anew with each
    ejection, also with a refused one."""

    state: PodState = PodState.JOINING
    reason: str = ""
    failed: list[tuple[float, str]] = field(default_factory=list)
    late: list[tuple[float, str]] = field(default_factory=list)
    is_late: bool = False
    probes_sent_s: list[float] = field(default_factory=list)
    received_s: float = -inf
    ejections: Counter[str] = field(default_factory=Counter)
    probe_at_s: dict[str, float] = field(default_factory=dict)

    def forget(self, what: str) -> None:
        getattr(self, what).clear()
        del self.ejections[what]
        self.probe_at_s.pop(what, None)


class AnyHistory(RuleBasedStateMachine):
    """Requests, first tokens, health checks and calls of operators, in any order, at up to five pods."""

    @initialize(facts=st.lists(FACTS, min_size=2, max_size=5), rules=RULES)
    def begins(self, facts: list[tuple[str, str, Role]], rules: Probes) -> None:
        self.pods = {name: serving(name, *each) for name, each in zip("abcde", facts, strict=False)}
        self.now_s, self.rules = 0.0, rules
        self.fleet, self.ledger, self.refused = fleet_of(*self.pods.values()), Ledger(), list[str]()
        self.breaker = Breaker(self.fleet, rules, self.ledger, self.refused.append, RETRIES)
        self.histories = {name: History(PodState.READY) for name in self.pods}
        self.expected_refused = list[str]()
        for pod in self.pods.values():
            self.ledger.first_token(self.ledger.book(pod, 100, 0, 0.0), 0.0)

    def ready(self, name: str) -> History | None:
        history = self.histories.get(name)
        return history if history is not None and history.state is PodState.READY else None

    def doubts(self, row: list[tuple[float, str]]) -> int:
        """Those of several clients, and over some time."""
        doubts = [one for one in row if one[1] != "-"]
        several = len({client for _, client in doubts}) >= self.rules.clients_to_eject
        return len(doubts) if several and self.now_s - doubts[0][0] >= self.rules.doubt_window_s else 0

    def has_enough_without(self, name: str, share: float) -> bool:
        """For each model and adapter of the pod, and each of its roles."""
        pod = self.pods[name]
        for served in (*pod.models, *pod.adapters):
            for role in (Role.PREFILL, Role.DECODE) if pod.role is Role.BOTH else (pod.role,):
                able = [
                    each.id for each in self.pods.values() if each.serves(served) and each.role in (role, Role.BOTH)
                ]
                states = Counter(self.histories[each].state for each in able)
                ready, ejected = states[PodState.READY], states[PodState.EJECTED]
                if ready - 1 < max(1, share * (ready + ejected)):
                    return False
        return True

    def ejects(self, name: str, what: str, reason: str, share: float | None, factor: float = 1.0) -> None:
        history = self.histories[name]
        getattr(history, what).clear()
        if share is not None and not self.has_enough_without(name, share):
            self.expected_refused.append(name)
            return
        history.probes_sent_s.clear()
        history.ejections[what] += 1
        history.probe_at_s[what] = self.now_s + factor * min(2.0 ** (history.ejections[what] - 1), RETRIES[1])
        history.state, history.reason = PodState.EJECTED, reason

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=NAMES, clients=st.text("-wxy", min_size=1, max_size=5), apart_s=APART_S)
    def requests_fail(self, name: str, clients: str, apart_s: float) -> None:
        """One of each client, "-" because of the pod alone."""
        for client in clients:
            self.now_s += apart_s
            if client == "-":
                self.breaker.failure(name, self.now_s)
            else:
                self.breaker.doubt(name, client, self.now_s)
            if history := self.ready(name):
                history.failed.append((self.now_s, client))
                count = sum(who == "-" for _, who in history.failed) + self.doubts(history.failed)
                if count >= self.rules.failures_to_eject:
                    self.ejects(name, "failed", f"{count} requests in a row failed", self.rules.min_ready_share)

    @rule(name=NAMES)
    def a_request_is_served(self, name: str) -> None:
        self.breaker.success(name)
        if history := self.histories.get(name):
            history.forget("failed")
            history.probes_sent_s.clear()

    @rule(
        name=NAMES,
        clients=st.text("wxy", min_size=1, max_size=5),
        apart_s=APART_S,
        expected_ms=st.sampled_from([1.0, 600.0]),
        late=st.sampled_from([True, True, False]),
    )
    def first_tokens_come(self, name: str, clients: str, apart_s: float, expected_ms: float, late: bool) -> None:
        limit_ms = self.rules.slow_ttft_factor * max(expected_ms, MIN_EXPECTED_MS)
        for client in clients:
            self.now_s += apart_s
            self.breaker.first_token(name, client, expected_ms, limit_ms + late, self.now_s)
            if not late and (history := self.histories.get(name)):
                history.forget("late")
                history.is_late = False
            elif late and (history := self.ready(name)):
                history.is_late = True
                history.late.append((self.now_s, client))
                alike = [one for one in self.pods if one != name and self.pods[one].models == self.pods[name].models]
                on_time = [one for one in alike if (other := self.ready(one)) and not other.is_late]
                if self.doubts(history.late) >= self.rules.slow_ttfts_to_eject > 0 and 2 * len(on_time) > len(alike):
                    reason = f"{len(history.late)} first tokens in a row were late"
                    self.ejects(name, "late", reason, self.rules.min_ready_share, LONG_BACKOFF_FACTOR)

    @rule(name=NAMES, took_s=st.sampled_from([0.0, 2.0, None]), times=TIMES)
    def probes_fail(self, name: str, took_s: float | None, times: int) -> None:
        """None: refused, or an error."""
        for _ in range(times):
            sent_s = inf if took_s is None else self.now_s - took_s
            self.breaker.probe_failed(name, self.now_s, sent_s)
            if history := self.ready(name):
                history.probes_sent_s = [*history.probes_sent_s, sent_s][-self.rules.failures_to_eject :]
                seen = f"{len(history.probes_sent_s)} health checks in a row failed"
                if len(history.probes_sent_s) < self.rules.failures_to_eject:
                    history.reason = ""
                elif history.received_s > min(history.probes_sent_s):
                    history.reason = f"{seen}, but it sends other things"
                else:
                    history.reason = f"{seen}, but it is the last ready pod of a model"
                    self.ejects(name, "failed", seen, None if inf in history.probes_sent_s else 0.0)

    @rule(name=NAMES)
    def a_probe_passes(self, name: str) -> None:
        self.breaker.seen_alive(name)
        if history := self.histories.get(name):
            history.probes_sent_s.clear()

    @rule(name=NAMES, streams=st.booleans())
    def a_pod_sends_something(self, name: str, streams: bool) -> None:
        """A piece of a stream, or an answer or event that no request waits for."""
        (self.ledger.stepped if streams else self.fleet.received)(name, self.now_s)
        if history := self.histories.get(name):
            history.received_s = self.now_s

    @rule(name=NAMES)
    def a_pod_sends_too_much(self, name: str) -> None:
        self.breaker.exceeded(name, "too many models", self.now_s)
        if self.ready(name):
            self.ejects(name, "failed", "too many models", 0.0, LONG_BACKOFF_FACTOR)

    @rule(name=NAMES, event=st.sampled_from([PodEvent.PROBE_OK, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.UNDRAIN]))
    def the_fleet_changes_its_state(self, name: str, event: PodEvent) -> None:
        self.fleet.event(name, event)
        if history := self.histories.get(name):
            before, history.state = history.state, transition(history.state, event)
            if history.state is not before or (event is PodEvent.PROBE_OK and before is PodState.READY):
                history.reason = ""

    @rule(name=NAMES)
    def another_pod_gets_the_id(self, name: str) -> None:
        """Nothing is held against it but a stream that has sent meanwhile, since the ledger knows no lives."""
        if name in self.pods:
            self.fleet.sync(pod for pod in self.pods.values() if pod.id != name)
            self.fleet.sync(self.pods.values())
            self.histories[name] = History(received_s=self.ledger.received_at_s(name))

    @invariant()
    def the_same_pods_are_ejected_for_the_same_reasons_and_as_long(self) -> None:
        for name, history in self.histories.items():
            assert (state(self.fleet, name), self.fleet.state_reason(name)) == (history.state, history.reason)
            assert self.breaker.fails_probes(name) == (len(history.probes_sent_s) >= self.rules.failures_to_eject)
            due_s = max(history.probe_at_s.values(), default=0.0)
            for at_s in (due_s - 0.01, due_s):
                assert self.breaker.may_probe(name, at_s) == (history.state is PodState.READY or at_s >= due_s)
        assert self.refused == self.expected_refused


TestAnyHistory = AnyHistory.TestCase


# --- the same as sentences ---


def play(breaker: Breaker, fleet: Fleet, script: str) -> None:
    """What happens to pod `a`, one step a second. Requests: "f" fails because of the pod, "x" and "y" are clients whose
    request fails for any reason, "s" is served; "h" is a failed health check and "p" a passed one; "l" is a late first
    token of one of two clients by turns, of a request that is then served; "o" is a first token on time. "r" readmits
    it."""
    for now_s, what in enumerate(script):
        match what:
            case "f":
                breaker.failure("a", now_s)
            case "x" | "y":
                breaker.doubt("a", what, now_s)
            case "s":
                breaker.success("a")
            case "h":
                breaker.probe_failed("a", now_s)
            case "p":
                breaker.seen_alive("a")
            case "r":
                fleet.event("a", PodEvent.PROBE_OK)
            case "l" | "o":
                breaker.success("a")
                breaker.first_token("a", "xy"[now_s % 2], 600.0, 6001.0 if what == "l" else 6000.0, now_s)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("fff", "ejected", id="three failures"),
        pytest.param("ffsffsff", "ready", id="a served request settles failures"),
        pytest.param("fpfpf", "ejected", id="a passed health check excuses no failing requests"),
        pytest.param("hhshh", "ready", id="a served request excuses slow health checks"),
        pytest.param("xxxxxxxxxx", "ready", id="doubts of one client alone: its requests may be what fails"),
        pytest.param("xxy", "ejected", id="doubts of two clients, all of which count"),
        pytest.param("fxxxy", "ejected", id="failures and doubts of several clients add up"),
        pytest.param("xxyrxxxx", "ready", id="a readmitted pod counts anew, and forgets whose doubts they were"),
        pytest.param("l" * 8, "ejected", id="eight late first tokens, though it serves every request"),
        pytest.param("l" * 7 + "o" + "l" * 7, "ready", id="one on time settles it"),
    ],
)
def test_what_happens_in_a_row_ejects(fleet: Fleet, script: str, expected: str) -> None:
    """With the usual rules, of two pods of a model."""
    play(Breaker(fleet), fleet, script)
    assert (state(fleet, "a"), state(fleet, "b")) == (expected, PodState.READY)


def test_the_back_off_doubles_until_a_request_is_served(fleet: Fleet) -> None:
    """1, 2, 4, 4 seconds at a limit of 4, however often it is readmitted; then 1 again."""
    breaker = Breaker(fleet, backoff_s=(1.0, 4.0))
    for backoff_s in (1.0, 2.0, 4.0, 4.0, 1.0):
        if backoff_s == 1.0:
            breaker.success("a")
        for _ in range(3):
            breaker.failure("a", 100.0)
        assert [breaker.may_probe("a", 100.0 + backoff_s + late_s) for late_s in (-0.01, 0.0)] == [False, True]
        fleet.event("a", PodEvent.PROBE_OK)


HOSTILE = st.lists(st.tuples(st.floats(0.0, 1.9), st.sampled_from(["doubt", "late"]), st.integers(0, 99)), max_size=60)


@given(steps=HOSTILE)
def test_no_sequence_of_clients_ejects_a_pod_that_serves_others(steps: list[tuple[float, str, int]]) -> None:
    """Bodies that fail or are late, for made-up tenants, while the pod serves a request in each window."""
    fleet = fleet_of(*map(serving, "0123"))
    breaker = Breaker(fleet, Probes(failures_to_eject=2, slow_ttfts_to_eject=2, min_ready_share=0.0))
    now_s = served_s = 0.0
    for pause_s, what, client in steps:
        if now_s + pause_s - served_s >= 1.9:
            served_s = now_s
            breaker.success("0")
            breaker.first_token("0", "good", 600.0, 600.0, now_s)
        now_s += pause_s
        if what == "doubt":
            breaker.doubt("0", f"tenant {client}", now_s)
        else:
            breaker.first_token("0", f"tenant {client}", 600.0, 6001.0, now_s)
        assert {state(fleet, pod) for pod in "0123"} == {PodState.READY}


def test_the_clients_in_a_record_are_few_and_short(fleet: Fleet) -> None:
    """Clients choose their number and the length of their names."""
    breaker = Breaker(fleet, Probes(failures_to_eject=1000, clients_to_eject=2))
    for n in range(100):
        breaker.doubt("a", f"{n}" * 1000, n)
    clients = breaker._failed["a"].clients
    assert len(clients) == 2
    assert all(digest < 2**64 for digest in clients)


# --- enough pods stay ready ---


@pytest.mark.parametrize(
    ("others", "enough"),
    [
        ([serving("b")], False),
        ([serving("b", adapters="s")], True),
        ([serving("b", models="n", adapters="s")], False),
        ([serving("b", adapters="s", role=Role.PREFILL)], False),
        ([serving("b", adapters="s", role=Role.DECODE)], False),
        ([serving("b", adapters="s", role=Role.DECODE), serving("c", adapters="s", role=Role.PREFILL)], True),
        ([serving("b", adapters="s"), serving("c"), serving("d")], True),
    ],
)
def test_each_model_and_adapter_needs_a_pod_for_prefill_and_decode(others: list[Pod], enough: bool) -> None:
    """Pod `a` serves model `m` with adapter `s` in both roles."""
    leaving = serving("a", adapters="s")
    assert leaves_enough_ready(fleet_of(leaving, *others).snapshot, leaving, 0.5) is enough


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_last_prefill_or_decode_pod_stays(role: Role) -> None:
    """The other role cannot replace it."""
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    leaving = serving("a", role=role)
    fleet = fleet_of(leaving, serving("b", role=other), serving("c", role=other))
    assert not leaves_enough_ready(fleet.snapshot, leaving, 0.5)


def test_pods_that_drain_or_join_do_not_count() -> None:
    """Neither as ready nor as missing."""
    fleet = fleet_of(*map(serving, "abc"))
    fleet.event("b", PodEvent.DRAIN)
    fleet.sync([*map(serving, "abcd")])
    assert leaves_enough_ready(fleet.snapshot, serving("a"), 0.5)
    fleet.event("c", PodEvent.DRAIN)
    assert not leaves_enough_ready(fleet.snapshot, serving("a"), 0.0)


# --- votes of clients ---


def ends(breaker: Breaker, pod: str, clients: str, results: str, now_s: float = 0.0) -> None:
    """Requests of each client to the pod: "+" is served, "-" fails."""
    for client in clients:
        for result in results:
            breaker.ended(pod, client, now_s, is_served=result == "+")


@pytest.mark.parametrize(
    ("at_a", "at_b", "expected"),
    [
        pytest.param({"x": "----"}, {"x": "+++"}, PodState.EJECTED, id="one client, served elsewhere"),
        pytest.param({"x": "+" * 500 + "-" * 18}, {"x": "+++"}, PodState.EJECTED, id="all went well until now"),
        pytest.param({"x": "+-" * 50}, {"x": "+++"}, PodState.READY, id="every second one fails"),
        pytest.param({"x": "--"}, {"x": "+++"}, PodState.READY, id="too few failures"),
        pytest.param({"x": "----"}, {}, PodState.READY, id="nobody else was asked"),
        pytest.param({"x": "----"}, {"y": "+++"}, PodState.READY, id="another client is served elsewhere"),
        pytest.param({"x": "-" * 50}, {"x": "+" + "-" * 9}, PodState.READY, id="bad requests fail everywhere"),
        pytest.param({"y": "+", "x": "-" * 50}, {"x": "+++"}, PodState.READY, id="one client has one vote"),
        pytest.param({"y": "+", "xz": "---"}, {"xz": "+++"}, PodState.EJECTED, id="most clients decide"),
        pytest.param({"y": "+" * 9, "xz": "---"}, {"xz": "+++"}, PodState.READY, id="most requests are served"),
    ],
)
def test_a_pod_that_fails_clients_whom_others_serve_is_ejected(
    fleet: Fleet, at_a: dict[str, str], at_b: dict[str, str], expected: PodState
) -> None:
    """By its clients' votes: also where none of its answers counts as a failure by itself, as 400 and 404."""
    breaker = Breaker(fleet)
    for pod, results in (("b", at_b), ("a", at_a)):
        for clients, each in results.items():
            ends(breaker, pod, clients, each)
    assert state(fleet, "a") is expected and state(fleet, "b") is PodState.READY
    if expected is PodState.EJECTED:
        assert "other pods served the same clients" in fleet.state_reason("a")
        assert not breaker.may_probe("a", 9.0) and breaker.may_probe("a", 11.0)


def test_votes_of_clients_expire(fleet: Fleet) -> None:
    """And successes are counted only for a while after a failure."""
    breaker = Breaker(fleet)
    assert not breaker.counts_success(0.0)
    ends(breaker, "b", "x", "+++")
    ends(breaker, "a", "x", "--")
    assert breaker.counts_success(29.0) and not breaker.counts_success(31.0)
    ends(breaker, "a", "x", "-", now_s=31.0)
    assert state(fleet, "a") is PodState.READY


def test_a_failure_is_counted_without_a_look_at_all_pods() -> None:
    """A client may cause many of them."""

    class WatchedFleet(Fleet):
        looks = 0

        @property
        def snapshot(self) -> FleetSnapshot:
            self.looks += 1
            return super().snapshot

    fleet = WatchedFleet()
    fleet.sync(make_pod(name, models=("m",)) for name in "abc")
    for name in "abc":
        fleet.event(name, PodEvent.PROBE_OK)
    breaker, fleet.looks = Breaker(fleet), 0
    for pod in "bca":
        ends(breaker, pod, "x", "-" * 50)
    assert fleet.looks == 0


def test_a_pod_that_changes_its_models_has_one_record(fleet: Fleet) -> None:
    """It may list others at every probe."""
    breaker = Breaker(fleet)
    for number in range(100):
        fleet.describe("a", models=(f"m{number}",))
        ends(breaker, "a", "x", "-")
    assert sum(map(len, breaker._outcomes._windows.values())) == 1


def test_made_up_clients_do_not_outvote_those_that_are_served(fleet: Fleet) -> None:
    breaker, names = Breaker(fleet), "".join(map(chr, range(100, 300)))
    ends(breaker, "b", names, "+++")
    for name in names * 3:
        ends(breaker, "a", "x", "+")
        ends(breaker, "a", name, "-")
    assert state(fleet, "a") is PodState.READY


def test_the_last_ready_pod_keeps_its_bad_answers() -> None:
    """And a pod of other models is no witness."""
    fleet = fleet_of(make_pod("a", models=("m",)), make_pod("b", models=("m",)), make_pod("c", models=("n",)))
    refused = list[str]()
    breaker = Breaker(fleet, on_refused=refused.append)
    ends(breaker, "c", "x", "+++")
    ends(breaker, "a", "x", "----")
    assert state(fleet, "a") is PodState.READY
    ends(breaker, "a", "y", "+++")
    breaker.exceeded("a", "too much", 0.0)
    ends(breaker, "b", "y", "---")
    assert state(fleet, "b") is PodState.READY and refused == ["b"]
