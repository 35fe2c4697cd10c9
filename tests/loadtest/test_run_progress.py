"""The progress display of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.fleets.run_progress import RECENT, RunProgress, show_progress
from loadtest.traffic.load_driver import RequestResult


def served_after(ttft_s: float, error: str = "") -> RequestResult:
    return RequestResult("chat", {}, 0.0, 0.002, ttft_s=None if error else ttft_s, error=error)


def test_times_are_of_recent_requests_and_errors_of_all() -> None:
    """Times are of recent requests; errors are of all."""
    seen = RunProgress()
    seen(served_after(0.0, "cut"))
    seen(served_after(9.0))
    for _ in range(RECENT):
        seen(served_after(0.05))
    assert str(seen) == "last 200: cached 0.0%, TTFT 50 ms, p99 50, client late 2.0, 1 errors"
    assert seen.done == RECENT + 2


def test_progress_is_empty_before_the_first_result() -> None:
    """With failures only, it shows their number."""
    seen = RunProgress()
    assert str(seen) == ""
    seen(served_after(0.0, "cut"))
    assert str(seen) == "1 errors"


@pytest.mark.anyio
@pytest.mark.parametrize("terminal", [True, False])
async def test_the_final_state_is_shown_on_terminals_and_in_logs(terminal: bool) -> None:
    """A bar on a terminal, a line in a log; both end with all requests done."""
    out = io.StringIO()
    async with show_progress(
        Console(file=out, force_terminal=terminal, width=120), "cost_aware, 5/s", 1
    ) as on_progress:
        on_progress(served_after(0.05))
    printed = out.getvalue()
    assert "cost_aware, 5/s" in printed
    assert "TTFT 50 ms" in printed
    assert ("1/1" if terminal else "1 of 1") in printed
