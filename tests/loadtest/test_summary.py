"""Does the table say what was measured, and is a client that was too slow called so?"""

from __future__ import annotations

from collections.abc import Callable

from loadtest.record import Record, Run
from loadtest.summary import cells, judged, objective, table, warnings


def test_a_row_has_every_figure_of_its_run(make_record: Callable[..., Record]) -> None:
    """Three sent, one failed, one turn never sent; 60 of 100 tokens where 80 were possible."""
    found = cells(*judged(make_record())[0])
    assert (found["policy"], found["rate/s"], found["sent"], found["errors"], found["unsent"]) == (
        *("round_robin", "5", "3", "1", "1"),
    )
    assert (found["cached"], found["TTFT p50 ms"], found["TTFT p99 ms"]) == ("60.0%", "100", "300")
    assert (found["good"], found["good/s"], found["peak"]) == ("33.3%", "0.5", "1.00")


def test_the_terminal_shows_a_row_for_each_run(make_record: Callable[..., Record]) -> None:
    """Two policies at two rates."""
    assert table(make_record()).row_count == 4


def test_a_late_client_is_called_untrustworthy(make_record: Callable[..., Record], late_run: Run) -> None:
    """80 ms late for answers of 100 ms."""
    (sentence,) = warnings(judged(make_record([late_run])))
    assert "late by 80 ms (p99)" in sentence
    assert "not to be trusted" in sentence


def test_failures_are_counted_by_what_they_say(make_record: Callable[..., Record]) -> None:
    """The commonest first."""
    assert "round_robin at 5/s: 1 failed: status 503" in list(warnings(judged(make_record())))


def test_the_objective_is_said_in_words(make_record: Callable[..., Record]) -> None:
    """A bound that does not bind is left out."""
    assert objective(make_record()) == "a good answer has TTFT within 200 ms"
