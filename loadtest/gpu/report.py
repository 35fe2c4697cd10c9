"""Tables and one picture of what `measure.py` found: measured and expected times, next to each other.

    python -m loadtest.gpu.report RUN.json... [--picture FILE.svg]

Several runs of one machine are pooled. `config/models` and `config/hardware` are those of this checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.gpu.engines import MAX_NUM_SEQS, STEP_TOKENS
from loadtest.gpu.fit import (
    PrefillPoint,
    decode_error,
    decode_points,
    error,
    expected_ms,
    fit,
    fit_launched,
    halves,
    launched,
    prefill_points,
)
from loadtest.gpu.fleet_record import MeasuredFleet, read_fleet
from loadtest.gpu.simulated import Figures, MeasuredPod, cached_tokens, expected_times, figures, route_ms, simulate
from router.config.load import shipped
from router.config.models import load_priors
from router.types import PodSpeed

IN_ENGINE = "prefill_ms"
"""Prefill times are compared inside the engine, from scheduled to the first token; `ttft_ms` adds HTTP."""
HARDWARE = "h200x1"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """One model over all runs."""

    name: str
    records: Sequence[Mapping[str, Any]]

    @property
    def prefills(self) -> list[PrefillPoint]:
        return prefill_points(self.records, IN_ENGINE)

    @property
    def fitted(self) -> PodSpeed:
        """The cost model's coefficients, from all points."""
        return fit(self.prefills, decode_points(self.records))

    @property
    def launched(self) -> PodSpeed:
        """The same with `launch_ms`."""
        return fit_launched(self.prefills, decode_points(self.records))

    @property
    def prior(self) -> PodSpeed | None:
        """The row of `config/models`, if there is one."""
        model = load_priors(shipped("config") / "models").get(self.name)
        row = model.hardware.get(HARDWARE) if model else None
        return row.speed() if row else None


def main(
    runs: Annotated[list[Path], typer.Argument(exists=True)],
    picture: Annotated[Path | None, typer.Option(help="SVG file to write; needs matplotlib.")] = None,
) -> None:
    """Print tables in Markdown."""
    found = [json.loads(path.read_text()) for path in runs]
    models = list(measured_models(found))
    for lines in (_machine(found), _copies(found), *map(_model, models), *_fleets(found, models)):
        print("\n".join(lines), end="\n\n")
    if picture:
        from loadtest.gpu.picture import draw

        draw(models, list(fleets(found, models)), picture)


def measured_models(runs: Iterable[Mapping[str, Any]]) -> Iterator[MeasuredModel]:
    """All models of the runs, in their order."""
    records: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for name, record in run["models"].items():
            records.setdefault(name, []).append(record)
    return (MeasuredModel(name, found) for name, found in records.items())


def fleets(
    runs: Sequence[Mapping[str, Any]], models: Sequence[MeasuredModel]
) -> Iterator[tuple[MeasuredFleet, MeasuredPod]]:
    """The fleets, each with its pod as it was measured alone and idle.

    The overhead before a first token is what the router waited for the pod's headers, and the way back.
    """
    model = models[0]
    speed = model.launched
    for run in runs:
        for found in run["fleets"]:
            fleet = read_fleet(found)
            if fleet.requests:
                heads_ms = fmean(one.router_phases_ms.get("attempt", 0.0) for one in fleet.requests)
                pod = MeasuredPod(
                    speed=speed,
                    kv_tokens=_kv_tokens(model.records[0]),
                    step_budget_tokens=STEP_TOKENS,
                    max_num_seqs=MAX_NUM_SEQS,
                    route_ms=route_ms(fleet.requests),
                    overhead_ms=heads_ms + _way_back_ms(model.records),
                )
                yield fleet, pod


def _way_back_ms(records: Iterable[Mapping[str, Any]]) -> float:
    """Half of what an idle pod's client waits for a short prompt, beyond the prefill: there and back."""
    points = [point for record in records for point in record["prefill"] if point["n"] <= 1024]
    return float(median(one["ttft_ms"] - one[IN_ENGINE] for point in points for one in point["times"])) / 2


def _kv_tokens(record: Mapping[str, Any]) -> int:
    cache = record["kv_cache"]
    return int(cache["num_gpu_blocks"]) * int(cache["block_size"])


def _machine(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    machine = runs[0]["machine"]
    parts = ", ".join(f"{name} {value}" for name, value in machine.items())
    return [f"{len(runs)} runs, {runs[0]['date'][:10]}: {parts}"]


def _copies(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = ["| copy | bytes | ms | GB/s |", "|---|---|---|---|"]
    for one in runs[0]["copies"]:
        rows.append(
            f"| {one['direction']} | {one['bytes']:,} | {one['ms']:.3f} | {one['bytes'] / one['ms'] / 1e6:.1f} |"
        )
    return rows


def _model(model: MeasuredModel) -> list[str]:
    cache = model.records[0]["kv_cache"]
    kv_bytes = model.records[0]["kv_bytes"] / _kv_tokens(model.records[0])
    return [
        f"## {model.name}",
        "",
        f"KV: {cache['num_gpu_blocks']} blocks of {cache['block_size']} tokens, {kv_bytes:,.0f} bytes a token",
        "",
        *_errors(model),
        "",
        *_prefills(model),
        "",
        *_decodes(model),
        "",
        *_interference(model),
    ]


def _errors(model: MeasuredModel) -> list[str]:
    """Fitted on half of the points, judged on the other half, and the other way round."""
    points = model.prefills
    one, other = halves(points)
    rows = ["| coefficients | error of all prompts | of prompts that replay no graph |", "|---|---|---|"]
    rows.append(_error("row of config/models", model.prior, points))
    for fitted, judged in ((one, other), (other, one)):
        rows.append(_error("half, judged on the other half", fit(fitted), judged))
        speed = fit_launched(fitted)
        rows.append(_error(f"... with a launch of {speed.launch_ms:.1f} ms", speed, judged))
    rows.append(_error("all points", model.fitted, points))
    rows.append(_error(f"... with a launch of {model.launched.launch_ms:.1f} ms", model.launched, points))
    return [*rows, "", f"All points: {model.fitted}", "", f"With a launch: {model.launched}"]


def _error(title: str, speed: PodSpeed | None, points: Sequence[PrefillPoint]) -> str:
    if speed is None:
        return f"| {title} | no row | |"
    longer = launched(points)
    return f"| {title} | {error(speed, points):.1%} | {f'{error(speed, longer):.1%}' if longer else 'none'} |"


def _prefills(model: MeasuredModel) -> list[str]:
    speed, with_launch = model.fitted, model.launched
    ttfts = {(one.n, one.p): one.ms for one in prefill_points(model.records)}
    rows = ["| n | p | TTFT ms | in the engine | fitted | with a launch |", "|---|---|---|---|---|---|"]
    for one in model.prefills:
        expected = f"{speed.prefill_ms(one.n, one.p):.1f} | {expected_ms(with_launch, one):.1f}"
        rows.append(f"| {one.n:,} | {one.p:,} | {ttfts[one.n, one.p]:.1f} | {one.ms:.1f} | {expected} |")
    return rows


def _decodes(model: MeasuredModel) -> list[str]:
    speed, points = model.fitted, decode_points(model.records)
    rows = [f"Decode steps, error of the fit {decode_error(speed, points):.1%}:", ""]
    rows += ["| responses | context of each | step ms | fitted |", "|---|---|---|---|"]
    for one in points:
        expected = speed.step_ms(one.batch, one.batch * one.context)
        rows.append(f"| {one.batch} | {one.context:,.0f} | {one.ms:.2f} | {expected:.2f} |")
    return rows


def _interference(model: MeasuredModel) -> list[str]:
    """A step that computes a prompt, seen by those that decode meanwhile."""
    speed = model.launched
    rows = ["| decoding | prompt tokens | usual gap ms | longest gap | expected |", "|---|---|---|---|---|"]
    for record in model.records:
        for one in record.get("interference", ()):
            step_ms = speed.step_ms(one["batch"], one["batch"] * one["context"])
            expected = max(speed.launch_ms, step_ms + speed.compute_ms(0, one["prompt_tokens"]))
            times = f"{one['usual_gap_ms']:.1f} | {one['longest_gap_ms']:.1f} | {expected:.1f}"
            rows.append(f"| {one['batch']} | {one['prompt_tokens']:,} | {times} |")
    return rows


def _fleets(runs: Sequence[Mapping[str, Any]], models: Sequence[MeasuredModel]) -> Iterator[list[str]]:
    for fleet, pod in fleets(runs, models):
        measured, simulated = figures(fleet.requests), figures(simulate(fleet, pod))
        known = cached_tokens(fleet.requests)
        rows = [f"## A router in front of {fleet.pods} pods, {len(fleet.requests)} requests", ""]
        rows += ["| | mean TTFT ms | p50 | p90 | p99 | mean duration | hit share |", "|---|---|---|---|---|---|---|"]
        rows += [_figures("measured", measured), _figures("simulated", simulated)]
        rows += ["", "| requests | expected TTFT ms | actual | error of each | of the mean |", "|---|---|---|---|---|"]
        for one in expected_times(fleet.requests):
            means = f"{one.expected_mean_ms:.1f} | {one.actual_mean_ms:.1f}"
            rows.append(
                f"| {one.first} to {one.last} | {means} | {one.error_per_request:.0%} | {one.error_of_the_mean:+.0%} |"
            )
        tokens = f"{known.predicted_tokens:,} predicted, {known.reported_tokens:,} reported"
        yield [*rows, "", f"Cached tokens: {tokens}; equal in {known.exact_share:.1%} of {known.requests} requests"]


def _figures(name: str, one: Figures) -> str:
    times = (one.ttft_mean_ms, one.ttft_p50_ms, one.ttft_p90_ms, one.ttft_p99_ms, one.e2e_mean_ms)
    return f"| {name} | {' | '.join(f'{value:.1f}' for value in times)} | {one.hit_share:.1%} |"


if __name__ == "__main__":
    typer.run(main)
