"""The table shows the figures and warns of a client that was too slow."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from loadtest.fleets.record import Record, Run
from loadtest.fleets.summary import cells, judged, objective, table, warnings


def test_a_row_has_every_figure_of_its_run(make_record: Callable[..., Record]) -> None:
    """Three sent, one failed, one turn not sent; 60 of 100 tokens cached where 80 were possible."""
    found = cells(*judged(make_record())[0])
    assert (found["policy"], found["rate/s"], found["sent"], found["errors"], found["unsent"]) == (
        *("round_robin", "5", "3", "1", "1"),
    )
    assert (found["cached"], found["p50 ms"], found["p99 ms"]) == ("60.0%", "100", "300")
    assert (found["good"], found["good/s"], found["peak"]) == ("33.3%", "0.5", "1.00")


def test_the_terminal_table_has_a_row_per_run(make_record: Callable[..., Record]) -> None:
    """Two policies at two rates, in 80 columns, and what every column means."""
    shown = table(make_record())
    assert shown.row_count == 4
    out = io.StringIO()
    Console(file=out, width=80).print(shown)
    assert "…" not in out.getvalue() and "round_robin" in out.getvalue()
    assert all(f"{column.header}: " in str(shown.caption) for column in shown.columns[1:])
    assert "Each row is one run" in str(shown.caption)


def test_a_late_client_is_reported_as_unreliable(make_record: Callable[..., Record], late_run: Run) -> None:
    """80 ms late for responses of 100 ms."""
    (sentence,) = warnings(judged(make_record([late_run])))
    assert "late by 80 ms (p99)" in sentence
    assert "not reliable" in sentence


def test_failures_are_counted_by_message(make_record: Callable[..., Record]) -> None:
    """Most frequent first."""
    assert "round_robin at 5/s: 1 failed: status 503" in list(warnings(judged(make_record())))


def test_the_objective_is_printed_in_words(make_record: Callable[..., Record]) -> None:
    """A missing bound is not shown."""
    assert objective(make_record()) == "a good response has TTFT within 200 ms"
