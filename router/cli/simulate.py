"""How would a fleet behave under this traffic and that policy?

    warmroute simulate conversation_trace.jsonl --jitter-s 3
    warmroute simulate conversation_trace.jsonl --compare --report report.html

The router's own decision code in front of simulated pods, on a virtual clock. This file only reads what is asked for,
spreads the runs over the cores, and shows what came out.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from router.cli.simulate_report import summary, write_csv, write_report
from router.cli.simulate_setup import DEFAULT_FLEET, Source, experiment
from router.config.policy_files import choose_policy
from router.config.shipped import shipped
from router.report import PlotsUnavailable
from router.sim.virtual.compare import Experiment, Result, Setting, grid
from router.sim.virtual.world import Progressed


def simulate_command(
    traffic: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A trace (.jsonl, .csv) or a mix (.yaml).")
    ],
    fleet: Annotated[Path | None, typer.Option(help="A YAML of pods, links and SLO.")] = None,
    policies: Annotated[str, typer.Option(help="Names, separated by commas; `all` for all there are.")] = "cost_aware",
    loads: Annotated[str, typer.Option(help="Times the traffic's own rate.")] = "1",
    pods: Annotated[str, typer.Option(help="Pods of the fleet's first group; as the file says if empty.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting, with other arrivals.")] = 1,
    compare: Annotated[
        bool, typer.Option("--compare", help="All policies, three loads, three seeds, wrong priors.")
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first lines of a trace.")] = None,
    jitter_s: Annotated[float, typer.Option(min=0.0, help="Spread each arrival by up to so much of trace time.")] = 0.0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every run as a row.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Ends with a table; times are virtual."""
    setup = experiment(fleet or shipped("config") / DEFAULT_FLEET, Source(traffic, requests, jitter_s))
    if compare:
        policies, loads, seeds = "all", loads if loads != "1" else "0.7,1,1.3", max(seeds, 3)
    names = sorted(setup.policies) if policies == "all" else [name.strip() for name in policies.split(",")]
    for name in names:
        choose_policy(dict(setup.policies), name)
    sizes = _positive(int, pods, "--pods") if pods else [setup.fleet.pods[0].count]
    settings = grid(names, _positive(float, loads, "--loads"), sizes, seeds, wrong=compare)
    results = run_all(setup, settings, jobs)
    Console().print(summary(results, setup.fleet.slo))
    if csv is not None:
        write_csv(csv, results)
    if report is not None:
        try:
            write_report(report, results, setup.fleet, traffic.name)
        except PlotsUnavailable as error:
            raise typer.BadParameter(f"--report: {error}") from error


Number = TypeVar("Number", int, float)


def _positive(kind: type[Number], text: str, option: str) -> list[Number]:
    try:
        numbers = [kind(one) for one in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error
    if not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"{option}: {text}: each must be above 0")
    return numbers


def run_all(setup: Experiment, settings: Sequence[Setting], jobs: int) -> list[Result]:
    """All runs, with a bar: of requests where there is one run, of runs where there are several."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        if len(settings) == 1:
            task = progress.add_task(settings[0].policy, total=setup.traffic(1.0, 0).request_count or None)
            return [_run(setup, settings[0], lambda done: _tick(progress, task, done))]
        task = progress.add_task("runs", total=len(settings))
        results = []
        for result in _spread(setup, settings, jobs):
            results.append(result)
            progress.update(task, advance=1, description=f"{result.setting.policy} x{result.setting.load:g}")
    return sorted(results, key=lambda result: result.setting)


def _tick(progress: Progress, task: object, done: int) -> None:
    if done % 500 == 0:
        progress.update(task, completed=done)  # type: ignore[arg-type]


def _spread(setup: Experiment, settings: Sequence[Setting], jobs: int) -> Iterator[Result]:
    with ProcessPoolExecutor(min(jobs, len(settings)), mp_context=get_context("fork")) as pool:
        for ended in as_completed(pool.submit(partial(_run, setup), setting) for setting in settings):
            yield ended.result()


def _run(setup: Experiment, setting: Setting, progressed: Progressed = lambda _: None) -> Result:
    gc.disable()  # nothing here forms cycles, and a million requests are a lot to look through
    try:
        return setup.run(setting, progressed)
    finally:
        gc.enable()
