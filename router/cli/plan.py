"""How many pods for this traffic and this SLO, and what saves some?

    warmroute plan config/traffic/mixed.yaml --target 0.95

This file only asks and shows; `sim/virtual/capacity_plan.py` answers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router.cli.simulate_setup import DEFAULT_FLEET, Source, experiment
from router.config.policy_files import choose_policy
from router.config.shipped import shipped
from router.report import text_table
from router.sim.virtual.capacity_plan import PlanResult, Variant, plan_variant, variants
from router.sim.virtual.compare import Experiment

AGAINST = "round_robin,least_load"


def plan_command(
    traffic: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A trace (.jsonl, .csv) or a mix (.yaml).")
    ],
    fleet: Annotated[Path | None, typer.Option(help="A YAML whose first group of pods is multiplied.")] = None,
    policy: Annotated[str, typer.Option(help="The policy to plan with.")] = "cost_aware",
    against: Annotated[str, typer.Option(help="Policies to compare it with.")] = AGAINST,
    target: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet the SLO.")] = 0.95,
    dram_tokens: Annotated[
        int, typer.Option(min=0, help="KV tokens of a DRAM tier a pod; 0 to leave it out.")
    ] = 3_000_000,
    most: Annotated[int, typer.Option(min=1, help="Pods to try at the most.")] = 512,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first lines of a trace.")] = None,
    jitter_s: Annotated[float, typer.Option(min=0.0, help="Spread each arrival by up to so much of trace time.")] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Ends with a table; exit code 1 where nothing met the SLO."""
    setup = experiment(fleet or shipped("config") / DEFAULT_FLEET, Source(traffic, requests, jitter_s))
    names = [name.strip() for name in against.split(",") if name.strip()]
    for name in (*names, policy):
        choose_policy(dict(setup.policies), name)
    asked = variants(policy, names, dram_tokens, link=setup.fleet.link is not None)
    answers = _all(setup, asked, target, most, jobs)
    Console().print(_table(setup, asked, answers, target, most))
    raise SystemExit(0 if any(answers) else 1)


def _all(setup: Experiment, asked: Sequence[Variant], target: float, most: int, jobs: int) -> list[PlanResult | None]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(min(jobs, len(asked)), mp_context=get_context("fork")) as pool,
    ):
        task = progress.add_task("ways to build it", total=len(asked))
        found: list[PlanResult | None] = []
        for one in pool.map(partial(_one, setup, target, most), asked):
            found.append(one)
            progress.advance(task)
        return found


def _one(setup: Experiment, target: float, most: int, variant: Variant) -> PlanResult | None:
    return plan_variant(setup, variant, target, most)


def _table(
    setup: Experiment, asked: Sequence[Variant], answers: Sequence[PlanResult | None], target: float, most: int
) -> Table:
    slo = setup.fleet.slo
    missed = [f"> {most}", *[""] * 7]
    return text_table(
        ["", "pods", "GPUs", "GPU-hours", "in SLO", "p99", "hit", "prefill Mtok", "saved"],
        (_row(one) if one else [variant.name, *missed] for variant, one in zip(asked, answers, strict=True)),
        title=f"Fewest pods with {target:.0%} within {slo.ttft_ms:g} ms to the first token, {slo.tpot_ms:g} ms a token",
        caption="prefill: prompt tokens computed, in millions; saved: of all prompt tokens.",
    )


def _row(one: PlanResult) -> Sequence[str]:
    figures = one.figures
    name = f"{one.variant.name} ({one.layout})" if one.layout else one.variant.name
    return (
        name,
        str(one.pods),
        str(one.gpus),
        f"{one.gpu_hours:,.1f}",
        f"{figures.slo_share:.1%}",
        f"{figures.ttft_p99_ms:,.0f} ms",
        f"{figures.cached_share:.1%}",
        f"{one.computed_tokens / 1e6:,.1f}",
        f"{figures.cached_tokens / 1e6:,.1f}",
    )
