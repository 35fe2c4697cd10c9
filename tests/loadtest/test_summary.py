"""The table shows the figures and warns of a client that was too slow."""

from __future__ import annotations

from collections.abc import Callable

from loadtest.fleets.record import Record, Run, cells, judged, warnings


def test_a_row_has_every_figure_of_its_run(make_record: Callable[..., Record]) -> None:
    """Three sent, one failed, one turn not sent; 60 of 100 tokens cached where 80 were possible."""
    found = cells(*judged(make_record())[0])
    assert (found["policy"], found["rate/s"], found["sent"], found["errors"], found["unsent"]) == (
        *("round_robin", "5", "3", "1", "1"),
    )
    assert (found["cached"], found["p50 ms"], found["p99 ms"]) == ("60.0%", "100", "300")
    assert (found["good"], found["good/s"], found["peak"]) == ("33.3%", "0.5", "1.00")


def test_a_late_client_is_reported_as_unreliable(make_record: Callable[..., Record], late_run: Run) -> None:
    """80 ms late for responses of 100 ms."""
    (sentence,) = warnings(judged(make_record([late_run])))
    assert "late by 80 ms (p99)" in sentence
    assert "not reliable" in sentence
