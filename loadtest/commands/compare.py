"""`warmroute compare`: does it pay on my traffic?

Simulates recorded requests on pods of the recorded speed and capacity, under several policies. The
first row is what was recorded: how far the policy that decided is from it, simulated, is how far to trust the others.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import isnan
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from loadtest.commands.simulate import run_all
from loadtest.simulator.compare import (
    DEFAULT_SLO,
    Experiment,
    Measure,
    Result,
    Setting,
    grid,
    in_order_of_mean,
    mean_of,
    summarize,
)
from loadtest.simulator.outcome import RequestOutcome, Run
from loadtest.simulator.router_view import Knowledge
from loadtest.simulator.scenario import Conditions, FleetSpec, PodsSpec
from loadtest.simulator.traffic import Traffic, receipts_traffic
from loadtest.tables import legend, text_table
from router.cli.options import PoliciesOption, flag
from router.cli.receipt_files import lines_of
from router.config.load import shipped
from router.config.policy_files import find_policy, load_policies
from router.errors import ConfigError
from router.observe.receipts import Receipt
from router.policy.recording import FleetLine
from router.types import Pod, PodSpeed, PodState

BASELINES = ("round_robin", "least_load")
MAX_JITTER_S = 1.0
MIN_REQUESTS = 200
MAX_DIFFERENCE = 0.03
"""Largest difference of the recorded cached share from the simulated one at which rows are trusted."""
COLUMNS: Mapping[str, Measure] = {
    "mean ms": lambda of: of.ttft_mean_ms,
    "p50 ms": lambda of: of.ttft_p50_ms,
    "p99 ms": lambda of: of.ttft_p99_ms,
    "prefill s": lambda of: of.prefill_s,
    "refused": lambda of: of.refused,
}


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
    served, pods, others = _recorded(receipts, model)
    known = load_policies(policies or shipped("policies"))
    by = Counter(one.policy for one in served).most_common(1)[0][0]
    chosen = {one.name: one for one in (find_policy(known, name) for name in policy or (*BASELINES, by))}
    setup = Experiment(_fleet(pods, served), partial(_speed_of, pods), chosen, partial(_arrivals, served))
    simulated = in_order_of_mean(run_all(setup, grid(list(chosen), [1.0], [len(pods)], seeds), jobs))
    rows = {f"recorded: {by}": [_measured(served, pods)], **simulated}
    notes = [*_other_fleets(others, len(pods)), *_doubts(len(served), rows[f"recorded: {by}"], simulated.get(by))]
    if json:
        print(msgspec.json.encode([{"policy": name} | _mean(runs) for name, runs in rows.items()]).decode())
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
        return
    columns, note = ("policy", "cached", *COLUMNS), "The first row is what was measured: the closer that policy is"
    cells = ((name, *_cells(runs)) for name, runs in rows.items())
    title = f"{len(served):,} recorded requests of {served[0].model} on {_pods(len(pods))}; seeds: {seeds}"
    caption = legend(columns, f"{note} to it when simulated, the more the others can be trusted.")
    Console().print(text_table(columns, cells, title=title, caption=caption), *notes, sep="\n")


def _is_served(one: Receipt) -> bool:
    return one.result == "ok" and bool(one.block_size_tokens and one.output_tokens and one.ttft_ms)


def _recorded(path: Path, model: str | None) -> tuple[list[Receipt], list[Pod], Counter[int]]:
    """Served receipts of a model; the ready pods that most of them saw, as they were last; and how many receipts saw
    other pods, by the number of these. Raises `ConfigError`."""
    every, fleets = list[Receipt](), dict[str, FleetLine]()
    for line in lines_of(path):
        if isinstance(line, FleetLine):
            fleets[line.fleet] = line
        elif isinstance(line, Receipt) and _is_served(line):
            every.append(line)
    chosen = model or next(iter(Counter(one.model for one in every).most_common(1)), ("",))[0]
    served = [one for one in every if one.model == chosen]
    ready = {name: {pod.id: pod for pod in _ready(fleet, chosen)} for name, fleet in fleets.items()}
    seen = [pods for one in served if one.scene and (pods := ready.get(one.scene.fleet))]
    numbers = Counter(map(frozenset, seen))
    if not numbers:
        of = f" of the model {chosen}" if chosen else ""
        raise ConfigError(
            f"{path}: no pods{of}; enable receipts.replay_data"
            if served
            else f"{path}: no answers{of} with a first token and usage"
        )
    (most, _), *others = numbers.most_common()
    pods = next(pods for pods in reversed(seen) if pods.keys() == most)
    other = Counter[int]()
    for ids, number in others:
        other[len(ids)] += number
    return served, [*pods.values()], other


def _ready(fleet: FleetLine, model: str) -> Iterable[Pod]:
    return (pod for pod, state in fleet.pods if state is PodState.READY and pod.serves(model))


def _pods(number: int) -> str:
    return f"{number} pod" if number == 1 else f"{number} pods"


def _other_fleets(others: Mapping[int, int], simulated: int) -> Iterator[str]:
    for pods, requests in others.items():
        fleet = f"{_pods(pods)} ready" if pods != simulated else "other pods ready"
        yield f"Requests that saw {fleet}: {requests:,}. They are simulated on the {_pods(simulated)} that most saw."


def _doubts(requests: int, recorded: Sequence[Result], simulated: Sequence[Result] | None) -> Iterator[str]:
    """Why no row is to be trusted."""
    if requests < MIN_REQUESTS:
        yield f"Trust no row: {requests} requests are a small sample; record at least {MIN_REQUESTS}."
    was, would_be = (mean_of(runs, lambda of: of.cached_share) for runs in (recorded, simulated or recorded))
    if abs(was - would_be) > MAX_DIFFERENCE:
        yield f"Trust no row: {was:.1%} of the prompt tokens were cached, and {would_be:.1%} when simulated."


def _fleet(pods: Sequence[Pod], served: Sequence[Receipt]) -> FleetSpec:
    """The recorded pods. What the engines take beyond the expected time, as the median, delays every first token."""
    late_ms = [one.ttft_ms - one.predicted_ms for one in served if one.ttft_ms and one.predicted_ms is not None]
    groups = tuple(
        PodsSpec(
            count=1,
            hardware=pod.id,
            kv_tokens=pod.capacity_tokens or Knowledge().no_events_capacity_tokens,
            role=pod.role,
        )
        for pod in pods
    )
    return FleetSpec(
        model=served[0].model,
        pods=groups,
        engine_block_tokens=pods[0].block_size_tokens or 16,
        conditions=Conditions(route_ms=0.0, overhead_ms=max(median(late_ms or [0.0]), 0.0)),
    )


def _speed_of(pods: Sequence[Pod], _model: str, named: str) -> tuple[PodSpeed, int]:
    """Each recorded pod stands for its hardware."""
    return next((pod.speed, pod.kv_bytes_per_token) for pod in pods if pod.id == named)


def _arrivals(served: Sequence[Receipt], speedup: float, seed: int) -> Traffic:
    """As recorded; all seeds but 0 delay each by up to the mean interval between two."""
    times_s = [one.at_s for one in served]
    jitter_s = min((max(times_s) - min(times_s)) / len(served), MAX_JITTER_S) if seed else 0.0
    return receipts_traffic(served, speedup=speedup, jitter_s=jitter_s, seed=seed)


def _measured(served: Sequence[Receipt], pods: Sequence[Pod]) -> Result:
    speeds, outcomes = {pod.id: pod.speed for pod in pods}, []
    for one in served:
        outcome = RequestOutcome(one.model, one.at_s * 1000, one.prompt_tokens, one.output_tokens or 1)
        outcome.cached_tokens = one.cached_tokens or 0
        outcome.ttft_ms, outcome.e2e_ms = one.ttft_ms or 0.0, one.e2e_ms
        speed = speeds.get(one.prefill_pod or one.pod, pods[0].speed)
        outcome.prefill_ms = speed.compute_ms(outcome.cached_tokens, one.prompt_tokens)
        outcomes.append(outcome)
    return summarize(Setting("recorded", 1.0, len(pods)), Run(outcomes, {}, 0.0, 0), DEFAULT_SLO, {})


def _mean(runs: Sequence[Result]) -> dict[str, float]:
    """All figures, means over the seeds; without those that are not known."""
    names = [name for name, value in asdict(runs[0].figures).items() if isinstance(value, int | float)]
    means = {name: mean_of(runs, attrgetter(name)) for name in names}
    return {name: mean for name, mean in means.items() if not isnan(mean)}


def _cells(runs: Sequence[Result]) -> Sequence[str]:
    share = mean_of(runs, lambda of: of.cached_share)
    return f"{share:.1%}", *(f"{mean_of(runs, measure):,.1f}" for measure in COLUMNS.values())
