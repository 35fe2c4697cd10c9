"""The sentences at the top of the page: each for its incident, none while all is well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.frontends.admin.page_notices import MAX_CHARACTERS, Counted, CountedHistory, Present, lateness_of
from router.observe.declared import of_requests
from router.types import Matching

LINKS = {"elsewhere": (100.0, 20.0)}
WELL = Present(pods=6, waiting=2, slowdowns={"pod-1": 1.3}, index_age_s=0.4, reload_age_s=5.0, reload_ttft_ratio=1.1)


def history() -> CountedHistory:
    """Half a minute of a fleet in which all is well; one pod restarted before that."""
    made = CountedHistory()
    for second in range(31):
        made.add(counted(second))
    return made


def counted(second: float) -> Counted:
    transfers = {link: (second * one, second * two) for link, (one, two) in LINKS.items()}
    return Counted(second, {"pod-0": 1.0, "pod-1": 0.0}, transfers)


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


def test_restarts_of_the_last_minute_are_counted() -> None:
    """Not those before the first snapshot."""
    text = "1 of 6 pods restarted in the last minute, with empty caches: pod-1."
    assert shown(restarts={"pod-0": 1.0, "pod-1": 1.0}) == [("restarts", text)]
    made = CountedHistory()
    made.add(counted(0))
    made.add(replace(counted(1), restarts={"pod-0": 2.0}))
    made.add(replace(counted(62), restarts={"pod-0": 2.0}))
    assert made.notices(WELL) == []


@pytest.mark.parametrize(
    ("changes", "about", "text"),
    [
        ({"slowdowns": {"pod-1": 2.94}}, "slow", "pod-1 computes 2.9 times slower than other pods of its class."),
        (
            {"slowdowns": {}, "lateness": {"pod-1": 2.62}},
            "slow",
            "First tokens of pod-1 take 2.6 times as long as expected.",
        ),
        (
            {"slowdowns": {"pod-1": 2.94}, "lateness": {"pod-1": 2.62}},
            "slow",
            "pod-1 computes 2.9 times slower than other pods of its class.",
        ),
        ({"ejected": ("pod-2",)}, "ejected", "1 of 6 pods ejected: pod-2."),
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
    [(_, text)] = shown(replace(WELL, ejected=["x" * 10_000] * 9))
    assert len(text) < 5 * MAX_CHARACTERS
    made = history()
    made.add(replace(counted(1000), restarts={"pod-0": 7.0}))
    assert made.notices(WELL) == []
