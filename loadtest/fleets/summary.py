"""Summarizes a record as a table and warnings, for the terminal and the HTML page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from loadtest.fleets.load_figures import LoadFigures
from loadtest.fleets.record import Record, Run
from loadtest.tables import legend, text_table
from loadtest.traffic.figures import ONE_RUN

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
    for run, figures in rows:
        name = f"{run.name} at {run.rate_per_s:g}/s"
        if figures.driver_was_late:
            yield (
                f"{name}: the client was late by {figures.late_p99_ms:.0f} ms (p99): it was saturated, and these "
                "figures are not reliable. Lower the rate, or run the client on another machine."
            )
        for error, count in Counter(row.error for row in run.requests if row.error).most_common(3):
            yield f"{name}: {count} failed: {error}"


def _ms(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
