"""Does one see how a run goes, without its being slowed?"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.against import RECENT, Seen, shown
from router.cli.load_driver import RequestResult


def served(ttft_s: float, error: str = "") -> RequestResult:
    return RequestResult("chat", {}, 0.0, 0.002, ttft_s=None if error else ttft_s, error=error)


def test_times_are_those_of_recent_requests_and_failures_those_of_all() -> None:
    """What was slow an hour ago is over; what failed is not."""
    seen = Seen()
    seen(served(0.0, "cut"))
    seen(served(9.0))
    for _ in range(RECENT):
        seen(served(0.05))
    assert str(seen) == "TTFT 50 ms, p99 50, late 2.0, 1 errors"
    assert seen.done == RECENT + 2


def test_nothing_done_says_nothing() -> None:
    """And nothing but failures says so."""
    seen = Seen()
    assert str(seen) == ""
    seen(served(0.0, "cut"))
    assert str(seen) == "1 errors"


@pytest.mark.anyio
@pytest.mark.parametrize("terminal", [True, False])
async def test_the_last_state_is_shown_wherever_it_is_shown(terminal: bool) -> None:
    """A bar on a terminal, a line in a log; both end with all requests done."""
    out = io.StringIO()
    async with shown(Console(file=out, force_terminal=terminal, width=120), "cost_aware, 5/s", 1) as on_progress:
        on_progress(served(0.05))
    told = out.getvalue()
    assert "cost_aware, 5/s" in told
    assert "TTFT 50 ms" in told
    assert ("1/1" if terminal else "1 of 1") in told
