"""The sentences at the top of the page: each for its incident, none while all is well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.frontends.admin.page_figures import (
    MAX_CHARACTERS,
    MAX_ERROR_CHARACTERS,
    Counted,
    CountedHistory,
    MetricRows,
    Present,
    lateness_of,
    unserved_of,
)
from router.frontends.admin.views import WithoutPods
from router.observe.declared import of_requests
from router.types import Matching, PodState, PodStatus
from tests.kit.scenes import pod

LINKS = {"elsewhere": (100.0, 20.0)}
WELL = Present(pods=6, waiting=2, slowdowns={"pod-1": 1.3}, index_age_s=0.4, reload_age_s=5.0, reload_ttft_ratio=1.1)


def history() -> CountedHistory:
    """Half a minute of a fleet in which all is well."""
    made = CountedHistory()
    for second in range(31):
        made.add(counted(second))
    return made


def counted(second: float) -> Counted:
    transfers = {link: (second * one, second * two) for link, (one, two) in LINKS.items()}
    return Counted(second, transfers, answered(second, ok=10 * second, client_gone=second))


def answered(_second: float = 0.0, **results: float) -> dict[str, MetricRows]:
    """Requests that ended, by result."""
    return {of_requests.REQUESTS.name: [((result,), [count]) for result, count in results.items()]}


def shown(present: Present = WELL, **changed: object) -> list[tuple[str, str]]:
    """The notices a second later, with these counters changed."""
    made = history()
    made.add(replace(counted(31), **changed))  # type: ignore[arg-type]
    return [(one.about, one.text) for one in made.notices(present)]


def test_nothing_is_said_while_all_is_well() -> None:
    assert shown() == []


@pytest.mark.parametrize(("met", "missed", "is_shown"), [(40, 5, True), (46, 5, False), (0, 4, False)])
def test_a_model_that_misses_its_slo_is_named(met: int, missed: int, is_shown: bool) -> None:
    """If fewer than nine in ten first tokens of the last minute met it, of either policy; not for a few requests."""
    rows = [(("m", "a", "true"), [met]), (("m", "a", "false"), [missed - 1]), (("m", "b", "false"), [1])]
    text = f"{missed} of {met + missed} first tokens of m came later than its SLO."
    assert shown(metrics={of_requests.SLO_REQUESTS.name: rows}) == ([("slo", text)] if is_shown else [])


def test_failing_requests_are_the_first_line_in_red() -> None:
    """By the share of all answers, with the most frequent reason; not for faults of clients, or one failure of many."""
    failing = answered(ok=310 + 40, client_gone=31, upstream_broken=3, no_ready_pod=57)
    made = history()
    made.add(replace(counted(31), metrics=failing))
    [first, second] = made.notices(replace(WELL, ejected={"pod-2": ""}))
    assert (first.about, first.is_red, second.is_red) == ("failing", True, False)
    assert first.text == "60 of 441 requests (14%) failed in the last 31 s, most of them: no_ready_pod."
    for fine in ({"malformed_request": 99}, {"rate_limit_exceeded": 99}, {"overloaded": 99}, {"upstream_broken": 2}):
        assert shown(metrics=answered(ok=310, client_gone=31, **fine)) == []


@pytest.mark.parametrize("result", ["no_ready_pod", "model_not_found", "invalid_api_key"])
def test_that_nobody_was_served_for_a_minute_is_said_whatever_the_reason(result: str) -> None:
    """Although requests came: a fleet without requests is well, and so is one that served a single one."""
    text = f"Nobody was served in the last 55 s: all 50 requests failed, most of them: {result}."
    assert minute(**{result: 50}) == [("failing", text, True)]
    assert minute() == []
    assert ("failing", text, True) not in minute(ok=1, **{result: 50})


def minute(**results: float) -> list[tuple[str, str, bool]]:
    """The notices after a minute with these answers."""
    made = CountedHistory()
    made.add(Counted(0, {}, answered()))
    made.add(Counted(55, {}, answered(**results)))
    return [(one.about, one.text, one.is_red) for one in made.notices(WELL)]


def test_a_fleet_without_a_ready_pod_is_the_first_line_in_red() -> None:
    """With the states and the first reason; the ejected pods have no line of their own then."""
    down = replace(WELL, unserved={"": "2 ejected, 1 joining; a (connection refused)"}, ejected={"a": "", "b": ""})
    assert red(down) == ["No pod is ready, so all requests fail: 2 ejected, 1 joining; a (connection refused)."]
    of_one = replace(WELL, unserved={"qwen3-32b": "1 ejected; a (connection refused)"})
    assert red(of_one) == ["No pod of qwen3-32b is ready, so its requests fail: 1 ejected; a (connection refused)."]


def test_without_a_ready_pod_requests_may_wait_or_reach_a_provider() -> None:
    """The first is no outage: a fleet of zero is normal at night."""
    down = replace(WELL, unserved={"": "2 ejected"})
    [waits] = history().notices(replace(down, without_pods=WithoutPods.WAIT))
    assert (waits.text, waits.is_red) == ("No pod is ready, so all requests wait for one: 2 ejected.", False)
    paid = replace(down, without_pods=WithoutPods.LEAVE)
    assert red(paid) == ["No pod is ready, so all requests fail where no provider serves them: 2 ejected."]
    [nobody] = history().notices(Present(without_pods=WithoutPods.WAIT))
    assert nobody.text.startswith("No pod is known, so all requests wait for one: ") and not nobody.is_red


def test_a_router_without_any_pod_says_what_to_do_next() -> None:
    """Or what its source of pods says."""
    [text] = red(Present())
    assert text.startswith("No pod is known, so all requests fail: name engines under `pods` in router.yaml")
    assert red(Present(source_error="kubernetes: 403 Forbidden")) == [
        "No pod is known, so all requests fail: kubernetes: 403 Forbidden."
    ]


def red(present: Present) -> list[str]:
    found = history().notices(present)
    assert all(one.is_red for one in found)
    return [one.text for one in found]


def test_a_model_has_no_ready_pod_if_none_of_its_pods_is() -> None:
    """All models at once, if no pod is ready."""
    one, two = pod("a", models=("m",)), pod("b", models=("m", "n"))
    reasons = {"a": "connection refused"}.get

    def found(*states: PodState) -> dict[str, str]:
        statuses = [PodStatus(each, state) for each, state in zip((one, two), states, strict=True)]
        return unserved_of(statuses, lambda pod_id: reasons(pod_id, ""))

    assert found(PodState.READY, PodState.READY) == {}
    assert found(PodState.READY, PodState.EJECTED) == {"n": "1 ejected"}
    assert found(PodState.EJECTED, PodState.JOINING) == {"": "1 ejected, 1 joining; a (connection refused)"}


@pytest.mark.parametrize(
    ("changes", "about", "text"),
    [
        ({"slowdowns": {"pod-1": 2.94}}, "slow", "pod-1 computes 2.9 times slower than other pods of its class."),
        (
            {"slowdowns": {}, "lateness": {"pod-1": 2.62}},
            "slow",
            "Requests on pod-1 take 2.6 times as long as expected.",
        ),
        (
            {"slowdowns": {"pod-1": 2.94}, "lateness": {"pod-1": 2.62}},
            "slow",
            "pod-1 computes 2.9 times slower than other pods of its class.",
        ),
        (
            {"ejected": {"pod-2": "connection refused", "pod-3": ""}},
            "ejected",
            "2 of 6 pods ejected: pod-2 (connection refused), pod-3.",
        ),
        (
            {"unwell": {"pod-2": "3 health checks in a row failed, but it is the last ready pod of a model"}},
            "unwell",
            "pod-2 fails its health checks, and still gets requests: 3 health checks in a row failed, but it is the"
            " last ready pod of a model.",
        ),
        (
            {"restarted": ["pod-1"]},
            "restarts",
            "1 of 6 pods restarted in the last minute, with empty caches: pod-1.",
        ),
        (
            {"events_lost": tuple("abcde")},
            "events",
            "KV events were lost: a, b, c and 2 more. Their caches are partly unknown until they restart.",
        ),
        (
            {"matching": {"a": (Matching.OFF, "no tokenizer"), "b": (Matching.EVENTS, "")}},
            "matching",
            "1 of 6 pods (a) are routed by load only: no tokenizer.",
        ),
        (
            {"matching": {"a": (Matching.NO_EVENTS, "no KV events"), "b": (Matching.PREDICTED, "")}},
            "matching",
            "1 of 6 pods (a): no KV events.",
        ),
        ({"index_age_s": 8.2}, "index", "The shared index is 8 s old: Redis does not answer."),
        (
            {"providers_failing": 2},
            "identity",
            "The signing keys of 2 identity providers cannot be fetched: tokens signed with known keys stay valid,"
            " others are refused. The log names them.",
        ),
        (
            {"reload_ttft_ratio": 1.61, "reload_review": "61 of 100 decisions would change"},
            "policy",
            "Policies were changed 5 s ago, for the worse: mean predicted TTFT +61%; 61 of 100 decisions would change.",
        ),
        (
            {"policy_error": "a.yaml:3: costs: unknown"},
            "policy",
            "Policy files are invalid; the last valid set stays: a.yaml:3: costs: unknown",
        ),
    ],
)
def test_the_state_of_the_fleet(changes: dict[str, object], about: str, text: str) -> None:
    assert shown(replace(WELL, **changes)) == [(about, text)]  # type: ignore[arg-type]


def test_a_pod_is_late_if_others_are_not() -> None:
    """By its last first tokens, at least three of them; a whole fleet that is slow has no late pod."""
    well = [("a", 1.0), ("b", 1.1)] * 6
    assert lateness_of([*well, *[("c", 2.4)] * 3]) == {"c": pytest.approx(2.4 / 1.05)}
    assert lateness_of([*well, *[("c", 2.4)] * 2]) == {}
    assert "c" in lateness_of([*well, *[("c", 1.0)] * 20, *[("c", 2.4)] * 4]), "by its latest"
    assert lateness_of([("a", 2.5), ("b", 2.4), ("c", 2.4)] * 6) == {}
    assert lateness_of([("a", 1.0), ("c", 2.4), ("c", 2.4), ("c", 2.4)]) == {}, "too few others"


def test_a_tenant_floods_if_others_wait() -> None:
    """Without waiting requests it harms nobody, and without other tenants it is no flood."""
    busy, flood = replace(WELL, waiting=14), {"a": 1000.0, "b": 9000.0}
    text = "Tenant b has 90% of the prompt tokens being served; 14 requests wait in engines."
    assert shown(replace(busy, tenant_tokens=flood)) == [("tenant", text)]
    assert shown(replace(WELL, tenant_tokens=flood)) == []
    assert shown(replace(busy, tenant_tokens={"b": 9000.0})) == []
    assert shown(replace(busy, tenant_tokens={"a": 5000.0, "b": 9000.0})) == []


def test_a_link_that_lost_bandwidth() -> None:
    """By its latest transfers, however many good ones there were in the minute before."""
    made = history()
    for second in range(31, 35):
        more = 2.0 * (second - 30)
        made.add(replace(counted(second), transfers={"elsewhere": (3000.0 + more, 600.0 + more)}))
    text = "6 of the latest 6 transfers of KV over links elsewhere took more than 3 times as long as configured."
    assert [(one.about, one.text) for one in made.notices(WELL)] == [("link", text)]


def test_single_transfers_that_a_busy_receiver_delays_are_no_notice() -> None:
    """Nor are too few transfers, or a fifth that are slow."""
    assert shown(transfers={"new": (5.0, 5.0)}) == []
    assert shown(transfers={"new": (8.0, 6.0)}) == []
    assert shown(transfers={"elsewhere": (3100.0, 620.0)}) == []
    assert [about for about, _ in shown(transfers={"new": (8.0, 7.0)})] == ["link"]


def test_names_that_clients_and_pods_choose_are_cut() -> None:
    """And a page that was not watched for long begins again."""
    [(_, text)] = shown(replace(WELL, ejected={f"{number}{'x' * 10_000}": "y" * 10_000 for number in range(9)}))
    assert len(text) < 5 * (MAX_CHARACTERS + MAX_ERROR_CHARACTERS)
    made = history()
    made.add(replace(counted(1000), metrics=answered(ok=1000, client_gone=1000, upstream_broken=1000)))
    assert made.notices(WELL) == []


def test_pods_of_many_reasons_are_a_few_sentences() -> None:
    """Where each names its own address; the most frequent reason is first."""
    own = {f"pod-{number}": (Matching.NO_EVENTS, f"tcp://{number}:5557 is refused") for number in range(500)}
    shared = dict.fromkeys(("x", "y"), (Matching.OFF, "no tokenizer"))
    first, *_, last = texts = [text for _, text in shown(replace(WELL, pods=502, matching=own | shared))]
    assert first == "2 of 502 pods (x, y) are routed by load only: no tokenizer."
    assert (len(texts), last) == (4, "498 of 502 pods have other reasons; `warmroute pods` lists them.")
