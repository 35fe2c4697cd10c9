"""Results of simulated runs as a table, a CSV file and an HTML page."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.table import Table

from router.report import PlotAxes, Section, Series, bars, cdf, lines, page, paragraph, table, text_table
from router.sim.virtual.compare import Measure, Result, grouped, mean_of, ranks
from router.sim.virtual.outcome import RunFigures, Slo
from router.sim.virtual.scenario import FleetSpec


def _ttft_mean_ms(of: RunFigures) -> float:
    """Infinite if no request was served."""
    return math.inf if math.isnan(of.ttft_mean_ms) else of.ttft_mean_ms


MEASURES: dict[str, Measure] = {
    "TTFT mean": _ttft_mean_ms,
    "TTFT p99": lambda f: math.inf if math.isnan(f.ttft_p99_ms) else f.ttft_p99_ms,
    "share of SLO misses": lambda f: 1 - f.slo_share,
}
OURS = "cost_aware"
TOLERANCE = 0.01
"""A smaller relative difference counts as equal."""
MAX_LINES = 8
"""Lines in one plot that a reader can distinguish: the best policies, and ours."""
_COLUMNS: tuple[tuple[str, Callable[[RunFigures], str]], ...] = (
    ("hit", lambda f: f"{f.cached_share:.1%}"),
    ("ideal", lambda f: f"{f.of_ideal:.0%}"),
    ("mean", lambda f: _duration(f.ttft_mean_ms)),
    ("p50", lambda f: _duration(f.ttft_p50_ms)),
    ("p99", lambda f: _duration(f.ttft_p99_ms)),
    ("SLO", lambda f: f"{f.slo_share:.1%}"),
    ("peak", lambda f: f"{f.peak_over_mean:.2f}"),
    ("regret", lambda f: _duration(f.regret_mean_ms)),
)
LEGEND = (
    "hit: cached share of the prompt tokens; ideal: relative to a cache that never evicts. mean, p50, p99: time to "
    "first token. SLO: requests within {ttft} ms to the first token and {tpot} ms per token after it; refused requests "
    "are misses. peak: computed tokens of the busiest pod relative to the mean. regret: how much earlier the best pod "
    "would have sent the first token."
)


def _duration(ms: float) -> str:
    if math.isnan(ms):
        return ""
    return f"{ms:.0f} ms" if ms < 1e4 else f"{ms / 1e3:,.0f} s"


def summary(results: Sequence[Result], slo: Slo) -> Table:
    """A row for each policy, load and pod count: means over seeds, without the runs with wrong coefficients.

    A load or pod count that is the same in all rows is in the title only."""
    rows = _rows(results)
    loads, pods = sorted({row[1] for row in rows}), sorted({row[2] for row in rows})
    names = ["policy", "load", "pods", *(name for name, _ in _COLUMNS)]
    constant = ({1} if len(loads) == 1 else set()) | ({2} if len(pods) == 1 else set())
    kept = [at for at in range(len(names)) if at not in constant]
    return text_table(
        [names[at] for at in kept],
        ([row[at] for at in kept] for row in rows),
        title=f"load {', '.join(loads)}; {', '.join(pods)} pods",
        caption=LEGEND.format(ttft=f"{slo.ttft_ms:g}", tpot=f"{slo.tpot_ms:g}"),
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
    return {**values, "cached_share": of.cached_share} | {
        f"cached_share_{kind}": share for kind, share in by_kind.items()
    }


def write_report(path: Path, results: Sequence[Result], fleet: FleetSpec, traffic: str) -> None:
    """One HTML page."""
    plain = _with_exact_priors(results)
    title = f"{traffic} on {fleet.model}"
    sections = [
        Section("Summary", [paragraph(line) for line in verdicts(results)]),
        Section("Figures", [table(["policy", "load", "pods", *(name for name, _ in _COLUMNS)], _rows(results))]),
        *(_plots(plain, pods, fleet.slo) for pods in sorted({result.setting.pods for result in plain})),
        Section("Stability of the ranking", _stability(results)),
    ]
    path.write_text(page(title, sections), encoding="utf-8")


def verdicts(results: Sequence[Result]) -> list[str]:
    """The best policy by each measure, and the comparison with `OURS`."""
    lines = []
    for (load, pods), group in _groups(results).items():
        for name, measure in MEASURES.items():
            means = sorted((mean_of(runs, measure), policy) for policy, runs in _by_policy(group).items())
            (best, winner), ours = means[0], {policy: mean for mean, policy in means}.get(OURS)
            equal = sum(mean == best for mean, _ in means[1:])
            winners = f"{winner} and {equal} others have" if equal else f"{winner} has"
            verdict = f"Load {load:g}, {pods} pods: {winners} the best {name}, {_shown(name, best)}"
            if ours is not None and ours > best:
                same = ours <= best * (1 + TOLERANCE)
                verdict += f"; {OURS} has {_shown(name, ours)}, which is {'as good' if same else 'behind'}"
            lines.append(f"{verdict}.")
        lines += _hit_rate_note(load, pods, group)
    return lines


def _hit_rate_note(load: float, pods: int, group: Sequence[Result]) -> list[str]:
    """A sentence if the policy with the highest hit rate is not the fastest."""
    hits = [
        (mean_of(runs, lambda f: f.cached_share), mean_of(runs, _ttft_mean_ms), policy)
        for policy, runs in _by_policy(group).items()
    ]
    (hit, slow_ms, highest), (fast_ms, fastest) = max(hits), min((ms, policy) for _, ms, policy in hits)
    if highest == fastest or slow_ms <= fast_ms * (1 + TOLERANCE):
        return []
    return [
        f"Load {load:g}, {pods} pods: {highest} has the highest hit rate, {hit:.1%}, at {slow_ms / fast_ms:.1f} "
        f"times the mean TTFT of {fastest}."
    ]


def _shown(measure: str, value: float) -> str:
    return f"{value:.1%}" if measure == "share of SLO misses" else f"{value:,.0f} ms"


def _with_exact_priors(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if not result.setting.misjudged]


def _groups(results: Sequence[Result]) -> dict[tuple[float, int], list[Result]]:
    """By load and number of pods, ascending."""
    return dict(sorted(grouped(_with_exact_priors(results), lambda setting: (setting.load, setting.pods)).items()))


def _by_policy(results: Iterable[Result]) -> dict[str, list[Result]]:
    return grouped(results, lambda setting: setting.policy)


def _rows(results: Sequence[Result]) -> list[list[str]]:
    """Means over seeds; in each group the fastest policy first."""
    rows: list[list[str]] = []
    for (load, pods), group in _groups(results).items():
        ordered = sorted(_by_policy(group).items(), key=lambda one: mean_of(one[1], _ttft_mean_ms))
        for policy, runs in ordered:
            mean = _mean_figures([run.figures for run in runs])
            rows.append([policy, f"{load:g}", str(pods), *(show(mean) for _, show in _COLUMNS)])
    return rows


def _mean_figures(many: Sequence[RunFigures]) -> RunFigures:
    """The mean of each field; shares by kind are those of the first."""
    fields = asdict(many[0])
    means = {
        name: fmean(getattr(one, name) for one in many) for name, value in fields.items() if not isinstance(value, dict)
    }
    return RunFigures(**{**fields, **means})


# --- plots ---


def _plots(results: Sequence[Result], pods: int, slo: Slo) -> Section:
    here = [result for result in results if result.setting.pods == pods]
    loads = sorted({result.setting.load for result in here})
    middle = loads[len(loads) // 2]
    chosen = _chosen([result for result in here if result.setting.load == middle])
    by_policy = {policy: runs for policy, runs in _by_policy(here).items() if policy in chosen}
    at_middle = {policy: [run for run in runs if run.setting.load == middle] for policy, runs in by_policy.items()}
    blocks = [_goodput(by_policy, slo)] if len(loads) > 1 else []
    blocks += [_ttft(at_middle, middle, slo), _hits(at_middle), _work(at_middle), _regret(at_middle)]
    return Section(f"{pods} pods", [block for block in blocks if block])


def _chosen(results: Sequence[Result]) -> list[str]:
    means = sorted((mean_of(runs, _ttft_mean_ms), policy) for policy, runs in _by_policy(results).items())
    best = [policy for _, policy in means]
    return best[:MAX_LINES] if OURS not in best[MAX_LINES:] else [*best[: MAX_LINES - 1], OURS]


def _goodput(by_policy: dict[str, list[Result]], slo: Slo) -> str:
    series = []
    for policy, runs in by_policy.items():
        loads = sorted({run.setting.load for run in runs})
        at_load = grouped(runs, lambda setting: setting.load)
        series.append(Series(policy, loads, [mean_of(at_load[load], lambda f: f.goodput_per_s) for load in loads]))
    caption = f"Requests per second within {slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token."
    axes = PlotAxes(
        title="Goodput at the SLO", x="multiple of the traffic's own rate", y="good requests / s", caption=caption
    )
    return lines(axes, series)


def _ttft(by_policy: dict[str, list[Result]], load: float, slo: Slo) -> str:
    upright = {"SLO": slo.ttft_ms} if math.isfinite(slo.ttft_ms) else {}
    axes = PlotAxes(
        title=f"Time to first token at load {load:g}", x="ms", y="share of requests", log_x=True, upright=upright
    )
    return cdf(axes, {policy: [ms for run in runs for ms in run.ttft_ms] for policy, runs in by_policy.items()})


def _hits(by_policy: dict[str, list[Result]]) -> str:
    kinds = sorted({kind for runs in by_policy.values() for run in runs for kind in run.figures.cached_share_by_kind})
    shares = {
        policy: [fmean(run.figures.cached_share_by_kind.get(kind, 0.0) for run in runs) for kind in kinds]
        for policy, runs in by_policy.items()
    }
    return bars(PlotAxes(title="Cached share of the prompt tokens", x="kind of request", y="share"), kinds, shares)


def _work(by_policy: dict[str, list[Result]]) -> str:
    series = [
        Series(policy, list(range(1, len(runs[0].work_tokens) + 1)), [tokens / 1e6 for tokens in runs[0].work_tokens])
        for policy, runs in by_policy.items()
    ]
    axes = PlotAxes(
        title="Computed prompt tokens by pod", x="pod, busiest first", y="million tokens", caption="Seed 0."
    )
    return lines(axes, series)


def _regret(by_policy: dict[str, list[Result]]) -> str:
    samples = {policy: [max(ms, 0.1) for run in runs for ms in run.regret_ms] for policy, runs in by_policy.items()}
    if not any(samples.values()):
        return ""
    caption = "How much earlier the best pod would have sent the first token, by its true cache and queue."
    return cdf(PlotAxes(title="Regret", x="ms", y="share of decisions", log_x=True, caption=caption), samples)


def _stability(results: Sequence[Result]) -> list[str]:
    """Ranks of each policy over seeds, loads and pod counts, and with wrong coefficients."""
    blocks = []
    wrong = [result for result in results if result.setting.misjudged]
    for name, measure in MEASURES.items():
        right, off = ranks(_with_exact_priors(results), measure), ranks(wrong, measure)
        rows = [
            [policy, f"{fmean(places):.1f}", _spread(places), _spread(off.get(policy, []))]
            for policy, places in sorted(right.items(), key=lambda one: fmean(one[1]))
        ]
        blocks += [
            paragraph(f"Rank by {name}; 1 is best."),
            table(["policy", "mean rank", "best to worst", "with wrong coefficients"], rows),
        ]
    errors = (
        "Wrong coefficients: the router assumes 0.7 or 1.3 times the true compute, or 0.5 or 2 times the bandwidth."
    )
    return [*blocks, paragraph(errors)]


def _spread(places: Sequence[int]) -> str:
    return f"{min(places)} to {max(places)}" if places else ""
