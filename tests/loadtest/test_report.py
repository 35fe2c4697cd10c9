"""The page shows every run and no empty plots."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from loadtest.fleets.record import Record, Run
from loadtest.fleets.report import report, write_report


@pytest.fixture(scope="module")
def document(make_record: Callable[..., Record], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of two policies at two rates, in UTF-8."""
    path = tmp_path_factory.mktemp("report") / "r.html"
    write_report(path, [make_record()])
    return path.read_text(encoding="utf-8")


def test_several_rates_have_plots_over_the_rate(document: str) -> None:
    """Goodput over the rate, then each rate with its four plots."""
    assert document.count("<figure>") == 3 + 2 * 4
    for title in ("Goodput", "Time to first token", "TTFT over time", "Work per pod", "Cached share per session kind"):
        assert f"<strong>{title}" in document


def test_one_rate_has_no_plots_over_the_rate(make_record: Callable[..., Record]) -> None:
    """A single point is not a curve."""
    record = make_record()
    document = report([make_record(record.runs[:2])])
    assert "<strong>Goodput" not in document
    assert document.count("<figure>") == 4


def test_several_results_of_one_scenario_are_compared(make_record: Callable[..., Record]) -> None:
    """Two files with two runs are one table of four rows and a header; another scenario has its own section."""
    runs = make_record().runs
    together = report([make_record(runs[:2]), make_record(runs[2:])])
    assert together.count("<tr>") == 5
    assert "<h2>rag</h2>" in report([make_record(runs[:1]), make_record(runs[:1], "rag")])


def test_the_warning_of_a_late_client_precedes_its_figures(make_record: Callable[..., Record], late_run: Run) -> None:
    """The warning precedes the table."""
    document = report([make_record([late_run])])
    assert document.index("not reliable") < document.index("<table>")


def test_every_column_is_explained(document: str) -> None:
    """Below the table; names of figures keep their capitals."""
    assert "Objective: a good response has TTFT within 200 ms." in document
    assert re.findall("<th>(.*?)</th>", document)[1:] == re.findall("<dt>(.*?)</dt>", document)


def test_the_page_is_one_file(document: str) -> None:
    assert document.startswith("<!doctype html>")
