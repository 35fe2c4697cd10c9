"""A window counts what was used in the last minute, never less."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.meter import WINDOW_S, HourWindow, SlidingWindow, UseGauge, freed_at

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 50)), max_size=60)


def timed(steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(seconds since the last, amount) as (time, amount)."""
    return list(zip(accumulate(wait_s for wait_s, _ in steps), (amount for _, amount in steps), strict=True))


@pytest.mark.parametrize(("kind", "scale"), [(SlidingWindow, 1), (HourWindow, 60)])
@given(steps=STEPS)
def test_amounts_count_for_the_whole_window_and_little_longer(
    kind: type[SlidingWindow], scale: int, steps: list[tuple[float, int]]
) -> None:
    """A minute and at most a second, an hour and at most a minute."""
    window, added = kind(), list[tuple[float, int]]()
    for now_s, amount in timed([(wait_s * scale, amount) for wait_s, amount in steps]):
        window.at(int(now_s))
        window.add(int(now_s), amount)
        added.append((now_s, amount))
        last = sum(each for at_s, each in added if at_s > now_s - kind.window_s)
        longer = sum(each for at_s, each in added if at_s > now_s - kind.kept_s)
        assert last <= window.at(int(now_s)) <= longer
    assert window.at(10**9) == 0 and not window.leaving()


@given(STEPS, st.integers(1, 100))
def test_no_minute_has_more_than_the_limit(steps: list[tuple[float, int]], limit: int) -> None:
    """Where an amount is added only if it fits."""
    window, admitted = SlidingWindow(), list[tuple[float, int]]()
    for now_s, amount in timed(steps):
        if window.at(int(now_s)) + amount <= limit:
            window.add(int(now_s), amount)
            admitted.append((now_s, amount))
    for begin_s, _ in admitted:
        assert sum(amount for at_s, amount in admitted if begin_s <= at_s < begin_s + WINDOW_S) <= limit


@given(STEPS, st.integers(1, 100))
def test_an_amount_fits_when_it_was_predicted_to_fit(steps: list[tuple[float, int]], limit: int) -> None:
    """And not a second earlier."""
    window, now_s = SlidingWindow(), 0.0
    for now_s, amount in timed(steps):
        if window.at(int(now_s)) + amount <= limit:
            window.add(int(now_s), amount)
    excess = window.at(int(now_s)) + 1 - limit
    if excess > 0:
        second = freed_at([window, SlidingWindow()], excess)
        assert second is not None and window.at(second - 1) + 1 > limit >= window.at(second) + 1


@given(STEPS, st.lists(st.integers(0, 200), max_size=5))
def test_the_total_can_be_set(steps: list[tuple[float, int]], totals: list[int]) -> None:
    """As other processes report it: less leaves the oldest amounts."""
    window, now_s = SlidingWindow(), 0.0
    for now_s, amount in timed(steps):
        window.set_total(int(now_s), amount)
        assert window.at(int(now_s)) == amount
    for total in totals:
        window.set_total(int(now_s), total)
        assert window.at(int(now_s)) == total == sum(amount for _, amount in window.leaving())


def test_what_is_taken_back_does_not_count() -> None:
    window = SlidingWindow()
    window.add(5, 10)
    window.add(6, 3)
    window.take_back(5, 4)
    assert window.at(6) == 9
    window.take_back(5, 40)
    assert window.at(6) == 3
    assert window.at(66) == 3 and window.at(67) == 0
    window.take_back(6, 3)
    assert window.at(67) == 0


def test_a_gauge_keeps_what_is_in_use() -> None:
    gauge = UseGauge()
    gauge.add(0, 2)
    gauge.take_back(500, 1)
    assert gauge.at(10_000) == 1 and gauge.leaving() == []
    gauge.set_total(10_000, 7)
    assert gauge.at(10_000) == 7
