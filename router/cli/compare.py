"""`warmroute compare`: does it pay on my traffic?

Simulates recorded requests on pods of the recorded speed and capacity, under several policies. Beside them stands what
was recorded: how far the simulation of the policy that decided is from it is how far to trust the others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from router.cli.figures import percentile
from router.cli.options import PoliciesOption, flag
from router.cli.simulate import run_all
from router.config.load import shipped
from router.config.policy_files import find_policy, load_policies
from router.errors import ConfigError
from router.observe.receipt_lines import read_lines
from router.observe.receipts import Receipt
from router.policy.recording import FleetLine
from router.report import legend, text_table
from router.sim.virtual.compare import Experiment, Result, grid, in_order_of_mean, mean_of
from router.sim.virtual.router_view import Knowledge
from router.sim.virtual.scenario import Conditions, FleetSpec, PodsSpec
from router.sim.virtual.traffic import ReceiptLine, Traffic, receipts_traffic
from router.types import Pod, PodSpeed, PodState

BASELINES = ("round_robin", "least_load")
PRIOR_CAPACITY_TOKENS = Knowledge().no_events_capacity_tokens
"""Of pods that report none."""
MAX_JITTER_S = 1.0
COLUMNS = ("policy", "cached", "mean ms", "p50 ms", "p99 ms", "prefill s", "refused")


class Row(msgspec.Struct, frozen=True):
    """The mean over seeds. `prefill_s`: seconds in which pods computed prompts."""

    policy: str
    cached_share: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    prefill_s: float
    refused: float = 0.0


@dataclass(frozen=True)
class RecordedTraffic:
    """Recorded arrivals; all seeds but 0 delay each by up to the mean interval between two."""

    receipts: Sequence[ReceiptLine]

    def __call__(self, speedup: float, seed: int) -> Traffic:
        times_s = [one.at_s for one in self.receipts]
        jitter_s = min((max(times_s) - min(times_s)) / len(times_s), MAX_JITTER_S) if seed else 0.0
        return receipts_traffic(self.receipts, speedup=speedup, jitter_s=jitter_s, seed=seed)


@dataclass(frozen=True)
class RecordedSpeeds:
    """The prior of each recorded pod, which stands for its hardware."""

    pods: Mapping[str, Pod]

    def __call__(self, _model: str, pod: str) -> tuple[PodSpeed, int]:
        return self.pods[pod].speed, self.pods[pod].kv_bytes_per_token


def compare_command(
    receipts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of receipts with scenes.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy to simulate, repeatable.", show_default="round_robin, least_load, and the recorded one"
        ),
    ] = None,
    policies: PoliciesOption = None,
    model: Annotated[str | None, typer.Option(help="Compare its requests.", show_default="the busiest")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, with slightly different arrivals.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1,
    json: Annotated[bool, flag("--json", "Print JSON instead of a table.")] = False,
) -> None:
    served, pods = _recorded(receipts, model)
    known = load_policies(policies or shipped("policies"))
    by = Counter(one.policy for one in served).most_common(1)[0][0]
    chosen = {one.name: one for one in (find_policy(known, name) for name in policy or (*BASELINES, by))}
    setup = Experiment(_fleet(pods, served), RecordedSpeeds({pod.id: pod for pod in pods}), chosen, _traffic(served))
    results = run_all(setup, grid(list(chosen), [1.0], [len(pods)], seeds), jobs)
    speeds = {pod.id: pod for pod in pods}
    rows = [_real(served, by, speeds), *(_row(name, runs) for name, runs in in_order_of_mean(results).items())]
    if json:
        print(msgspec.json.encode(rows).decode())
        return
    title = f"{len(served):,} recorded requests of {served[0].model} on {len(pods)} pods, {seeds} seeds"
    note = "The first row is what was measured; that policy simulated shows how far to trust the others."
    Console().print(text_table(COLUMNS, map(_cells, rows), title=title, caption=legend(COLUMNS, note)))


def _recorded(path: Path, model: str | None) -> tuple[list[Receipt], list[Pod]]:
    """Served receipts of a model, and its pods as they were last. Raises `ConfigError`."""
    every, fleets = list[Receipt](), list[FleetLine]()
    for line in read_lines(path):
        if isinstance(line, FleetLine):
            fleets.append(line)
        elif line.result == "ok" and line.block_size_tokens and line.output_tokens and line.ttft_ms:
            every.append(line)
    chosen = model or next(iter(Counter(one.model for one in every).most_common(1)), ("",))[0]
    served = [one for one in every if one.model == chosen]
    pods = next(filter(None, ([*_ready(one, chosen)] for one in reversed(fleets))), [])
    if not served or not pods:
        of = f" of the model {chosen}" if chosen else ""
        raise ConfigError(
            f"{path}: no pods{of}; enable receipts.replay_data"
            if served
            else f"{path}: no answers{of} with a first token and usage"
        )
    return served, pods


def _ready(fleet: FleetLine, model: str) -> Iterable[Pod]:
    return (pod for pod, state in fleet.pods if state is PodState.READY and pod.serves(model))


def _fleet(pods: Sequence[Pod], served: Sequence[Receipt]) -> FleetSpec:
    """The recorded pods. What the engines take beyond the expected time, as the median, delays every first token."""
    late_ms = [one.ttft_ms - one.predicted_ms for one in served if one.ttft_ms and one.predicted_ms is not None]
    groups = tuple(
        PodsSpec(count=1, hardware=pod.id, kv_tokens=pod.capacity_tokens or PRIOR_CAPACITY_TOKENS, role=pod.role)
        for pod in pods
    )
    return FleetSpec(
        model=served[0].model,
        pods=groups,
        engine_block_tokens=pods[0].block_size_tokens or 16,
        conditions=Conditions(route_ms=0.0, overhead_ms=max(median(late_ms or [0.0]), 0.0)),
    )


def _traffic(served: Iterable[Receipt]) -> RecordedTraffic:
    names = ReceiptLine.__struct_fields__
    return RecordedTraffic([ReceiptLine(**{name: getattr(one, name) for name in names}) for one in served])


def _real(served: Sequence[Receipt], policy: str, speeds: Mapping[str, Pod]) -> Row:
    ttft_ms = [one.ttft_ms for one in served if one.ttft_ms is not None]
    known = [one for one in served if one.cached_tokens is not None and (one.prefill_pod or one.pod) in speeds]
    prefill_ms = [
        speeds[one.prefill_pod or one.pod].speed.compute_ms(one.cached_tokens or 0, one.prompt_tokens) for one in known
    ]
    tokens = sum(one.prompt_tokens for one in known)
    return Row(
        f"recorded: {policy}",
        sum(one.cached_tokens or 0 for one in known) / max(tokens, 1),
        *(fmean(ttft_ms), percentile(ttft_ms, 0.5), percentile(ttft_ms, 0.99)),
        sum(prefill_ms) / 1000,
    )


def _row(policy: str, runs: Sequence[Result]) -> Row:
    measures = (
        lambda f: f.cached_share,
        lambda f: f.ttft_mean_ms,
        lambda f: f.ttft_p50_ms,
        lambda f: f.ttft_p99_ms,
        lambda f: f.prefill_s,
        lambda f: f.refused,
    )
    return Row(policy, *(mean_of(runs, measure) for measure in measures))


def _cells(row: Row) -> Sequence[str]:
    times = (row.ttft_mean_ms, row.ttft_p50_ms, row.ttft_p99_ms, row.prefill_s)
    return row.policy, f"{row.cached_share:.1%}", *(f"{value:,.1f}" for value in times), f"{row.refused:g}"
