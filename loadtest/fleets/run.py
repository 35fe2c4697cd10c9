"""Runs a load test scenario.

    python -m loadtest.fleets.run                                    # list the scenarios
    python -m loadtest.fleets.run mixed                              # mock engines, three policies, one table
    python -m loadtest.fleets.run mixed --rate 10,20,30 --report mixed.html
    python -m loadtest.fleets.run mixed --url http://router:8080     # an existing router

Open loop: sessions start when they are due, and every time counts from when a request was due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.commands.mock_engine_command import mock_tokenizer, need_tokenizer
from loadtest.fleets.record import Record, Run, record_of
from loadtest.fleets.runs import Workload, command, first_model, run_on_fleet, run_on_url, run_script
from loadtest.fleets.scenario import Scenario, load_scenario, ours
from loadtest.fleets.slow_client import exchange_at_pace
from loadtest.html_page import OutOption, ReportOption
from loadtest.traffic.chat_workload import ChatSession
from loadtest.traffic.figures import ideal_cached_tokens
from loadtest.traffic.load_driver import DriveResults, OnProgress, drive

POLICIES = "round_robin,ring_bounded_load,cost_aware"


def workload_of(scenario: Scenario) -> Workload:
    """The scenario as a workload."""
    mix = scenario.drawn()

    async def play(url: str, model: str, on_progress: OnProgress) -> DriveResults:
        return await drive(url, model, mix, on_progress, exchange_at_pace)

    return Workload(scenario.arrivals.per_s, _requests(mix), play, _ideal)


def main(
    scenario: Annotated[
        str, typer.Argument(help="Name of a scenario, or a file; without it, scenarios are listed.")
    ] = "",
    url: Annotated[str, typer.Option(help="A router or any OpenAI-compatible server; default: start a fleet.")] = "",
    model: Annotated[str, typer.Option(help="Model of --url; default: its first.")] = "",
    pods: Annotated[int | None, typer.Option(min=1, help="Number of mock engines; default: the scenario's.")] = None,
    policies: Annotated[str, typer.Option(help="Policies to compare, without --url.")] = POLICIES,
    rate: Annotated[str, typer.Option(help="Sessions per second, one or several: 10,20,30.")] = "",
    duration_s: Annotated[float | None, typer.Option(min=0.1, help="Seconds during which new sessions start.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sessions.")] = None,
    out: OutOption = None,
    report: ReportOption = None,
) -> None:
    """Run a scenario. Exit code 1 if a request failed."""
    if not scenario:
        Console().print(_listed())
        return

    async def played(console: Console) -> Record:
        chosen = load_scenario(scenario).at(duration_s=duration_s, seed=seed)
        rates = [float(one) for one in rate.split(",")] if rate else [chosen.arrivals.per_s]
        runs = await _play(chosen, rates, url, model, pods, policies.split(","), console)
        settings = {"rates": rates, "duration_s": chosen.duration_s, "seed": chosen.seed, "url": url}
        return record_of(chosen.name, chosen.about, command(), settings, chosen.good(), runs)

    run_script(played, out, report)


async def _play(
    scenario: Scenario,
    rates: Sequence[float],
    url: str,
    model: str,
    pods: int | None,
    policies: Sequence[str],
    console: Console,
) -> list[Run]:
    if url:
        # An existing fleet keeps its caches, so each rate needs other sessions.
        seeds = range(scenario.seed, scenario.seed + len(rates))
        loads = [workload_of(scenario.at(rate_per_s=rate, seed=seed)) for rate, seed in zip(rates, seeds, strict=True)]
        return await run_on_url(loads, url, model or await first_model(url), console, ideal_known=False)
    need_tokenizer()
    loads = [workload_of(scenario.at(rate_per_s=rate)) for rate in rates]
    return await run_on_fleet(loads, policies, scenario.plan(pods), console)


def _ideal(results: DriveResults) -> int:
    return ideal_cached_tokens(results.served, mock_tokenizer())


def _requests(mix: Sequence[ChatSession]) -> int:
    return sum(len(session.turns) for session in mix)


def _listed() -> Table:
    shown = Table("scenario", "sessions/s", "for s", "requests", "what", box=None)
    for name in ours():
        scenario = load_scenario(name)
        requests = _requests(scenario.drawn())
        shown.add_row(name, f"{scenario.arrivals.per_s:g}", f"{scenario.duration_s:g}", str(requests), scenario.about)
    return shown


if __name__ == "__main__":
    typer.run(main)
