"""The game day: when an incident counts as seen, and that it names alerts and lines that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helm.monitoring.alerts import ALERTS
from loadtest.faults.gameday import (
    INCIDENTS,
    RULES,
    WINDOW_S,
    Finding,
    Sightings,
    p99_doubled_s,
    scaled_rules,
    seconds_of,
    table,
    ttft_p99_s,
)
from loadtest.traffic.load_driver import RequestResult

FOUND = Finding(
    incident="x",
    title="a title",
    page_s=3.0,
    line="",
    on_screen=None,
    alert="WarmrouteX",
    true_s=2.0,
    fires_s=4.0,
    lasts_s=60.0,
    doubled_s=8.0,
    p99_before_ms=100.0,
    p99_after_ms=300.0,
    requests=1,
    failed=0,
    cut=0,
    error_texts=(),
    others=(),
    before=(),
)


def served(ttft_s: float | None = 0.1, *, slow: range = range(0), slow_s: float | None = 0.5) -> list[RequestResult]:
    """Ten requests a second for 40 s; those with the numbers `slow` take longer."""
    return [
        RequestResult("chat", {}, sent_s=number / 10, ttft_s=slow_s if number in slow else ttft_s)
        for number in range(400)
    ]


def test_every_incident_names_an_alert_of_the_chart() -> None:
    assert {one.alert for one in INCIDENTS.values()} <= {alert.name for alert in ALERTS}
    assert len(INCIDENTS) == 7


def rule(alert: str, factor: float) -> dict[str, str]:
    """The rule of an alert, divided."""
    rules: list[dict[str, str]] = scaled_rules(RULES.read_text(), factor)["groups"][0]["rules"]
    return next(one for one in rules if one["alert"] == alert)


def test_windows_and_waits_of_rules_are_divided_and_thresholds_stay() -> None:
    was, now = rule("WarmroutePodSlow", 1.0), rule("WarmroutePodSlow", 10.0)
    assert (seconds_of(was["for"]), seconds_of(now["for"]), was["expr"]) == (120.0, 12.0, now["expr"])
    was, now = rule("WarmrouteLinkSlow", 1.0), rule("WarmrouteLinkSlow", 10.0)
    assert "[120000ms]" in was["expr"] and now["expr"] == was["expr"].replace("[120000ms]", "[12000ms]")
    assert (seconds_of(was["keep_firing_for"]), seconds_of(now["keep_firing_for"])) == (300.0, 30.0)


def test_durations_are_read_as_prometheus_does() -> None:
    assert [seconds_of(text) for text in ("0m", "90s", "1h30m", "250ms")] == [0.0, 90.0, 5400.0, 0.25]


def test_the_p99_doubles_when_more_than_a_hundredth_waits_too_long() -> None:
    """One slow request of a hundred is the p99 itself; a second one doubles it, after its wait."""
    assert p99_doubled_s(served(slow=range(250, 251)), 20.0, 40.0, 0.2) is None
    assert p99_doubled_s(served(slow=range(250, 252)), 20.0, 40.0, 0.2) == pytest.approx(5.3)


def test_requests_that_still_wait_count_and_those_before_the_incident_do_not() -> None:
    assert p99_doubled_s(served(slow=range(250, 400), slow_s=None), 20.0, 40.0, 0.2) == pytest.approx(5.3)
    assert p99_doubled_s(served(slow=range(180)), 20.0, 40.0, 0.2) is None
    assert WINDOW_S == 10.0


def test_the_p99_before_is_of_the_requests_that_were_due_then() -> None:
    assert ttft_p99_s(served(slow=range(200, 400)), 0.0, 20.0) == pytest.approx(0.1)


def test_the_first_sight_counts() -> None:
    seen = Sightings()
    for at_s in (1.0, 2.0):
        seen.add("slow", f"text {at_s}", at_s)
    assert (seen.first_s, seen.texts) == ({"slow": 1.0}, {"slow": "text 2.0"})


def test_an_alert_that_fires_later_than_the_p99_doubles_is_not_counted() -> None:
    """With the whole `for`, 54 s more than a tenth of it, nobody has watched for long enough."""
    never = replace(FOUND, page_s=None, fires_s=None, doubled_s=None)
    *_, last, _ = table([FOUND, replace(FOUND, fires_s=9.0, page_s=11.0), replace(FOUND, doubled_s=None), never], 10.0)
    assert last.startswith("2 of 4 on the page within 10 s.")
    assert last.endswith("2 with `for` divided by 10, 0 with the whole `for`.")


def test_answers_that_failed_or_were_cut_are_counted_over_all_incidents() -> None:
    *_, last = table([FOUND, replace(FOUND, requests=99, failed=1, cut=2)], 10.0)
    assert last == "Of 100 requests 1 failed and 2 were cut."
