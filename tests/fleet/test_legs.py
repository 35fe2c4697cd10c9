"""When a leg of a split hangs, and when its pod is only busy."""

from __future__ import annotations

from math import inf

from router.fleet.fleet import Fleet
from router.fleet.legs import KEPT, LIMIT_FACTOR, MAX_SLOWNESS, OVERTAKEN_S, LegTimes
from tests.kit.scenes import fleet_of, make_pod


def legs_of(fleet: Fleet | None = None) -> LegTimes:
    return LegTimes(fleet or fleet_of(make_pod("p")))


def test_the_limit_is_a_multiple_of_what_was_expected_and_never_short() -> None:
    legs = legs_of()
    assert legs.limit_s("p", 100.0, 0.0, 2.0) == 2.0
    assert legs.limit_s("p", 5000.0, 0.0, 2.0) == LIMIT_FACTOR * 5.0


def test_a_pod_that_gets_many_prompts_at_once_has_time_for_all() -> None:
    """Also before it answers the first."""
    assert legs_of().limit_s("p", 500.0, 4000.0, 2.0) == LIMIT_FACTOR * 0.5 + 4.0


def test_a_pod_that_is_slower_than_expected_gets_more_time() -> None:
    """The legs that are on time take the time back, slowly."""
    legs = legs_of()
    legs.answered("p", 1000.0, 0.0, 3.0)
    assert legs.limit_s("p", 1000.0, 500.0, 2.0) == 3.0 * (LIMIT_FACTOR + 0.5)
    legs.answered("p", 1000.0, 3.0, 4.0)
    assert legs.limit_s("p", 1000.0, 0.0, 2.0) == LIMIT_FACTOR * 3.0 * KEPT
    assert legs.limit_s("q", 1000.0, 0.0, 2.0) == LIMIT_FACTOR


def test_a_short_leg_that_a_step_delays_says_nothing_about_long_ones() -> None:
    legs = legs_of()
    legs.answered("p", 1.0, 0.0, 0.2)
    assert legs.limit_s("p", 1000.0, 0.0, 2.0) == LIMIT_FACTOR


def test_one_request_that_takes_very_long_does_not_end_the_limit_of_others() -> None:
    """Such as one with a slow grammar."""
    legs = legs_of()
    legs.answered("p", 1.0, 0.0, 300.0)
    assert legs.limit_s("p", 1000.0, 0.0, 2.0) == LIMIT_FACTOR * MAX_SLOWNESS


def test_a_leg_hangs_once_its_pod_has_sent_nothing_for_as_long_as_its_limit() -> None:
    """To nobody: a pod that answers an earlier leg, or streams to others, is busy."""
    legs = legs_of()
    assert not legs.hangs("p", 1.0, 2.0, -inf, 2.9)
    assert legs.hangs("p", 1.0, 2.0, -inf, 3.0)
    assert not legs.hangs("p", 1.0, 2.0, 1.5, 3.0)
    legs.answered("p", 100.0, 0.5, 2.0)
    assert not legs.hangs("p", 1.0, 2.0, -inf, 3.9)
    assert legs.hangs("p", 1.0, 2.0, -inf, 4.0)


def test_a_leg_hangs_once_one_that_was_sent_clearly_later_is_answered() -> None:
    """Pods read requests in parallel: of two that were sent together, either may be answered first."""
    legs = legs_of()
    legs.answered("p", 100.0, 1.0 + OVERTAKEN_S / 2, 6.0)
    assert not legs.hangs("p", 1.0, 5.0, -inf, 6.0)
    legs.answered("p", 100.0, 1.0 + OVERTAKEN_S, 6.0)
    assert legs.hangs("p", 1.0, 5.0, -inf, 6.0)
    assert not legs.hangs("p", 1.0, 9.0, -inf, 6.0)
    assert not legs.hangs("p", 1.0, 5.0, -inf, 6.0, is_last=True), "another candidate would be no faster"


def test_a_pod_that_is_gone_leaves_nothing() -> None:
    fleet = fleet_of(make_pod("p"))
    legs = legs_of(fleet)
    legs.answered("p", 1000.0, 0.0, 3.0)
    fleet.sync([])
    assert legs.limit_s("p", 1000.0, 0.0, 2.0) == LIMIT_FACTOR and legs.hangs("p", 1.0, 2.0, -inf, 3.5)
