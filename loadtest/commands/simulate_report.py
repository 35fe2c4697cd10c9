"""Results of simulated runs as a table and a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from loadtest.simulator.compare import Measure, Result, grouped, in_order_of_mean, mean_of, ttft_mean_ms
from loadtest.simulator.outcome import RunFigures
from loadtest.tables import legend, text_table
from router.admission.tenant import Slo


@dataclass(frozen=True, slots=True)
class FigureColumn:
    """A figure of the tables."""

    title: str
    value: Measure
    shown: Callable[[float], str]

    def cell(self, runs: Sequence[Result]) -> str:
        """The mean over seeds; empty if a run has no such figure."""
        mean = mean_of(runs, self.value)
        return "" if math.isnan(mean) else self.shown(mean)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


FIGURE_COLUMNS = (
    FigureColumn("cached", lambda f: f.cached_share, _percent),
    FigureColumn("of ideal", lambda f: f.of_ideal, "{:.0%}".format),
    FigureColumn("mean ms", lambda f: f.ttft_mean_ms, _whole),
    FigureColumn("p50 ms", lambda f: f.ttft_p50_ms, _whole),
    FigureColumn("p99 ms", lambda f: f.ttft_p99_ms, _whole),
    FigureColumn("SLO", lambda f: f.slo_share, _percent),
    FigureColumn("peak", lambda f: f.peak_over_mean, "{:.2f}".format),
    FigureColumn("regret", lambda f: f.regret_mean_ms, _whole),
)


def summary(results: Sequence[Result], slo: Slo) -> RenderableType:
    """A table for each load and pod count: means over seeds. Without the peak, so that 80 columns suffice."""
    figures = [result.figures for result in results]
    shown = [
        column
        for column in FIGURE_COLUMNS
        if column.title != "peak" and not all(math.isnan(column.value(one)) for one in figures)
    ]
    titles = ["policy", *(column.title for column in shown)]
    at = titles.index("mean ms") + 1
    titles.insert(at, "behind")
    parts: list[RenderableType] = []
    for (load, pods), by_policy in groups_of(results).items():
        rows = [[policy, *(column.cell(runs) for column in shown)] for policy, runs in by_policy.items()]
        for row, behind in zip(rows, _behind(by_policy), strict=True):
            row.insert(at, behind)
        parts.append(text_table(titles, rows, title=f"load {load:g}; {pods} pods"))
    return Group(*parts, Text(legend(titles, f"{slo_note(slo)} {_seeds_note(results)}".strip())))


def _behind(by_policy: Mapping[str, Sequence[Result]]) -> list[str]:
    """How far the mean TTFT of each policy is above the first."""
    means = [mean_of(runs, ttft_mean_ms) for runs in by_policy.values()]
    return [f"{mean / means[0] - 1:+.1%}" if math.isfinite(mean) and means[0] else "" for mean in means]


def _seeds_note(results: Sequence[Result]) -> str:
    """How far to trust a difference between policies."""
    if len({result.setting.policy for result in results}) < 2:
        return ""
    seeds = len({result.setting.seed for result in results})
    runs = f"Means over {seeds} seeds" if seeds > 1 else "One run each"
    return f"{runs}: a small difference may be chance."


def slo_note(slo: Slo) -> str:
    return f"The SLO: {slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token after it."


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """A row for each run: its setting and its figures."""
    rows = [{**asdict(result.setting), **_flat(result.figures)} for result in results]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _flat(of: RunFigures) -> dict[str, object]:
    values = asdict(of)
    by_kind = values.pop("cached_share_by_kind")
    return values | {f"cached_share_{kind}": share for kind, share in by_kind.items()}


def groups_of(results: Sequence[Result]) -> dict[tuple[float, int], dict[str, list[Result]]]:
    """The runs of each policy, the lowest mean first, by load and number of pods."""
    groups = grouped(results, lambda setting: (setting.load, setting.pods))
    return {where: in_order_of_mean(group) for where, group in sorted(groups.items())}
