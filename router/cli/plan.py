"""How many pods does this traffic need for an SLO, and what would reduce that number?

    warmroute plan config/traffic/mixed.yaml --target 0.95

This module reads options and prints the table; `sim/virtual/capacity_plan.py` computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from router.cli.options import with_options
from router.cli.simulate import TrafficOptions, map_in_processes
from router.config.policy_files import choose_policy
from router.report import text_table
from router.sim.virtual.capacity_plan import PlanResult, Variant, plan_variant, variants
from router.sim.virtual.compare import Experiment


@dataclass(frozen=True)
class PlanOptions(TrafficOptions):
    """Options of `plan`."""

    policy: Annotated[str, typer.Option(help="The policy to plan with.")] = "cost_aware"
    against: Annotated[str, typer.Option(help="Policies to compare it with.")] = "round_robin,least_load"
    target: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet the SLO.")] = 0.95
    dram_tokens: Annotated[int, typer.Option(min=0, help="KV tokens of a DRAM tier per pod; 0 for none.")] = 3_000_000
    max_pods: Annotated[int, typer.Option(min=1, help="The largest fleet to try.")] = 512


@with_options(PlanOptions)
def plan_command(options: PlanOptions) -> None:
    """Find the smallest fleet of each variant and print a table. Exit code 1 if no variant meets the SLO."""
    setup = options.experiment()
    names = [name.strip() for name in options.against.split(",") if name.strip()]
    for name in (*names, options.policy):
        choose_policy(dict(setup.policies), name)
    chosen = variants(options.policy, names, options.dram_tokens, has_link=setup.fleet.link is not None)
    plan = partial(plan_variant, setup, target=options.target, max_pods=options.max_pods)
    results = map_in_processes(plan, chosen, options.jobs, "variants of the fleet")
    Console().print(_table(setup, chosen, results, options))
    raise SystemExit(0 if any(results) else 1)


def _table(
    setup: Experiment, chosen: Sequence[Variant], results: Sequence[PlanResult | None], options: PlanOptions
) -> Table:
    slo = setup.fleet.slo
    missed = [f"> {options.max_pods}", *[""] * 7]
    share = f"{options.target:.0%}"
    return text_table(
        ["", "pods", "GPUs", "GPU-hours", "in SLO", "p99", "hit", "prefill Mtok", "saved"],
        (_row(one) if one else [variant.name, *missed] for variant, one in zip(chosen, results, strict=True)),
        title=f"Fewest pods with {share} within {slo.ttft_ms:g} ms to the first token, {slo.tpot_ms:g} ms a token",
        caption="prefill: computed prompt tokens in millions; saved: cached prompt tokens in millions.",
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
