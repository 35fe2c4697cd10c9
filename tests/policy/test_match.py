"""Which requests a policy's conditions let through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.policy.match import Match, takes_share
from tests.kit.scenes import request

ASKED = request(model="llama", adapter="legal", tenant="acme", stream=True)
HEADERS = [(b"x-route", b"slow"), (b"accept", b"*/*")]


def covers(**conditions: Any) -> bool:
    return Match.model_validate(conditions).matches(ASKED, "rag", 2000, HEADERS)


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        ("model", "llama", "qwen"),
        ("model", ["qwen", "llama"], ["qwen", "mistral"]),
        ("adapter", "legal", "medical"),
        ("tenant", ["acme"], ["other"]),
        ("class", "rag", ["chat", "agent"]),
        ("stream", True, False),
        ("headers", {"X-Route": "slow"}, {"x-route": "fast"}),
        ("headers", {"x-route": ["fast", "slow"], "accept": "*/*"}, {"x-route": "slow", "x-else": "1"}),
        ("prompt_tokens", {"min": 2000}, {"min": 2001}),
        ("prompt_tokens", {"max": 2000}, {"min": 1, "max": 1999}),
    ],
)
def test_every_condition_can_hold_and_fail(condition: str, holds: Any, fails: Any) -> None:
    """One name or a list of them; header names in any case."""
    assert covers(**{condition: holds})
    assert not covers(**{condition: fails})


def test_all_conditions_must_hold_and_no_conditions_match_everything() -> None:
    """One that fails is enough."""
    assert covers() and covers(tenant="acme", stream=True)
    assert not covers(tenant="acme", stream=False)


def test_more_conditions_are_narrower() -> None:
    """What decides between two policies that match."""
    assert [
        Match.model_validate(one).conditions for one in ({}, {"stream": False}, {"class": "rag", "model": "m"})
    ] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("wrong", [{"tenant": []}, {"klass": "rag"}, {"prompt_tokens": {"min": 5, "max": 4}}])
def test_conditions_that_cannot_mean_anything_are_refused(wrong: Any) -> None:
    """Empty lists and ranges, unknown keys."""
    with pytest.raises(ValidationError):
        Match.model_validate(wrong)


@given(st.text(max_size=20), st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_growing_share_keeps_its_sessions(session: str, one: float, other: float) -> None:
    """All requests of a session are in or out, and who is in at a smaller share is in at a larger one."""
    first, second = (request(name, session=session) for name in ("r1", "r2"))
    if session:
        assert takes_share(first, "canary", one) == takes_share(second, "canary", one)
    if takes_share(first, "canary", min(one, other)):
        assert takes_share(first, "canary", max(one, other))


def test_a_share_has_its_size_and_is_independent_of_other_policies() -> None:
    """Within what 20,000 draws allow."""
    asked = [request(f"r{number}") for number in range(20_000)]
    one = {each.id for each in asked if takes_share(each, "one", 5)}
    other = {each.id for each in asked if takes_share(each, "other", 5)}
    assert 850 < len(one) < 1150
    assert len(one & other) < 120
    assert all(takes_share(each, "all", 100) for each in asked[:100])


def test_of_a_header_that_is_there_twice_the_first_counts() -> None:
    """As for the class and the session."""
    tier = Match.model_validate({"headers": {"x-tier": "gold"}})
    twice = [(b"x-tier", b"gold"), (b"X-Tier", b"bronze")]
    assert tier.matches(ASKED, "rag", 2000, twice)
    assert not tier.matches(ASKED, "rag", 2000, twice[::-1])
