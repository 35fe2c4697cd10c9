"""When a leg of a split hangs, and when its pod is only busy."""

from __future__ import annotations

from math import inf

from router.fleet.fleet import Fleet
from router.fleet.legs import KEPT, LIMIT_FACTOR, LegTimes
from tests.kit.scenes import fleet_of, make_pod


def legs_of(fleet: Fleet | None = None) -> LegTimes:
    return LegTimes(fleet or fleet_of(make_pod("p")))


def test_the_limit_is_a_multiple_of_what_was_expected_and_never_short() -> None:
    legs = legs_of()
    assert legs.limit_s("p", 100.0, 2.0) == 2.0
    assert legs.limit_s("p", 5000.0, 2.0) == LIMIT_FACTOR * 5.0


def test_a_pod_that_is_slower_than_expected_gets_more_time() -> None:
    """The legs that are on time take the time back, slowly."""
    legs = legs_of()
    legs.answered("p", 1000.0, 0.0, 3.0)
    assert legs.limit_s("p", 1000.0, 2.0) == LIMIT_FACTOR * 3.0
    legs.answered("p", 1000.0, 3.0, 4.0)
    assert legs.limit_s("p", 1000.0, 2.0) == LIMIT_FACTOR * 3.0 * KEPT
    assert legs.limit_s("q", 1000.0, 2.0) == LIMIT_FACTOR


def test_a_short_leg_that_a_step_delays_says_nothing_about_long_ones() -> None:
    legs = legs_of()
    legs.answered("p", 1.0, 0.0, 0.2)
    assert legs.limit_s("p", 1000.0, 2.0) == LIMIT_FACTOR


def test_a_pod_that_answers_in_order_is_busy() -> None:
    """Neither silent nor overtaken: an earlier leg is answered while this one waits. A later one overtakes it."""
    legs = legs_of()
    assert legs.is_silent("p", 1.0, -inf) and not legs.is_overtaken("p", 1.0)
    legs.answered("p", 100.0, 0.5, 2.0)
    assert not legs.is_silent("p", 1.0, -inf) and not legs.is_overtaken("p", 1.0)
    legs.answered("p", 100.0, 1.5, 3.0)
    assert legs.is_overtaken("p", 1.0)


def test_a_pod_that_streams_to_others_is_not_silent() -> None:
    assert not legs_of().is_silent("p", 1.0, 1.5)


def test_a_pod_that_is_gone_leaves_nothing() -> None:
    fleet = fleet_of(make_pod("p"))
    legs = legs_of(fleet)
    legs.answered("p", 1000.0, 0.0, 3.0)
    fleet.sync([])
    assert legs.limit_s("p", 1000.0, 2.0) == LIMIT_FACTOR and legs.is_silent("p", 1.0, -inf)
