"""Results of simulated runs as a table and a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from router.admission.tenant import Slo
from router.report import legend, text_table
from router.sim.virtual.compare import (
    OURS,
    Measure,
    Result,
    Spread,
    best_policies,
    grouped,
    in_order_of_mean,
    spread_of,
    ttft_mean_ms,
)
from router.sim.virtual.outcome import RunFigures

MEASURES: dict[str, Measure] = {
    "TTFT mean": ttft_mean_ms,
    "TTFT p99": lambda f: math.inf if math.isnan(f.ttft_p99_ms) else f.ttft_p99_ms,
    "share of SLO misses": lambda f: 1 - f.slo_share,
}
MAX_NAMES = 3
"""Tied policies that a sentence names."""


@dataclass(frozen=True, slots=True)
class FigureColumn:
    """A figure of the tables."""

    title: str
    value: Measure
    shown: Callable[[float], str]

    def cell(self, runs: Sequence[Result]) -> str:
        """The mean over seeds; empty if a run has no such figure."""
        mean = spread_of(runs, self.value).mean
        return "" if math.isnan(mean) else self.shown(mean)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


_MEAN = FigureColumn("mean ms", lambda f: f.ttft_mean_ms, _whole)
FIGURE_COLUMNS = (
    FigureColumn("cached", lambda f: f.cached_share, _percent),
    FigureColumn("of ideal", lambda f: f.of_ideal, "{:.0%}".format),
    _MEAN,
    FigureColumn("p50 ms", lambda f: f.ttft_p50_ms, _whole),
    FigureColumn("p99 ms", lambda f: f.ttft_p99_ms, _whole),
    FigureColumn("SLO", lambda f: f.slo_share, _percent),
    FigureColumn("peak", lambda f: f.peak_over_mean, "{:.2f}".format),
    FigureColumn("regret", lambda f: f.regret_mean_ms, _whole),
)


def summary(results: Sequence[Result], slo: Slo) -> RenderableType:
    """A table for each load and pod count: means over seeds.

    With several seeds, the interval of the mean takes the place of the median, so that 80 columns suffice."""
    several = len({result.setting.seed for result in results}) > 1
    figures = [result.figures for result in results]
    left_out = ("peak", "p50 ms") if several else ("peak",)
    shown = [
        column
        for column in FIGURE_COLUMNS
        if column.title not in left_out and not all(math.isnan(column.value(one)) for one in figures)
    ]
    titles = ["policy", *(column.title for column in shown)]
    at = titles.index("mean ms") + 1
    titles[at:at] = ["± ms"] * several + ["behind"]
    parts: list[RenderableType] = []
    for (load, pods), by_policy in groups_of(results).items():
        rows = []
        behind = _behind(by_policy)
        for policy, runs in by_policy.items():
            row = [policy, *(column.cell(runs) for column in shown)]
            row[at:at] = [_margin(spread_of(runs, _MEAN.value))] * several + [behind[policy]]
            rows.append(row)
        parts.append(text_table(titles, rows, title=f"load {load:g}; {pods} pods"))
        if len(by_policy) > 1:
            parts.append(Text(f"{verdict_of(by_policy, 'TTFT mean')}.\n"))
    if (regrets := regrets_of(results)) is not None:
        parts.append(text_table(regrets[0], regrets[1], title=REGRET_TITLE))
    return Group(*parts, Text(legend(titles, f"{slo_note(slo)} {seeds_note(results)}".strip())))


def _margin(spread: Spread) -> str:
    return _whole(spread.margin) if math.isfinite(spread.margin) else ""


def _behind(by_policy: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """How far the mean TTFT of each policy is above the lowest of the table, in parentheses if that may be chance."""
    best = best_policies(by_policy, ttft_mean_ms)
    lowest = next(iter(best.values())).mean
    shown = {}
    for policy, runs in by_policy.items():
        mean = spread_of(runs, ttft_mean_ms).mean
        by = f"{mean / lowest - 1:+.1%}" if math.isfinite(mean) and lowest else ""
        shown[policy] = f"({by})" if by and policy in best and len(best) > 1 else by
    return shown


REGRET_TITLE = "mean TTFT behind the best"


def regrets_of(results: Sequence[Result]) -> tuple[list[str], list[list[str]]] | None:
    """Columns and rows of the table of all policies over all loads and sizes; None for one load or one policy."""
    groups = groups_of(results)
    if len(groups) < 2 or len({policy for by_policy in groups.values() for policy in by_policy}) < 2:
        return None
    sizes = len({pods for _, pods in groups}) > 1
    behind = [_behind(by_policy) for by_policy in groups.values()]
    rows = [[policy, *(one.get(policy, "") for one in behind)] for policy, _ in in_order_of_mean(results)]
    return ["policy", *(f"{load:g}, {pods} pods" if sizes else f"load {load:g}" for load, pods in groups)], rows


def slo_note(slo: Slo) -> str:
    return f"The SLO: {slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token after it."


def seeds_note(results: Sequence[Result]) -> str:
    """How far to trust a difference between policies."""
    if len({result.setting.policy for result in results}) < 2:
        return ""
    seeds = len({result.setting.seed for result in results})
    if seeds == 1:
        return "One run each: a small difference may be chance; --seeds 3 shows the spread."
    return (
        f"Means over {seeds} seeds, ± half of the 95 % confidence interval. Policies are tied if the interval of their "
        "difference, seed by seed, reaches 0, or if it is less than 1 %."
    )


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


def verdict_of(by_policy: Mapping[str, Sequence[Result]], name: str) -> str:
    """Which policies are best by a measure, with its range, and where `OURS` is if it is not among them."""
    best = best_policies(by_policy, MEASURES[name])
    low, high = min(one.low for one in best.values()), max(one.high for one in best.values())
    shown = _shown(name, Spread(low, low, high))
    if len(best) == 1:
        verdict = f"{name}: {next(iter(best))} is best, {shown}"
    else:
        named = sorted(best, key=lambda policy: policy != OURS)[:MAX_NAMES]
        others = f" and {more} more" if (more := len(best) - len(named)) else ""
        verdict = f"{name}: {', '.join(named)}{others} are tied, {shown}"
    if OURS in by_policy and OURS not in best:
        verdict += f"; {OURS} is behind with {_shown(name, spread_of(by_policy[OURS], MEASURES[name]))}"
    return verdict


def _shown(measure: str, spread: Spread) -> str:
    percent = measure == "share of SLO misses"
    low, high = ((f"{value:.1%}" if percent else f"{value:,.0f}") for value in (spread.low, spread.high))
    return (low if low == high else f"{low} to {high}") + ("" if percent else " ms")


def groups_of(results: Sequence[Result]) -> dict[tuple[float, int], dict[str, list[Result]]]:
    """The runs of each policy, the lowest mean first, by load and number of pods."""
    groups = grouped(results, lambda setting: (setting.load, setting.pods))
    return {where: dict(in_order_of_mean(group)) for where, group in sorted(groups.items())}
