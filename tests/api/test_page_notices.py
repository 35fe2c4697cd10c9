"""The sentences at the top of the page: each for its incident, none while all is well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.api.page_notices import MAX_CHARACTERS, Counted, CountedHistory, Present

TENANTS = {"a": 40_000.0, "b": 60_000.0}
LINKS = {"elsewhere": (100.0, 12.0, 10.0)}
WELL = Present(pods=6, waiting=2, slowdowns={"pod-1": 1.3}, index_age_s=0.4, reload_age_s=5.0, reload_ttft_ratio=1.1)


def history() -> CountedHistory:
    """Half a minute of a fleet in which all is well; one pod restarted before that."""
    made = CountedHistory()
    for second in range(31):
        made.add(counted(second))
    return made


def counted(second: float) -> Counted:
    tokens = {tenant: second * per_s for tenant, per_s in TENANTS.items()}
    transfers = {link: (second * one, second * two, second * three) for link, (one, two, three) in LINKS.items()}
    return Counted(second, {"pod-0": 1.0, "pod-1": 0.0}, tokens, transfers)


def shown(present: Present = WELL, **changed: object) -> list[tuple[str, str]]:
    """The notices a second later, with these counters changed."""
    made = history()
    made.add(replace(counted(31), **changed))  # type: ignore[arg-type]
    return [(one.about, one.text) for one in made.notices(present)]


def test_nothing_is_said_while_all_is_well() -> None:
    assert shown() == []


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
        ({"ejected": ("pod-2",)}, "ejected", "1 of 6 pods ejected: pod-2."),
        (
            {"events_lost": tuple("abcde")},
            "events",
            "KV events were lost: a, b, c and 2 more. Their caches are partly unknown until they restart.",
        ),
        ({"index_age_s": 8.2}, "index", "The shared index is 8 s old: Redis does not answer."),
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


def test_a_tenant_floods_if_others_wait() -> None:
    """Without waiting requests it harms nobody, and without other tenants it is no flood."""
    flood = {"a": 31 * 40_000.0 + 9e6, "b": 31 * 60_000.0}
    [(about, text)] = shown(replace(WELL, waiting=14), tenant_tokens=flood)
    assert about == "tenant" and text.startswith("Tenant a sent 9") and text.endswith("14 requests wait in engines.")
    assert shown(tenant_tokens=flood) == []
    assert shown(replace(WELL, waiting=14), tenant_tokens={"a": 9e6}) == []


def test_a_link_that_lost_bandwidth() -> None:
    """By the transfers of the last seconds. Short transfers may take a multiple: their overhead is not configured."""
    slow = {"elsewhere": (3100.0, 372.0 + 10_000.0, 310.0)}
    [(about, text)] = shown(transfers=slow)
    assert about == "link" and "over links elsewhere take " in text
    assert shown(transfers={"elsewhere": (310_000.0, 1000.0, 310.0)}) == []


def test_names_that_clients_and_pods_choose_are_cut() -> None:
    """And a page that was not watched for long begins again."""
    [(_, text)] = shown(replace(WELL, ejected=["x" * 10_000] * 9))
    assert len(text) < 5 * MAX_CHARACTERS
    made = history()
    made.add(replace(counted(1000), restarts={"pod-0": 7.0}))
    assert made.notices(WELL) == []
