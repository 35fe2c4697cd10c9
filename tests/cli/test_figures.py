"""Figures of load tests and the demo, and the progress display of a run."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from router.cli.figures import RECENT, Objective, RunProgress, bars, figures, percentile, show_progress, table, tpot_ms
from router.cli.load_driver import DriveResults, RequestResult


def served(
    pod: str, prompt: int, cached: int, ttft_s: float, predicted: int | None = None, error: str = ""
) -> RequestResult:
    return RequestResult(
        kind="chat",
        asked={},
        sent_s=0.0,
        pod=pod,
        prompt_tokens=prompt,
        cached_tokens=cached,
        predicted_cached_tokens=cached if predicted is None else predicted,
        output_tokens=10,
        ttft_s=ttft_s,
        error=error,
    )


def test_shares_are_by_token_and_work_is_computed_tokens() -> None:
    """Three pods computed 110, 60 and 0 tokens; an infinite cache would have saved 200 of 300."""
    two = (served("pod-0", 200, 100, 0.1), served("pod-1", 100, 50, 0.3, predicted=64))
    row = figures("cost_aware", DriveResults(two, 1.0), 200, ["pod-0", "pod-1", "pod-2"])
    assert row.cached_share == 0.5
    assert row.of_ideal == 0.75
    assert row.work_by_pod == {"pod-0": 110, "pod-1": 60, "pod-2": 0}
    assert row.max_over_mean == 110 * 3 / 170
    assert row.exact_predictions_share == 0.5
    assert (row.ttft_p50_ms, row.ttft_p99_ms) == (100, 300)


def test_failed_requests_count_in_no_other_figure() -> None:
    """Half an answer must not improve a share."""
    good, bad = served("pod-0", 100, 0, 0.1), served("pod-0", 100, 100, 0.001, error="broken")
    row = figures("cost_aware", DriveResults((good, bad), 1.0), 0, ["pod-0"])
    assert (row.requests, row.errors, row.cached_share, row.ttft_p50_ms) == (2, 1, 0.0, 100)


def answered(due_s: float, ttft_s: float, e2e_s: float, late_s: float = 0.0, error: str = "") -> RequestResult:
    return RequestResult("chat", {}, due_s + late_s, late_s, ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=11, error=error)


def test_goodput_counts_requests_that_met_the_objective() -> None:
    """Of five requests over 2 s, one has a slow TTFT, one a slow TPOT and one failed: one good answer per second."""
    results = DriveResults(
        (
            answered(1.0, 0.1, 0.2),
            answered(1.5, 0.9, 1.0),
            answered(2.0, 0.1, 1.6),
            answered(2.5, 0.1, 0.2, error="cut"),
            answered(3.0, 0.1, 0.6),
        ),
        9.0,
    )
    row = figures("cost_aware", results, 0, [], Objective(ttft_ms=500, tpot_ms=100))
    assert row.within_objective_share == 0.4
    assert row.goodput_per_s == 1.0
    assert round(row.tpot_p50_ms) == 10
    assert figures("cost_aware", results, 0, []).within_objective_share == 0.8


def test_one_token_has_no_time_per_further_token() -> None:
    """Only the objective of the first token applies."""
    one = RequestResult("chat", {}, 0.0, ttft_s=0.1, e2e_s=0.2, output_tokens=1)
    assert tpot_ms(one) is None
    assert Objective(ttft_ms=200, tpot_ms=1).met_by(one)


def test_a_client_that_is_too_late_is_detected() -> None:
    """60 ms matter at a TTFT of 100 ms and not at 10 s; 2 ms never matter."""
    for late_s, ttft_s, expected in ((0.06, 10.0, False), (0.06, 0.1, True), (0.002, 0.001, False)):
        row = figures("cost_aware", DriveResults((answered(0.0, ttft_s, 20.0, late_s),), 1.0), 0, [])
        assert row.late_p99_ms == late_s * 1000
        assert row.driver_was_late is expected


def test_an_unknown_ideal_leaves_its_columns_empty() -> None:
    """Without the tokenizer of a router, the ideal cannot be computed."""
    row = figures("as it is", DriveResults((served("pod-0", 100, 50, 0.1),), 1.0), math.nan, [])
    shown = table([row], "t")
    assert list(shown.columns[2].cells) == [""]


def test_the_table_fits_into_80_columns_and_explains_each() -> None:
    """With the longest name of the demo's policies."""
    row = figures("ring_bounded_load", DriveResults((served("pod-0", 100, 50, 0.1),), 1.0), 50, ["pod-0"])
    shown, out = table([row], "t"), io.StringIO()
    Console(file=out, width=80).print(shown)
    assert "…" not in out.getvalue() and "ring_bounded_load" in out.getvalue()
    assert all(f"{column.header}: " in str(shown.caption) for column in shown.columns[1:])


def test_figures_without_served_requests() -> None:
    """Shares are zero and times are unknown."""
    row = figures("cost_aware", DriveResults((), 1.0), 0, ["pod-0"])
    assert row.cached_share == 0.0
    assert math.isnan(row.ttft_p50_ms)
    assert row.max_over_mean == 1.0


def test_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: the 99th of a hundred, not an average of two."""
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.5) == 50.0
    assert percentile([5.0], 0.99) == 5.0


def test_the_busiest_pod_has_the_highest_bar() -> None:
    """One character for each pod."""
    assert bars([0, 50, 100]) == "▁▅█"
    assert bars([]) == ""


# --- progress ---


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
