"""`added_latency.py` subtracts the direct latency."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.bench.added_latency import LatencyResult, table, times
from loadtest.bench.hotpath import LOADS

ANSWER = {"p50": 5.0, "p99": 9.0, "ttft50": 2.0, "ttft99": 3.0}


def test_rows_are_medians_of_the_latency_added_in_each_round() -> None:
    """Not differences of medians: rounds vary more than the added latency."""
    rounds = [(500.0, 900.0, 100.0), (900.0, 1_000.0, 450.0), (700.0, 800.0, 150.0)]
    found = [
        LatencyResult(n, "ours", "2K warm", 2_000, 1_000, p50, p99, past, past)
        for n, (p50, p99, past) in enumerate(rounds)
    ]
    out = io.StringIO()
    Console(file=out, width=140).print(table(found))
    (row,) = (line for line in out.getvalue().splitlines() if "ours" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["ours", "2K warm", "2,000", "1,000", "700", "900", "450", "650"]


@pytest.mark.parametrize(("load", "expected"), [("2K warm", (5.0, 9.0)), ("chunk", (2.0, 3.0))])
def test_streams_count_to_their_first_token(load: str, expected: tuple[float, float]) -> None:
    """Other loads count to their last byte."""
    assert times(ANSWER, LOADS[load]) == expected
