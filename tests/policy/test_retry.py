"""What may be tried again, by the table, and how often, by the budget."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConnectFailed, UpstreamBroken, UpstreamError
from router.policy import retry
from router.policy.retry import FLOOR, RETRY_RULES, WINDOW_S, Retry, RetryBudget, retry_rule


def test_every_failure_of_a_pod_has_a_law() -> None:
    """A new error cannot be forgotten."""
    assert set(RETRY_RULES) == {UpstreamError, *UpstreamError.__subclasses__()}


def test_the_table_in_words_is_the_table() -> None:
    """Docstring and data cannot part ways."""
    drawn = dict(
        re.findall(r"^    (\w+) .*?  (always|once, on the same pod|within the budget)", str(retry.__doc__), re.M)
    )
    laws = {error.__name__: law.value for error, law in RETRY_RULES.items() if law is not Retry.NEVER}
    assert {name: law for name, law in drawn.items() if not name.isdigit()} == laws


@pytest.mark.parametrize("error", sorted(RETRY_RULES, key=str))
def test_nothing_is_tried_again_after_the_first_byte(error: type[UpstreamError]) -> None:
    """The client would get two beginnings."""
    assert retry_rule(error("x"), bytes_sent=True) is Retry.NEVER


def test_a_failed_connection_always_may_and_a_broken_one_costs_budget() -> None:
    """Nothing was sent over the first."""
    assert retry_rule(ConnectFailed("x"), bytes_sent=False) is Retry.ALWAYS
    assert retry_rule(UpstreamBroken("x"), bytes_sent=False) is Retry.IN_BUDGET


def test_a_quiet_router_may_retry_a_little() -> None:
    """However few requests there are; and again when time has passed."""
    budget = RetryBudget(0.2)
    assert [budget.spend(100.0) for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]
    assert budget.spend(100.0 + WINDOW_S)


def test_asking_what_is_left_takes_nothing() -> None:
    """Only spending does."""
    budget = RetryBudget(0.0)
    assert all(budget.has_retry(0.0) for _ in range(2 * FLOOR))


@given(share=st.floats(0, 1), requests=st.integers(0, 500), gap_s=st.floats(0, 1))
def test_retries_to_a_failing_fleet_are_limited(share: float, requests: int, gap_s: float) -> None:
    """Retries are at most the floor, renewed with time, and the share."""
    budget, retries = RetryBudget(share), 0
    for n in range(requests):
        budget.count_request(n * gap_s)
        retries += budget.spend(n * gap_s)
    windows = 1 + requests * gap_s / WINDOW_S
    assert retries <= FLOOR * windows + share * requests + 1


def test_a_clock_that_stands_still_or_goes_back_takes_nothing_away() -> None:
    """Time only ever fades what was counted."""
    budget = RetryBudget(1.0)
    for _ in range(10):
        budget.count_request(50.0)
    assert [budget.spend(49.0) for _ in range(FLOOR + 11)] == [True] * (FLOOR + 10) + [False]
