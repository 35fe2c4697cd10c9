"""Is the router blamed for what it did, and for nothing else?"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console

from loadtest.activities import ACTIVITIES
from loadtest.stalls import Looks, Seen, Share, seen, share, table
from loadtest.watched import Hold, Look


def test_looks_count_up_to_each_bound() -> None:
    """1, 2, 5 and 10 ms."""
    late_ms = (0.5, 1.5, 4.0, 4.0, 9.0, 30.0)
    assert share([Look(0, ms / 1000, 0) for ms in late_ms]) == Share(6, (1, 2, 4, 5), 30.0)
    assert share([]) == Share(0, (0, 0, 0, 0), 0.0)


def test_a_router_is_blamed_for_lateness_while_it_computed() -> None:
    """A machine that gave it no core has made it late; and who computes for long need not be late for so long."""
    found = seen("reload", [Look(0, 0.080, 0.002), Look(0, 0.007, 0.020), Look(0, 0.001, 0.010)], [Look(0, 0.002, 0)])
    assert (found.own, found.worst_own_ms, found.router.worst_ms, found.idle.worst_ms) == (1, 7.0, 80.0, 2.0)


def test_callbacks_of_more_than_five_milliseconds_are_told_with_what_they_were_at() -> None:
    """Most of them first."""
    holds = [Hold(0, 0.004, ("c",)), Hold(0, 0.007, ("a", "b")), Hold(0, 0.009, ("b",))]
    found = seen("metrics", holds, [])
    assert (found.holds, found.longest_hold_ms, found.at) == (2, 9.0, (("b", 2), ("a", 1)))


def test_a_line_that_is_being_written_is_read_the_next_time(tmp_path: Path) -> None:
    """Of all processes, those lines that fall into the time."""
    lines = [msgspec.json.encode(line) for line in (Look(1, 0, 0), Look(2, 0, 0), Hold(3, 0, ()), Look(9, 0, 0))]
    (tmp_path / "looks.7").write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:9])
    (tmp_path / "looks.8").write_bytes(lines[1] + b"\n")
    found = Looks(tmp_path / "looks").between(1.5, 10)
    assert sorted(line.at_s for line in found) == [2, 2, 3]


def test_the_table_has_a_row_an_activity() -> None:
    """Shares of its own looks; failed requests are not hidden. The worst that is seen fits into a hundred columns."""
    out, longest = io.StringIO(), max(ACTIVITIES, key=len)
    router, idle = Share(40_000, (20_000, 30_000, 39_800, 40_000), 1234.5), Share(50, (49, 50, 50, 50), 123.4)
    Console(file=out, width=100).print(table([Seen(longest, router, idle, 12, 678.9, 10, 345.6, (), 21)]))
    (row,) = (line.split() for line in out.getvalue().splitlines() if longest in line)
    assert row[1:9] == ["40,000", "50.0%", "75.0%", "99.5%", "100.0%", "1234.5", "100.0%", "123.4"]
    assert row[9:] == ["12", "678.9", "10", "345.6", "21"]
