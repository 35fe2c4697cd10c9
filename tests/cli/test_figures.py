"""Are the figures that the demo ends with the ones that were measured?"""

from __future__ import annotations

import math

from router.cli.drive import Results, Served
from router.cli.figures import bars, figures, percentile


def served(pod: str, prompt: int, cached: int, ttft_s: float, predicted: int | None = None, error: str = "") -> Served:
    return Served(
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


def test_shares_are_by_token_and_work_is_what_had_to_be_computed() -> None:
    """One pod computed 110 tokens, one 60, one nothing; an infinite cache would have saved 200 of 300."""
    two = (served("pod-0", 200, 100, 0.1), served("pod-1", 100, 50, 0.3, predicted=64))
    row = figures("cost_aware", Results(two, 1.0), 200, ["pod-0", "pod-1", "pod-2"])
    assert row.cached_share == 0.5
    assert row.of_ideal == 0.75
    assert row.work_by_pod == {"pod-0": 110, "pod-1": 60, "pod-2": 0}
    assert row.max_over_mean == 110 * 3 / 170
    assert row.exact_predictions_share == 0.5
    assert (row.ttft_p50_ms, row.ttft_p99_ms) == (100, 300)


def test_failed_requests_are_counted_and_leave_every_other_figure_alone() -> None:
    """Half an answer must not improve a share."""
    good, bad = served("pod-0", 100, 0, 0.1), served("pod-0", 100, 100, 0.001, error="broken")
    row = figures("cost_aware", Results((good, bad), 1.0), 0, ["pod-0"])
    assert (row.requests, row.errors, row.cached_share, row.ttft_p50_ms) == (2, 1, 0.0, 100)


def test_nothing_served_is_no_crash() -> None:
    """Every request failed: shares are zero and times unknown."""
    row = figures("cost_aware", Results((), 1.0), 0, ["pod-0"])
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
    """One character a pod."""
    assert bars([0, 50, 100]) == "▁▅█"
    assert bars([]) == ""
