"""Lag of the event loop is attributed to the router only where its own CPU time explains it."""

from __future__ import annotations

import pytest

from loadtest.faults.loop_watch import LagSample, LongCallback
from loadtest.faults.stalls import LagSummary, activity_result, summarize


def test_samples_are_counted_up_to_each_bound() -> None:
    """1, 2, 5 and 10 ms."""
    late_ms = (0.5, 1.5, 4.0, 4.0, 9.0, 30.0)
    assert summarize([LagSample(0, ms / 1000, 0) for ms in late_ms]) == LagSummary(6, (1, 2, 4, 5), 30.0)
    assert summarize([]) == LagSummary(0, (0, 0, 0, 0), 0.0)


def test_lag_counts_as_own_only_while_the_router_computed() -> None:
    """A busy machine makes the router late too, and a router that computes is not always late."""
    found = activity_result(
        "reload",
        [LagSample(0, 0.080, 0.002), LagSample(0, 0.007, 0.020), LagSample(0, 0.001, 0.010)],
        [LagSample(0, 0.002, 0)],
    )
    assert (found.own, found.worst_own_ms, found.router.worst_ms, found.idle.worst_ms) == (1, 7.0, 80.0, 2.0)


def test_lag_for_want_of_a_core_is_not_own() -> None:
    """The loop was ready to run, and another program ran."""
    sample = LagSample(0, late_s=0.030, cpu_s=0.020, waited_s=0.026)
    assert sample.own_s == pytest.approx(0.004)
    assert LagSample(0, late_s=0.001, cpu_s=0.020, waited_s=0.026).own_s == 0


def test_callbacks_over_five_milliseconds_are_listed_with_their_stacks() -> None:
    """Most frequent first."""
    callbacks = [LongCallback(0, 0.004, ("c",)), LongCallback(0, 0.007, ("a", "b")), LongCallback(0, 0.009, ("b",))]
    found = activity_result("metrics", callbacks, [])
    assert (found.callbacks, found.longest_hold_ms, found.at) == (2, 9.0, (("b", 2), ("a", 1)))
