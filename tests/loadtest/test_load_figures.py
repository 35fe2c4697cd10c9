"""What an objective, a rate and a late client add to the figures of a load test."""

from __future__ import annotations

from loadtest.fleets.record import Objective, load_figures, tpot_ms
from loadtest.traffic.load_driver import DriveResults, RequestResult


def answered(due_s: float, ttft_s: float, e2e_s: float, late_s: float = 0.0, error: str = "") -> RequestResult:
    return RequestResult("chat", {}, due_s + late_s, late_s, ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=11, error=error)


def test_goodput_counts_requests_that_met_the_objective() -> None:
    """One of five requests over 2 s has a slow TTFT, one a slow TPOT and one failed: one good answer per second."""
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
    row = load_figures("cost_aware", results, 0, [], Objective(ttft_ms=500, tpot_ms=100))
    assert row.within_objective_share == 0.4
    assert row.goodput_per_s == 1.0
    assert round(row.tpot_p50_ms) == 10
    assert load_figures("cost_aware", results, 0, []).within_objective_share == 0.8


def test_one_token_has_no_time_per_further_token() -> None:
    """Only the objective of the first token applies."""
    one = RequestResult("chat", {}, 0.0, ttft_s=0.1, e2e_s=0.2, output_tokens=1)
    assert tpot_ms(one) is None
    assert Objective(ttft_ms=200, tpot_ms=1).met_by(one)


def test_a_client_that_is_too_late_is_detected() -> None:
    """60 ms matter at a TTFT of 100 ms and not at 10 s; 2 ms never matter."""
    for late_s, ttft_s, expected in ((0.06, 10.0, False), (0.06, 0.1, True), (0.002, 0.001, False)):
        row = load_figures("cost_aware", DriveResults((answered(0.0, ttft_s, 20.0, late_s),), 1.0), 0, [])
        assert row.late_p99_ms == late_s * 1000
        assert row.driver_was_late is expected
