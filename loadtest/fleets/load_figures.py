"""Figures of a load test: those of the demo, and what an objective, a rate and a late client add."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from loadtest.traffic.figures import Figures, figures, percentile, ttfts_ms
from loadtest.traffic.load_driver import DriveResults, RequestResult

LATE_TOLERATED_MS = 5.0
LATE_TOLERATED_SHARE = 0.1
"""Share of the median time to first token. A client that exceeds both limits was too slow for its load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The limits of a good answer: its time to first token, and the mean time of each further token."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def met_by(self, result: RequestResult) -> bool:
        """False for a failed request and for an answer without tokens."""
        if result.error or result.ttft_s is None:
            return False
        return result.ttft_s * 1000 <= self.ttft_ms and (tpot_ms(result) or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures(Figures):
    """Goodput is the requests that met the objective, per second between the first and last due time. Times start when
    a request was due; `late_p99_ms` is the part that the client's lateness added."""

    ttft_p90_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    within_objective_share: float
    goodput_per_s: float
    late_p99_ms: float

    @property
    def driver_was_late(self) -> bool:
        """Whether the client was so late that these figures describe the client and not the router."""
        return self.late_p99_ms > max(LATE_TOLERATED_MS, LATE_TOLERATED_SHARE * self.ttft_p50_ms)


def load_figures(
    policy: str,
    results: DriveResults,
    ideal_cached_tokens: float,
    pods: Iterable[str],
    objective: Objective = Objective(),  # noqa: B008 (frozen)
) -> LoadFigures:
    """The figures of one run. `ideal_cached_tokens`: what an infinite cache would have saved; NaN if unknown."""
    of_run = figures(policy, results, ideal_cached_tokens, pods)
    good = [result for result in results.served if not result.error]
    between_ms = [ms for ms in map(tpot_ms, good) if ms is not None]
    due_s = [result.due_s for result in results.served]
    within = sum(map(objective.met_by, results.served))
    return LoadFigures(
        **{field.name: getattr(of_run, field.name) for field in fields(of_run)},
        ttft_p90_ms=percentile(ttfts_ms(good), 0.90),
        tpot_p50_ms=percentile(between_ms, 0.50),
        tpot_p99_ms=percentile(between_ms, 0.99),
        within_objective_share=within / max(len(results.served), 1),
        goodput_per_s=within / (max(due_s) - min(due_s) or math.nan) if due_s else math.nan,
        late_p99_ms=percentile([result.late_s * 1000 for result in results.served], 0.99),
    )


def tpot_ms(result: RequestResult) -> float | None:
    """Mean time per output token after the first; None with fewer than two tokens."""
    if result.ttft_s is None or result.output_tokens < 2:
        return None
    return (result.e2e_s - result.ttft_s) * 1000 / (result.output_tokens - 1)
