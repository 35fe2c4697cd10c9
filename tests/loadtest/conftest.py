"""Records of load tests that were not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.fleets.record import Objective, Record, Row, Run, record_of

MakeRecord = Callable[..., Record]


def row(due_s: float, ttft_ms: float | None, *, pod: str = "pod-0", late_ms: float = 0.0, error: str = "") -> Row:
    return Row(
        kind="chat",
        due_s=due_s,
        late_ms=late_ms,
        ttft_ms=ttft_ms,
        e2e_ms=400.0,
        prompt_tokens=100,
        cached_tokens=60,
        predicted_cached_tokens=60,
        output_tokens=11,
        pod=pod,
        error=error,
    )


def run_with(name: str, rate_per_s: float, rows: list[Row]) -> Run:
    return Run(
        name=name,
        rate_per_s=rate_per_s,
        planned=len(rows) + 1,
        wall_s=2.0,
        pods=["pod-0", "pod-1"],
        ideal_cached_tokens=80 * len(rows),
        requests=rows,
    )


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """A record of these runs, or of two policies at two rates."""

    def make(runs: list[Run] | None = None, scenario: str = "mixed") -> Record:
        rows = [row(0.0, 100.0), row(1.0, 300.0, pod="pod-1"), row(2.0, None, error="status 503")]
        runs = runs or [run_with(name, rate, rows) for rate in (5.0, 10.0) for name in ("round_robin", "cost_aware")]
        return record_of(scenario, "A mix.", "python run.py", {"seed": 1}, Objective(ttft_ms=200), runs)

    return make


@pytest.fixture
def late_run() -> Run:
    """A run whose client was 80 ms late for responses of 100 ms."""
    return run_with("cost_aware", 50.0, [row(0.0, 100.0, late_ms=80.0), row(1.0, 100.0, late_ms=80.0)])
