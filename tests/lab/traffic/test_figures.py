"""Figures of the demo."""

from __future__ import annotations

import io
import math

from rich.console import Console

from loadtest.traffic.figures import bars, figures, percentile, table
from loadtest.traffic.load_driver import DriveResults, RequestResult


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
