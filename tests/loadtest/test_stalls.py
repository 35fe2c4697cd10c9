"""Lag of the event loop is attributed to the router only where its own CPU time explains it."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loadtest.faults.activities import ACTIVITIES
from loadtest.faults.loop_watch import LagSample, LongCallback
from loadtest.faults.stalls import ActivityResult, LagSummary, WatchLog, activity_result, summarize, table


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


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    """Records of all processes within the time range are read."""
    lines = [
        msgspec.json.encode(line)
        for line in (LagSample(1, 0, 0), LagSample(2, 0, 0), LongCallback(3, 0, ()), LagSample(9, 0, 0))
    ]
    (tmp_path / "looks.7").write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:9])
    (tmp_path / "looks.8").write_bytes(lines[1] + b"\n")
    found = WatchLog(tmp_path / "looks").between(1.5, 10)
    assert sorted(line.at_s for line in found) == [2, 2, 3]


def test_the_table_has_a_row_per_activity() -> None:
    """Shares of its own samples, and failed requests. The largest values fit into 100 columns."""
    out, longest = io.StringIO(), max(ACTIVITIES, key=len)
    router, idle = LagSummary(40_000, (20_000, 30_000, 39_800, 40_000), 1234.5), LagSummary(50, (49, 50, 50, 50), 123.4)
    Console(file=out, width=100).print(table([ActivityResult(longest, router, idle, 12, 678.9, 10, 345.6, (), 21)]))
    (row,) = (line.split() for line in out.getvalue().splitlines() if longest in line)
    assert row[1:9] == ["40,000", "50.0%", "75.0%", "99.5%", "100.0%", "1234.5", "100.0%", "123.4"]
    assert row[9:] == ["12", "678.9", "10", "345.6", "21"]
