"""Is the router blamed for what it did, and for nothing else?"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console

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
    """Shares of its own looks; failed requests are not hidden."""
    out = io.StringIO()
    found = Seen(
        "reload", Share(200, (100, 150, 199, 200), 7.5), Share(50, (49, 50, 50, 50), 1.2), 1, 6.0, 0, 3.0, (), 2
    )
    Console(file=out, width=200).print(table([found]))
    (row,) = (line for line in out.getvalue().splitlines() if "reload" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:9] == ["200", "50.0%", "75.0%", "99.5%", "100.0%", "7.5", "100.0%", "1.2"]
    assert cells[9:] == ["1", "6.0", "0", "3.0", "2"]
