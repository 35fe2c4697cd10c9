"""Writes an HTML page that compares load test records.

    python -m loadtest.fleets.report loadtest/results/scenario-mixed.json --out report.html

Reads results of `run.py`, `replay_trace.py` and `clients.py`. The page is self-contained: the table, TTFT as
distribution and over time, goodput over the rate, work per pod, cached share per session kind. Records of the same
scenario are compared with each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer

from loadtest.fleets.record import (
    LoadFigures,
    Objective,
    Record,
    RecordError,
    Run,
    cells,
    judged,
    objective,
    read_record,
    warnings,
)
from loadtest.html_page import (
    PlotAxes,
    PlotsUnavailable,
    Section,
    Series,
    bars,
    cdf,
    definitions,
    dots,
    lines,
    page,
    paragraph,
    table,
    warning,
)
from loadtest.simulator.outcome import cached_share
from loadtest.traffic.figures import ONE_RUN

Judged: TypeAlias = Sequence[tuple[Run, LoadFigures]]


def report(records: Sequence[Record]) -> str:
    """The page, with a section per scenario."""
    ordered = sorted(records, key=lambda record: record.scenario)
    sections: list[Section] = []
    for scenario, same in groupby(ordered, key=lambda record: record.scenario):
        sections += _sections(scenario, list(same))
    title = "Load test: " + ", ".join(dict.fromkeys(record.scenario for record in ordered))
    return page(title, sections)


def _sections(scenario: str, records: Sequence[Record]) -> Iterator[Section]:
    first = records[0]
    record = msgspec.structs.replace(first, runs=[run for one in records for run in one.runs])
    rows = judged(record)
    columns = list(cells(*rows[0])) if rows else []
    yield Section(
        scenario,
        [
            paragraph(record.about),
            paragraph(f"Objective: {objective(record)}. Made {', '.join(one.made_at for one in records)}."),
            *map(warning, warnings(rows)),
            table(columns, [list(cells(*row).values()) for row in rows]),
            paragraph(ONE_RUN),
            definitions(columns),
            *(paragraph(f"Again: {one.command}") for one in records),
        ],
    )
    bounds = record.objective.objective()
    if len(_rates(rows)) > 1:
        yield Section(f"{scenario}: over the rate", list(_over_the_rate(rows)))
    for rate_per_s in _rates(rows):
        at_rate = [row for row in rows if row[0].rate_per_s == rate_per_s]
        yield Section(f"{scenario}: {rate_per_s:g} a second", list(_at_one_rate(at_rate, bounds)))


def _over_the_rate(rows: Judged) -> Iterator[str]:
    """Plots over the rate: where the goodput of each policy stops growing."""
    yield lines(
        PlotAxes(title="Goodput", x="sessions started per second", y="good requests per second"),
        _by_policy(rows, lambda figures: figures.goodput_per_s),
    )
    yield lines(
        PlotAxes(title="Share of good requests", x="sessions started per second", y="share"),
        _by_policy(rows, lambda figures: figures.within_objective_share),
    )
    yield lines(
        PlotAxes(title="TTFT p99", x="sessions started per second", y="ms", log_y=True),
        _by_policy(rows, lambda figures: figures.ttft_p99_ms),
    )


def _at_one_rate(rows: Judged, bounds: Objective) -> Iterator[str]:
    mark = {f"objective {bounds.ttft_ms:g} ms": bounds.ttft_ms} if bounds.ttft_ms < float("inf") else {}
    times = {run.name: [row.ttft_ms for row in run.requests if row.ttft_ms is not None] for run, _ in rows}
    since_due = "ms since the request was due"
    yield cdf(
        PlotAxes(title="Time to first token", x=since_due, y="share of responses", log_x=True, upright=mark), times
    )
    yield dots(
        PlotAxes(
            title="TTFT over time", x="s into the run at which the request was due", y="ms", log_y=True, across=mark
        ),
        [_over_time(run) for run, _ in rows],
    )
    pods = sorted({pod for _, figures in rows for pod in figures.work_by_pod}, key=lambda pod: (len(pod), pod))
    if any(pods):
        caption = "uncached prompt tokens and output tokens"
        yield bars(
            PlotAxes(title="Work per pod", x="", y="tokens computed", caption=caption),
            pods,
            {run.name: [float(figures.work_by_pod.get(pod, 0)) for pod in pods] for run, figures in rows},
        )
    kinds = list(dict.fromkeys(row.kind for run, _ in rows for row in run.requests))
    shares = {run.name: list(_cached_by_kind(run, kinds)) for run, _ in rows if run.cached_known}
    if shares:
        yield bars(PlotAxes(title="Cached share per session kind", x="", y="share of prompt tokens"), kinds, shares)


def _rates(rows: Judged) -> list[float]:
    return sorted({run.rate_per_s for run, _ in rows})


def _by_policy(rows: Judged, value: Callable[[LoadFigures], float]) -> list[Series]:
    """One line per policy, over the rate."""
    ordered = sorted(rows, key=lambda row: row[0].rate_per_s)
    series = []
    for name in dict.fromkeys(run.name for run, _ in rows):
        mine = [(run.rate_per_s, value(figures)) for run, figures in ordered if run.name == name]
        series.append(Series(name, [rate for rate, _ in mine], [y for _, y in mine]))
    return series


def _over_time(run: Run) -> Series:
    answered = [(row.due_s, row.ttft_ms) for row in run.requests if row.ttft_ms is not None]
    return Series(run.name, [due_s for due_s, _ in answered], [ttft_ms for _, ttft_ms in answered])


def _cached_by_kind(run: Run, kinds: Sequence[str]) -> Iterator[float]:
    good = [one for one in run.results().served if not one.error]
    for kind in kinds:
        yield cached_share(one for one in good if one.kind == kind)


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the page. Raises `PlotsUnavailable`."""
    path.write_text(report(records), encoding="utf-8")


def main(
    results: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON results to compare.")],
    out: Annotated[Path, typer.Option(help="Path of the page.")] = Path("report.html"),
) -> None:
    """Write one page for all records."""
    try:
        write_report(out, [read_record(path) for path in results])
    except (RecordError, PlotsUnavailable) as error:
        raise SystemExit(f"report: {error}") from error
    print(out, file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
