"""How would a fleet behave under this traffic and that policy, and how many pods does it need for an SLO?

Runs the router's own decision code in front of simulated pods, on a virtual clock. This module reads the files, runs
the settings on all cores and prints the results; `loadtest/simulator/capacity_plan.py` computes a plan.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.commands.simulate_report import summary, write_csv
from loadtest.commands.simulate_setup import DEFAULT_FLEET, Source, experiment, slo_of
from loadtest.simulator.admission_rules import Rule
from loadtest.simulator.capacity_plan import PlanResult, Variant, plan, variants
from loadtest.simulator.compare import Experiment, Result, Setting, grid
from loadtest.simulator.world import OnEnded, ignore_progress
from loadtest.tables import legend, text_table
from router.cli.options import flag, with_options, writable
from router.config.policy_files import policy_spec, unknown
from router.errors import ConfigError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TrafficOptions:
    """The options that `simulate` and `plan` share."""

    traffic: Annotated[
        Path,
        typer.Argument(
            help="A trace or agent sessions (.jsonl), a traffic mix (.yaml), or a shipped mix such as `mixed`."
        ),
    ]
    fleet: Annotated[Path, typer.Option(help="YAML file of pods and links, or a shipped one.")] = DEFAULT_FLEET
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Read only the first N lines: requests, or sessions of agents.", show_default="all"),
    ] = None
    jitter_s: Annotated[
        float, typer.Option(min=0.0, help="Delay each arrival randomly, by up to N s of trace time.")
    ] = 0.0
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a value of the fleet, repeatable: --set conditions.event_loss=0.2",
            show_default="none",
        ),
    ] = None
    admission: Annotated[
        Rule | None,
        typer.Option(help="What waits or is refused in front of the fleet.", show_default="as in the fleet file"),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="router.yaml: the SLO is that of its model.", show_default="none")
    ] = None
    slo: Annotated[
        str,
        typer.Option(
            help="Limits of a good request: ttft_ms=2000, tpot_ms=100, idle_prefills=3",
            show_default="as in --config, else ttft_ms=2000, tpot_ms=100",
        ),
    ] = ""
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="A file of tenants: weights, bands and SLO. Each sends the kind of sessions with its name.",
            show_default="none",
        ),
    ] = None

    def experiment(self) -> Experiment:
        """Read all files. Raises `ConfigError`."""
        rule = [f"admission.rule={self.admission.value}"] if self.admission is not None else []
        source = Source(self.traffic, self.requests, self.jitter_s)
        setup = experiment(self.fleet, source, [*(self.changes or ()), *rule], self.tenants)
        return replace(setup, slo=slo_of(self.config, setup.fleet.model, self.slo))


def _refuse_report(path: Path | None) -> None:
    """The page needs matplotlib and is drawn in a checkout only."""
    if path is not None:
        raise typer.BadParameter("use --csv; in a checkout, `python -m loadtest.studies.simulate_peers` draws the page")


@dataclass(frozen=True)
class SimulateOptions(TrafficOptions):
    policies: Annotated[
        str | None,
        typer.Option(help="Policy names or files, separated by commas; `all` for all.", show_default="cost_aware"),
    ] = None
    loads: Annotated[
        str | None,
        typer.Option(
            help="Multiples of the rate at which requests or sessions start, separated by commas. Pauses inside a "
            "session stay.",
            show_default="1",
        ),
    ] = None
    pods: Annotated[
        str,
        typer.Option(
            help="Numbers of pods, separated by commas; groups keep their proportions.",
            show_default="as in the fleet file",
        ),
    ] = ""
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each setting, with different arrivals.", show_default="1")
    ] = None
    compare: Annotated[
        bool, flag("--compare", "Unless chosen: all policies, loads 0.7, 1 and 1.3, and three seeds.")
    ] = False
    report: Annotated[Path | None, typer.Option(hidden=True, callback=_refuse_report)] = None
    csv: Annotated[
        Path | None,
        typer.Option(help="Write a CSV file with a row for each run.", show_default="none", callback=writable),
    ] = None


@with_options(SimulateOptions)
def simulate_command(options: SimulateOptions) -> None:
    """Simulate traffic under policies and print a table. All times are virtual."""
    simulate(options, options.experiment())


def simulate(options: SimulateOptions, setup: Experiment) -> list[Result]:
    defaults = ("all", "0.7,1,1.3", 3) if options.compare else ("cost_aware", "1", 1)
    policies, loads, seeds = options.policies or defaults[0], options.loads or defaults[1], options.seeds or defaults[2]
    names = sorted(setup.policies) if policies == "all" else [name.strip() for name in policies.split(",")]
    for at, name in enumerate(names):
        if name.endswith(".yaml"):
            own = policy_spec(name).build()
            names[at], setup = own.name, replace(setup, policies={**setup.policies, own.name: own})
        _check_policy(setup, names[at])
    sizes = _positive(int, options.pods, "--pods") if options.pods else [setup.fleet.pod_count]
    for size in sizes:
        setup.fleet.with_pods(size)  # raises before anything runs
    settings = grid(names, _positive(float, loads, "--loads"), sizes, seeds)
    results = run_all(setup, settings, options.jobs)
    Console().print(summary(results, setup.slo))
    if options.csv is not None:
        write_csv(options.csv, results)
    return results


def _check_policy(setup: Experiment, name: str) -> None:
    """Raises `ConfigError`."""
    if name not in setup.policies:
        peers = "in a checkout, `python -m loadtest.studies.simulate_peers` has the formulas of other routers"
        raise ConfigError(f"policy: {unknown(name, setup.policies)}; {peers}")


_Number = TypeVar("_Number", int, float)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def _positive(kind: type[_Number], text: str, option: str) -> list[_Number]:
    try:
        numbers = [kind(one) for one in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error
    if not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"{option}: {text}: every number must be greater than 0")
    return numbers


# --- runs ---


def run_all(setup: Experiment, settings: Sequence[Setting], jobs: int) -> list[Result]:
    """All runs, with a progress bar: of requests for a single run, of runs otherwise."""
    if len(settings) > 1:
        print(f"{len(settings)} runs in {jobs} processes", file=sys.stderr)
        results = map_in_processes(partial(_run, setup), settings, jobs, "runs")
        return sorted(results, key=lambda result: result.setting)
    with _progress_bar() as progress:
        task = progress.add_task(settings[0].policy, total=setup.traffic(1.0, 0).request_count or None)

        def on_progress(done: int) -> None:
            if done % 500 == 0:
                progress.update(task, completed=done)

        return [_run(setup, settings[0], on_progress)]


def map_in_processes(
    work: Callable[[ItemT], ResultT], items: Sequence[ItemT], jobs: int, description: str
) -> list[ResultT]:
    """The result of each item in order, with a progress bar of items."""
    with (
        _progress_bar() as progress,
        ProcessPoolExecutor(min(jobs, len(items)), get_context("fork"), end_with_parent) as pool,
    ):
        return list(progress.track(pool.map(work, items), len(items), description=description))


def end_with_parent() -> None:
    """Make this process end when its parent is killed. No effect outside of Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _run(setup: Experiment, setting: Setting, on_progress: OnEnded = ignore_progress) -> Result:
    gc.disable()  # a simulation creates no reference cycles, and garbage collection of a million requests is slow
    try:
        return setup.run(setting, on_progress)
    finally:
        gc.enable()


# --- plan ---


@dataclass(frozen=True)
class PlanOptions(TrafficOptions):
    policy: Annotated[str, typer.Option(help="The policy to plan with.")] = "cost_aware"
    against: Annotated[str, typer.Option(help="Policies to compare it with, separated by commas.")] = (
        "round_robin,least_load"
    )
    target: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet the SLO.")] = 0.95
    dram_tokens: Annotated[int, typer.Option(min=0, help="KV tokens of a DRAM tier per pod; 0 for none.")] = 3_000_000
    max_pods: Annotated[int, typer.Option(min=1, help="The largest fleet to try.")] = 512


@with_options(PlanOptions)
def plan_command(options: PlanOptions) -> None:
    """Find the smallest fleet of each variant and print a table. Exit code 1 if no variant meets the SLO."""
    setup = options.experiment()
    names = [name.strip() for name in options.against.split(",") if name.strip()]
    for name in (*names, options.policy):
        _check_policy(setup, name)
    chosen = variants(options.policy, names, options.dram_tokens, has_link=setup.fleet.link is not None)
    search = partial(plan, setup, options.target, options.max_pods)
    results = map_in_processes(search, chosen, options.jobs, "variants of the fleet")
    Console().print(_plan_table(setup, chosen, results, options))
    raise SystemExit(0 if any(results) else 1)


def _plan_table(
    setup: Experiment, chosen: Sequence[Variant], results: Sequence[PlanResult | None], options: PlanOptions
) -> Table:
    slo = setup.slo
    columns = ("variant", "pods", "GPUs", "GPU-hours", "SLO", "goodput", "p99 ms", "cached", "computed", "saved")
    missed = [f"> {options.max_pods}", *[""] * 8]
    share = f"{options.target:.0%}"
    return text_table(
        columns,
        (_plan_row(one) if one else [variant.name, *missed] for variant, one in zip(chosen, results, strict=True)),
        title=f"Fewest pods with {share} within {slo.ttft_ms:g} ms to the first token, {slo.tpot_ms:g} ms a token",
        caption=legend(columns, "One run for each size."),
    )


def _plan_row(one: PlanResult) -> Sequence[str]:
    figures = one.figures
    return (
        f"{one.variant.name} ({one.layout})" if one.layout else one.variant.name,
        str(one.pods),
        str(one.gpus),
        f"{one.gpus * one.duration_s / 3600:,.1f}",
        f"{figures.slo_share:.1%}",
        f"{figures.goodput_per_s:.1f}",
        f"{figures.ttft_p99_ms:,.0f}",
        f"{figures.cached_share:.1%}",
        f"{one.computed_tokens / 1e6:,.1f}",
        f"{figures.cached_tokens / 1e6:,.1f}",
    )
