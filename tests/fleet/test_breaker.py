"""Who is ejected, and how long it stays out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.breaker import Breaker, Probes, leaves_enough_ready
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.types import FleetSnapshot, Pod, PodState, Role
from tests.kit.scenes import fleet_of, make_pod

LATE: tuple[float, float] = (600.0, 6001.0)
"""Expected and actual milliseconds, at a factor of ten."""


@pytest.fixture
def fleet() -> Fleet:
    """Two ready pods of one model."""
    return fleet_of(make_pod("a", models=("m",)), make_pod("b", models=("m",)))


def state(fleet: Fleet, pod_id: str) -> PodState:
    status = fleet.status(pod_id)
    assert status is not None
    return status.state


def eject(breaker: Breaker, now_s: float) -> None:
    for _ in range(3):
        breaker.failure("a", now_s)


# --- what counts in a row ---


def play(breaker: Breaker, fleet: Fleet, script: str) -> None:
    """What happens to pod `a`, one step a second. Requests: "f" fails because of the pod, "x", "y" and "z" are clients
    whose request fails for any reason, "s" is served; "h" is a failed health check and "p" a passed one; "l" is a
    late first token of one of two clients by turns and "X" of one alone, each of a request that is then served; "o" is
    a first token on time. "F" fails on pod `b`; "d" drains, "u" undrains, and "r" readmits pod `a`."""
    lates = 0
    for now_s, what in enumerate(script):
        match what:
            case "f" | "F":
                breaker.failure("a" if what == "f" else "b", now_s)
            case "x" | "y" | "z":
                breaker.doubt("a", what, now_s)
            case "s":
                breaker.success("a")
            case "h":
                breaker.probe_failed("a", now_s)
            case "p":
                breaker.seen_alive("a")
            case "l" | "X":
                lates += what == "l"
                breaker.success("a")
                breaker.first_token("a", "xy"[lates % 2] if what == "l" else "x", *LATE, now_s)
            case "o":
                breaker.first_token("a", "x", 600.0, 600.0, now_s)
            case _:
                fleet.event("a", {"d": PodEvent.DRAIN, "u": PodEvent.UNDRAIN, "r": PodEvent.PROBE_OK}[what])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("ff", "ready", id="two failures"),
        pytest.param("ffFF", "ready", id="failures of another pod"),
        pytest.param("fff", "ejected", id="three failures"),
        pytest.param("ffsffsff", "ready", id="a served request settles failures"),
        pytest.param("hhshh", "ready", id="and those of health checks, however slow /health is"),
        pytest.param("fpfpf", "ejected", id="a passed health check excuses no failing requests"),
        pytest.param("hhphhphh", "ready", id="missed health checks now and then"),
        pytest.param("hhphhh", "ejected", id="three missed in a row"),
        pytest.param("fffrff", "ready", id="a readmitted pod counts anew"),
        pytest.param("ffhfrffhh", "ready", id="also the health checks"),
        pytest.param("xxyrxxxx", "ready", id="and forgets whose doubts they were"),
        pytest.param("dffurff", "ready", id="a pod that is not ready cannot fail"),
        pytest.param("xxxxxxxxxx", "ready", id="doubts of one client alone: its requests may be what fails"),
        pytest.param("xy", "ready", id="two doubts of two clients"),
        pytest.param("xxy", "ejected", id="doubts of two clients, all of which count"),
        pytest.param("xyxy", "ejected", id="by turns"),
        pytest.param("xysxxxx", "ready", id="a served request settles doubts and forgets whose they were"),
        pytest.param("fxxx", "ready", id="a failure and doubts of one client"),
        pytest.param("fxxxy", "ejected", id="failures and doubts of several clients add up"),
        pytest.param("l" * 7, "ready", id="seven late first tokens"),
        pytest.param("l" * 8, "ejected", id="eight, though it serves every request"),
        pytest.param("l" * 7 + "o" + "l" * 7, "ready", id="one on time settles it"),
        pytest.param("X" * 20, "ready", id="late for one client alone: a grammar to compile, an adapter to load"),
    ],
)
def test_what_happens_in_a_row_ejects(fleet: Fleet, script: str, expected: str) -> None:
    """With the usual rules, of two pods of a model."""
    play(Breaker(fleet), fleet, script)
    assert (state(fleet, "a"), state(fleet, "b")) == (expected, PodState.READY)


@pytest.mark.parametrize(
    ("rules", "script", "expected"),
    [
        pytest.param(Probes(clients_to_eject=1), "xxx", "ejected", id="one trusted gateway hides all clients"),
        pytest.param(Probes(slow_ttfts_to_eject=0), "l" * 100, "ready", id="lateness is left alone"),
        pytest.param(Probes(failures_to_eject=1), "f", "ejected", id="the first failure"),
    ],
)
def test_other_rules(fleet: Fleet, rules: Probes, script: str, expected: str) -> None:
    play(Breaker(fleet, rules), fleet, script)
    assert state(fleet, "a") == expected


# --- probes that time out, and what the pod sends meanwhile ---


def probed(breaker: Breaker, fleet: Fleet, probes: str, pod_id: str = "a") -> None:
    """One probe after the other. "t": times out after two seconds, "T": meanwhile the pod sends something; "+": it
    sends something between two probes; "f" and "F": the probe is refused or answered with an error; "p": it passes."""
    now_s = 0.0
    for what in probes:
        sent_s = now_s = now_s + 1.0
        if what in "TF+":
            fleet.received(pod_id, now_s := now_s + 1.0)
        if what in "tTfF":
            now_s = sent_s + 2.0
            breaker.probe_failed(pod_id, now_s, *([sent_s] if what in "tT" else ()))
        elif what == "p":
            breaker.seen_alive(pod_id)


@pytest.mark.parametrize(
    ("probes", "expected", "alone"),
    [
        ("ttt", "ejected", "ready"),
        ("ttttttttt", "ejected", "ready"),
        ("tt", "ready", "ready"),
        ("tptpttptt", "ready", "ready"),
        ("TTTTTTTTT", "ready", "ready"),
        ("tt+tt+tt+tt+", "ready", "ready"),
        ("TTTtt", "ready", "ready"),
        ("TTTttt", "ejected", "ready"),
        ("tt+ttt", "ejected", "ready"),
        ("fff", "ejected", "ejected"),
        ("FFF", "ejected", "ejected"),
        ("ttf", "ejected", "ejected"),
        ("TTF", "ready", "ready"),
        ("TTFFF", "ejected", "ejected"),
    ],
)
def test_what_a_pod_sends_outweighs_probes_that_time_out(fleet: Fleet, probes: str, expected: str, alone: str) -> None:
    """Not those that are refused, nor what it sent before. They alone do not take the last ready pod of a model."""
    probed(Breaker(fleet), fleet, probes)
    assert state(fleet, "a") == expected
    last = fleet_of(make_pod("a", models=("m",)), make_pod("b", models=("other",)))
    probed(Breaker(last), last, probes)
    assert state(last, "a") == alone


@pytest.mark.parametrize(("probes", "left"), [("t", "ejected"), ("+t", "ejected"), ("T", "ready"), ("F", "ejected")])
def test_a_single_probe_may_eject(fleet: Fleet, probes: str, left: str) -> None:
    """`failures_to_eject: 1`."""
    probed(Breaker(fleet, Probes(failures_to_eject=1)), fleet, probes)
    assert state(fleet, "a") == left


@pytest.mark.parametrize("waits", [False, True])
def test_pieces_of_streams_show_that_a_pod_is_alive(fleet: Fleet, waits: bool) -> None:
    """Also while prompts wait for their first token."""
    ledger = Ledger()
    breaker, pod = Breaker(fleet, ledger=ledger), make_pod("a")
    ledger.first_token(ledger.book(pod, 100, 0, 0.0), 0.0)
    if waits:
        ledger.book(pod, 100, 0, 0.0)
    for now_s in range(20):
        ledger.stepped("a", now_s + 1.0)
        breaker.probe_failed("a", now_s + 2.0, float(now_s))
    assert state(fleet, "a") is PodState.READY
    for now_s in range(20, 23):
        breaker.probe_failed("a", now_s + 2.0, float(now_s))
    assert state(fleet, "a") is PodState.EJECTED


def test_a_pod_that_stays_although_its_probes_fail_has_a_reason(fleet: Fleet) -> None:
    """Until one passes. Each refused ejection is reported."""
    refused = list[str]()
    breaker = Breaker(fleet, on_refused=refused.append)
    probed(breaker, fleet, "tt")
    assert (fleet.state_reason("a"), breaker.fails_probes("a")) == ("", False)
    probed(breaker, fleet, "TTT")
    kept = "3 health checks in a row failed, but it sends other things"
    assert (fleet.state_reason("a"), breaker.fails_probes("a"), refused) == (kept, True, [])
    fleet.event("b", PodEvent.DRAIN)
    probed(breaker, fleet, "ppp" * 9 + "ttt")
    kept = "3 health checks in a row failed, but it is the last ready pod of a model"
    assert (fleet.state_reason("a"), breaker.fails_probes("a"), refused) == (kept, True, ["a"])
    breaker.seen_alive("a")
    fleet.event("a", PodEvent.PROBE_OK)
    assert (fleet.state_reason("a"), breaker.fails_probes("a")) == ("", False)


TIMEOUTS = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60)


@given(steps=TIMEOUTS)
def test_a_pod_is_ejected_by_timeouts_exactly_if_it_has_sent_nothing_since_the_third_last(
    steps: list[tuple[int, bool]],
) -> None:
    """Against a naive rule, in a fleet where other pods stay ready."""
    fleet = fleet_of(*map(serving, "0123456789"))
    breaker = Breaker(fleet, Probes(failures_to_eject=3))
    seen: dict[str, list[bool]] = {str(n): [] for n in range(6)}
    for now_s, (at, sends) in enumerate(steps):
        if sends:
            fleet.received(str(at), now_s + 0.5)
        breaker.probe_failed(str(at), now_s + 1.0, float(now_s))
        seen[str(at)].append(sends)
    for pod_id, sent in seen.items():
        silent = any(not any(sent[n : n + 3]) for n in range(len(sent) - 2))
        assert (state(fleet, pod_id) is PodState.EJECTED) == silent


# --- how long ---


def test_the_back_off_doubles_until_a_request_is_served(fleet: Fleet) -> None:
    """1, 2, 4, 4 seconds at a limit of 4, however often it is readmitted; then 1 again."""
    breaker = Breaker(fleet, backoff_s=(1.0, 4.0))
    for backoff_s in (1.0, 2.0, 4.0, 4.0):
        eject(breaker, 100.0)
        assert not breaker.may_probe("a", 100.0 + backoff_s - 0.01)
        assert breaker.may_probe("a", 100.0 + backoff_s)
        breaker.seen_alive("a")
        fleet.event("a", PodEvent.PROBE_OK)
    breaker.success("a")
    eject(breaker, 200.0)
    assert breaker.may_probe("a", 201.0)


def test_requests_that_were_under_way_do_not_prolong_an_ejection(fleet: Fleet) -> None:
    """Fifty failing at once are one ejection."""
    breaker = Breaker(fleet)
    for _ in range(50):
        breaker.failure("a", 10.0)
        breaker.probe_failed("a", 10.0)
    assert breaker.may_probe("a", 11.0)


def test_nothing_is_held_against_a_pod_that_is_found_again(fleet: Fleet) -> None:
    """A new pod under an old id starts clean, and unknown pods may always be probed."""
    breaker = Breaker(fleet, Probes(failures_to_eject=2), backoff_s=(1e9, 30.0))
    breaker.failure("a", 0.0)
    breaker.failure("a", 0.0)
    assert not breaker.may_probe("a", 5.0)
    fleet.sync([])
    breaker.failure("a", 0.0)
    assert breaker.may_probe("a", 5.0)


# --- doubts: failures that the request may have caused ---


def doubt(breaker: Breaker, *clients: str, from_s: float = 0.0) -> None:
    """One doubt a second."""
    for n, client in enumerate(clients):
        breaker.doubt("a", client, from_s + n)


@pytest.mark.parametrize("lasts_s", [0.0, 1.9, 2.0])
def test_a_burst_of_doubts_does_not_eject(fleet: Fleet, lasts_s: float) -> None:
    """However many clients fail: other requests get `doubt_window_s` to show that the pod serves."""
    breaker = Breaker(fleet, Probes(doubt_window_s=2.0))
    for n in range(101):
        breaker.doubt("a", f"client {n}", 10.0 + lasts_s * n / 100)
    assert state(fleet, "a") == ("ready" if lasts_s < 2.0 else "ejected")


def test_the_window_begins_with_the_first_doubt_after_a_success(fleet: Fleet) -> None:
    """And again after a refused or executed ejection."""
    breaker = Breaker(fleet, Probes(doubt_window_s=2.0))
    doubt(breaker, *"xy")
    breaker.success("a")
    doubt(breaker, *"xyxy", from_s=5.0)
    assert state(fleet, "a") is PodState.EJECTED
    fleet.event("a", PodEvent.PROBE_OK)
    for client in "xyxyxy":
        breaker.doubt("a", client, 20.0)
    assert state(fleet, "a") is PodState.READY


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
            breaker.first_token("0", f"tenant {client}", *LATE, now_s)
        assert ready_ids(fleet) == "0123"


def test_the_clients_in_a_record_are_few_and_short(fleet: Fleet) -> None:
    """Clients choose their number and the length of their names."""
    breaker = Breaker(fleet, Probes(failures_to_eject=1000, clients_to_eject=2))
    doubt(breaker, *(f"{n}" * 1000 for n in range(100)))
    clients = breaker._failed["a"].clients
    assert len(clients) == 2
    assert all(digest < 2**64 for digest in clients)


# --- enough pods stay ready ---


def serving(pod_id: str, models: str = "m", adapters: str = "", role: Role = Role.BOTH) -> Pod:
    """Models and adapters of one letter each."""
    return make_pod(pod_id, role=role, models=tuple(models), adapters=tuple(adapters))


def ready_ids(fleet: Fleet) -> str:
    return "".join(status.pod.id for status in fleet.snapshot.pods if status.state is PodState.READY)


@pytest.mark.parametrize(
    ("pods", "min_ready_share", "left"),
    [("a", 0.5, 1), ("a", 0.0, 1), ("ab", 0.5, 1), ("abc", 0.5, 2), ("abcd", 0.5, 2), ("abcd", 0.0, 1), ("ab", 1.0, 2)],
)
def test_requests_leave_enough_pods_ready(pods: str, min_ready_share: float, left: int) -> None:
    """However many fail: at least one."""
    fleet = fleet_of(*map(serving, pods))
    breaker = Breaker(fleet, Probes(min_ready_share=min_ready_share, doubt_window_s=0.0))
    for _ in range(10):
        for pod_id in pods:
            breaker.failure(pod_id, 0.0)
            for client in "xy":
                breaker.doubt(pod_id, client, 0.0)
                breaker.first_token(pod_id, client, *LATE, 0.0)
    assert len(ready_ids(fleet)) == left


def test_a_refused_ejection_is_reported_and_failures_are_counted_from_zero() -> None:
    """When another pod returns, this one is ejected after as many failures as any."""
    fleet = fleet_of(serving("a"))
    refused = list[str]()
    breaker = Breaker(fleet, Probes(failures_to_eject=3), on_refused=refused.append)
    eject(breaker, 0.0)
    assert refused == ["a"]
    fleet.sync([serving("a"), serving("b")])
    fleet.event("b", PodEvent.PROBE_OK)
    breaker.failure("a", 0.0)
    breaker.failure("a", 0.0)
    assert state(fleet, "a") is PodState.READY
    breaker.failure("a", 0.0)
    assert (state(fleet, "a"), refused) == (PodState.EJECTED, ["a"])


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


PODS = st.lists(
    st.builds(
        lambda models, adapters, role: ("".join(models), "".join(adapters), role),
        st.sets(st.sampled_from("mn"), min_size=1),
        st.sets(st.sampled_from("rs")),
        st.sampled_from(Role),
    ),
    min_size=1,
    max_size=6,
)


@given(facts=PODS, steps=TIMEOUTS)
def test_no_timeouts_take_a_model_out(facts: list[tuple[str, str, Role]], steps: list[tuple[int, bool]]) -> None:
    """Every model and adapter that had a ready pod for a role keeps one."""
    pods = [serving(str(n), *each) for n, each in enumerate(facts)]
    fleet = fleet_of(*pods)
    breaker = Breaker(fleet, Probes(failures_to_eject=2))
    for now_s, (at, _) in enumerate(steps):
        breaker.probe_failed(str(at % len(pods)), now_s + 1.0, float(now_s))
    left = ready_ids(fleet)
    for name in "mnrs":
        for role in (Role.PREFILL, Role.DECODE):
            able = [each.id for each in pods if each.serves(name) and each.role in (role, Role.BOTH)]
            assert not able or any(pod_id in left for pod_id in able)


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["failure", "doubt", "late", "on time", "success", "probed"]),
              st.sampled_from("xyz")),
    max_size=80,
)  # fmt: skip


def step(breaker: Breaker, fleet: Fleet, pod_id: str, what: str, client: str) -> None:
    match what:
        case "failure":
            breaker.failure(pod_id, 0.0)
        case "doubt":
            breaker.doubt(pod_id, client, 0.0)
        case "late" | "on time":
            breaker.first_token(pod_id, client, 600.0, 6001.0 if what == "late" else 600.0, 0.0)
        case "success":
            breaker.success(pod_id)
        case "probed":
            breaker.seen_alive(pod_id)
            fleet.event(pod_id, PodEvent.PROBE_OK)


@given(facts=PODS, steps=STEPS, share=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_no_sequence_of_results_takes_a_model_out(
    facts: list[tuple[str, str, Role]], steps: list[tuple[int, str, str]], share: float
) -> None:
    """Every model and adapter that had a ready pod for a role keeps one, and the share."""
    pods = [serving(str(n), *each) for n, each in enumerate(facts)]
    fleet = fleet_of(*pods)
    breaker = Breaker(
        fleet, Probes(failures_to_eject=2, slow_ttfts_to_eject=2, min_ready_share=share, doubt_window_s=0.0)
    )
    for at, what, client in steps:
        step(breaker, fleet, str(at % len(pods)), what, client)
        left = ready_ids(fleet)
        for name in "mnrs":
            for role in (Role.PREFILL, Role.DECODE):
                able = [each.id for each in pods if each.serves(name) and each.role in (role, Role.BOTH)]
                assert not able or sum(pod_id in left for pod_id in able) >= max(1, share * len(able))


@given(steps=STEPS)
def test_no_sequence_of_one_clients_doubts_ejects(steps: list[tuple[int, str, str]]) -> None:
    """Among its served requests and late first tokens."""
    fleet = fleet_of(*map(serving, "012345"))
    breaker = Breaker(fleet, Probes(failures_to_eject=2, slow_ttfts_to_eject=2, min_ready_share=0.0))
    for at, what, _ in steps:
        if what != "failure":
            step(breaker, fleet, str(at), what, "x")
    assert ready_ids(fleet) == "012345"


@given(steps=STEPS)
def test_a_pod_is_ejected_exactly_by_the_failures_in_a_row(steps: list[tuple[int, str, str]]) -> None:
    """Against a naive count, in a fleet where enough pods stay ready."""
    fleet = fleet_of(*map(serving, "0123456789"))
    breaker = Breaker(fleet, Probes(failures_to_eject=3, min_ready_share=0.0, doubt_window_s=0.0))
    since_success: dict[str, list[str]] = {str(n): [] for n in range(6)}
    for at, what, client in steps:
        if what not in ("failure", "doubt", "success"):
            continue
        was_ready = state(fleet, str(at)) is PodState.READY
        step(breaker, fleet, str(at), what, client)
        seen = since_success[str(at)]
        if what == "success":
            seen.clear()
        elif was_ready:
            seen.append(client if what == "doubt" else "")
        doubts = [one for one in seen if one]
        counted = seen.count("") + (len(doubts) if len(set(doubts)) > 1 else 0)
        if was_ready:
            assert (state(fleet, str(at)) is PodState.EJECTED) == (counted >= 3)


# --- lateness ---


def late(breaker: Breaker, pod_id: str, times: int, now_s: float = 0.0) -> None:
    """Late first tokens for two clients by turns."""
    for n in range(times):
        breaker.success(pod_id)
        breaker.first_token(pod_id, "xy"[n % 2], *LATE, now_s)


@pytest.mark.parametrize("expected_ms, actual_ms", [(600.0, 6000.0), (1.0, 5000.0)])
def test_one_first_token_on_time_settles_it(fleet: Fleet, expected_ms: float, actual_ms: float) -> None:
    """Ten times of next to nothing is not late."""
    breaker = Breaker(fleet, Probes(slow_ttft_factor=10.0, slow_ttfts_to_eject=8, doubt_window_s=0.0))
    late(breaker, "a", 7)
    breaker.first_token("a", "x", expected_ms, actual_ms, 0.0)
    late(breaker, "a", 7)
    assert state(fleet, "a") is PodState.READY


def test_where_most_are_late_it_is_the_expectation_that_is_wrong(fleet: Fleet) -> None:
    """A price that is ten times too low may not empty a fleet; pods of other models are no witnesses."""
    breaker = Breaker(fleet, Probes(slow_ttfts_to_eject=8, doubt_window_s=0.0))
    for _ in range(100):
        late(breaker, "a", 1)
        late(breaker, "b", 1)
    assert {state(fleet, "a"), state(fleet, "b")} == {PodState.READY}
    alone = fleet_of(make_pod("a", models=("m",)), make_pod("b", models=("other",)))
    late(Breaker(alone, Probes(slow_ttfts_to_eject=8, doubt_window_s=0.0)), "a", 100)
    assert state(alone, "a") is PodState.READY


def test_lateness_is_out_for_longer_and_forgotten_only_when_on_time(fleet: Fleet) -> None:
    """Every probe passes, and so does every request that was under way."""
    rules = Probes(clients_to_eject=1, slow_ttfts_to_eject=1, doubt_window_s=0.0)
    breaker = Breaker(fleet, rules, backoff_s=(1.0, 1.5))
    late(breaker, "a", 1, now_s=0.0)
    breaker.success("a")
    assert [breaker.may_probe("a", now_s) for now_s in (9.9, 10.0)] == [False, True]
    fleet.event("a", PodEvent.PROBE_OK)
    late(breaker, "a", 1, now_s=20.0)
    assert [breaker.may_probe("a", now_s) for now_s in (34.9, 35.0)] == [False, True]
    fleet.event("a", PodEvent.PROBE_OK)
    breaker.first_token("a", "x", 600.0, 600.0, 40.0)
    late(breaker, "a", 1, now_s=50.0)
    assert breaker.may_probe("a", 60.0)


def test_a_pod_that_sends_too_much_is_ejected_at_once(fleet: Fleet) -> None:
    """With the reason, and for longer than after failures: it passes every probe."""
    breaker = Breaker(fleet)
    breaker.exceeded("a", "too many models", 0.0)
    assert (state(fleet, "a"), fleet.state_reason("a")) == (PodState.EJECTED, "too many models")
    assert not breaker.may_probe("a", 9.0) and breaker.may_probe("a", 11.0)


def test_the_last_ready_pod_is_not_ejected_for_sending_too_much(fleet: Fleet) -> None:
    """What it sends too much of is not read, and its requests are served."""
    refused = list[str]()
    breaker = Breaker(fleet, on_refused=refused.append)
    for pod in ("a", "b", "gone"):
        breaker.exceeded(pod, "too many models", 0.0)
    assert (state(fleet, "a"), state(fleet, "b")) == (PodState.EJECTED, PodState.READY)
    assert refused == ["b"]


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
