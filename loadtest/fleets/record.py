"""The JSON format of load test results.

A file is one `Record`: the scenario, and one `Run` per policy and rate (or per client) with figures and one row per
request. Reports compute the figures again from the rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loadtest.fleets.load_figures import LoadFigures, Objective, load_figures
from loadtest.traffic.load_driver import DriveResults, RequestResult


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
