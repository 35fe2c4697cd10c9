"""The JSON format of load test results.

A file is one `Record`: the scenario, and one `Run` per policy and rate (or per client) with figures and one row per
request. Reports compute the figures again from the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from loadtest.tables import legend, text_table
from loadtest.traffic.figures import ONE_RUN, Figures, figures, percentile, ttfts_ms
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


_NARROW = ("policy", "rate/s", "cached", "of ideal", "p50 ms", "p99 ms", "good", "good/s", "errors")
"""Columns that fit into 80 columns of text."""


def cells(run: Run, figures: LoadFigures) -> dict[str, str]:
    """One row, by column."""
    return {
        "policy": run.name,
        "rate/s": f"{run.rate_per_s:g}",
        "cached": f"{figures.cached_share:.1%}" if run.cached_known else "",
        "of ideal": "" if math.isnan(figures.ideal_share) else f"{figures.of_ideal:.0%}",
        "p50 ms": _ms(figures.ttft_p50_ms),
        "p90 ms": _ms(figures.ttft_p90_ms),
        "p99 ms": _ms(figures.ttft_p99_ms),
        "TPOT p50 ms": _ms(figures.tpot_p50_ms),
        "TPOT p99 ms": _ms(figures.tpot_p99_ms),
        "good": f"{figures.within_objective_share:.1%}",
        "good/s": "" if math.isnan(figures.goodput_per_s) else f"{figures.goodput_per_s:.1f}",
        "peak": f"{figures.max_over_mean:.2f}" if any(figures.work_by_pod) else "",
        "late ms": _ms(figures.late_p99_ms),
        "sent": str(figures.requests),
        "errors": str(figures.errors),
        "unsent": str(run.planned - figures.requests),
    }


def table(record: Record) -> Table:
    """The table for a terminal."""
    rows = [cells(*row) for row in judged(record)]
    return text_table(
        _NARROW,
        ([found[title] for title in _NARROW] for found in rows),
        title=f"{record.scenario}: {objective(record)}",
        caption=legend(_NARROW, ONE_RUN),
    )


def judged(record: Record) -> list[tuple[Run, LoadFigures]]:
    """Each run with its figures, computed from the rows."""
    return [(run, run.judged(record.objective.objective())) for run in record.runs]


def objective(record: Record) -> str:
    """The objective in words."""
    bounds = record.objective
    parts = [
        f"{name} within {bound:g} ms" for name, bound in (("TTFT", bounds.ttft_ms), ("TPOT", bounds.tpot_ms)) if bound
    ]
    return "a good response has " + " and ".join(parts) if parts else "every response is good"


def warnings(rows: Sequence[tuple[Run, LoadFigures]]) -> Iterator[str]:
    """Reasons not to trust the figures, and failures."""
    for run, found in rows:
        name = f"{run.name} at {run.rate_per_s:g}/s"
        if found.driver_was_late:
            yield (
                f"{name}: the client was late by {found.late_p99_ms:.0f} ms (p99): it was saturated, and these "
                "figures are not reliable. Lower the rate, or run the client on another machine."
            )
        for error, count in Counter(row.error for row in run.requests if row.error).most_common(3):
            yield f"{name}: {count} failed: {error}"


def _ms(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


class RecordError(Exception):
    """A file is not a record. The message names it."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request, an array in the file. Times are milliseconds since it was due."""

    kind: str
    due_s: float
    late_ms: float
    ttft_ms: float | None
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int | None
    output_tokens: int
    pod: str
    error: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one rate. `planned` is the number of requests without failures (a session ends at its first error);
    `rate_per_s` counts sessions, or requests of a trace. Some clients do not report cached tokens."""

    name: str
    rate_per_s: float
    planned: int
    wall_s: float
    pods: list[str]
    ideal_cached_tokens: int | None
    cached_known: bool = True
    requests: list[Row]
    figures: dict[str, Any] = {}

    def results(self) -> DriveResults:
        """The requests, without their texts."""
        return DriveResults(tuple(map(_served, self.requests)), self.wall_s)

    def judged(self, objective: Objective) -> LoadFigures:
        """The figures of this run."""
        ideal = math.nan if self.ideal_cached_tokens is None else self.ideal_cached_tokens
        return load_figures(self.name, self.results(), ideal, self.pods, objective)


class Bounds(msgspec.Struct, frozen=True):
    """The objective; null: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def objective(self) -> Objective:
        """The objective for `figures`."""
        return Objective(ttft_ms=self.ttft_ms or math.inf, tpot_ms=self.tpot_ms or math.inf)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `settings` are what reproduces it."""

    format: str = "warmroute-loadtest-1"
    scenario: str
    about: str
    made_at: str
    command: str
    settings: dict[str, Any]
    objective: Bounds
    runs: list[Run]


def run_of(
    name: str, rate_per_s: float, planned: int, results: DriveResults, pods: list[str], ideal_cached_tokens: int | None
) -> Run:
    """Convert measured results."""
    return Run(
        name=name,
        rate_per_s=rate_per_s,
        planned=planned,
        wall_s=round(results.wall_s, 3),
        pods=pods,
        ideal_cached_tokens=ideal_cached_tokens,
        requests=[_row(one) for one in results.served],
    )


def record_of(
    scenario: str, about: str, command: str, settings: dict[str, Any], objective: Objective, runs: list[Run]
) -> Record:
    """A record of all runs with their figures, dated now."""
    judged = [msgspec.structs.replace(run, figures=_rounded(asdict(run.judged(objective)))) for run in runs]
    return Record(
        scenario=scenario,
        about=about,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        settings=settings,
        objective=Bounds(_finite(objective.ttft_ms), _finite(objective.tpot_ms)),
        runs=judged,
    )


def write_record(path: Path, record: Record) -> None:
    """Write JSON; `jq '.runs[] | {name, rate_per_s} + .figures'` shows the figures."""
    path.write_bytes(msgspec.json.encode(record) + b"\n")


def read_record(path: Path) -> Record:
    """Read a file. Raises `RecordError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(f"{path}: not a load test record: {error}") from error


def _row(one: RequestResult) -> Row:
    return Row(
        kind=one.kind,
        due_s=round(one.due_s, 4),
        late_ms=round(one.late_s * 1000, 3),
        ttft_ms=None if one.ttft_s is None else round(one.ttft_s * 1000, 3),
        e2e_ms=round(one.e2e_s * 1000, 3),
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        predicted_cached_tokens=one.predicted_cached_tokens,
        output_tokens=one.output_tokens,
        pod=one.pod,
        error=one.error,
    )


def _served(row: Row) -> RequestResult:
    late_s = row.late_ms / 1000
    return RequestResult(
        kind=row.kind,
        asked={},
        sent_s=row.due_s + late_s,
        late_s=late_s,
        pod=row.pod,
        predicted_cached_tokens=row.predicted_cached_tokens,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        ttft_s=None if row.ttft_ms is None else row.ttft_ms / 1000,
        e2e_s=row.e2e_ms / 1000,
        error=row.error,
    )


def _rounded(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in plain.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
