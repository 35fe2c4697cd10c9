"""Measures how well a router predicts TTFT when its coefficients are wrong at first.

    python -m loadtest.fleets.calibration [--slower 4] [--sessions-per-s 2] [--duration-s 120] [--factors 1,3,0.333]

Runs a fleet of mock engines and routers whose speed coefficients are wrong by each factor, with the demo's sessions as
load. Prints the mean absolute error of the predicted TTFT per window of requests, from the receipts: of single requests
and of their sum. Factor 1 shows the error with exact coefficients. Engines, router and clients share one machine, so
the engines are `slower` than their hardware: otherwise waiting for a CPU core would dominate the times.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.commands.child_processes import (
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    configured_router,
    mock_fleet,
    priced_config,
)
from loadtest.traffic.chat_workload import sessions
from loadtest.traffic.load_driver import drive
from router.cli.receipt_files import receipts_of
from router.observe.receipts import Receipt

WINDOWS = ((0, 50), (50, 200), (200, 10**9))


def main(
    slower: Annotated[float, typer.Option(help="Factor on the engines' times.")] = 4.0,
    sessions_per_s: Annotated[float, typer.Option()] = 2.0,
    duration_s: Annotated[float, typer.Option()] = 120.0,
    factors: Annotated[str, typer.Option(help="Factors on the true coefficients.")] = "1,3,0.333",
    seed: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print one table."""
    plan = FleetPlan(pods=4, num_blocks=4096, time_scale=slower)
    asyncio.run(_all(plan, [float(one) for one in factors.split(",")], sessions_per_s, duration_s, seed))


async def _all(plan: FleetPlan, factors: list[float], sessions_per_s: float, duration_s: float, seed: int) -> None:
    cancel_on_sigterm()
    table = Table("prior", "requests", "error per request", "error of the sum", title="Expected time to first token")
    with TemporaryDirectory(prefix="warmroute-calibration-") as name:
        async with mock_fleet(plan, Path(name)) as pods:
            for factor in factors:
                await clear_caches(pods)
                receipts = await _run(plan, factor, pods, Path(name), sessions_per_s, duration_s, seed)
                for first, end in WINDOWS:
                    _add(table, f"x{factor:g}", receipts[first:end], first)
    Console().print(table)


async def _run(
    plan: FleetPlan, factor: float, pods: list[str], folder: Path, sessions_per_s: float, duration_s: float, seed: int
) -> list[Receipt]:
    """Receipts of one router whose coefficients are wrong by `factor`."""
    file = folder / f"receipts-{factor:g}.jsonl"
    config = priced_config(pods, plan, factor) | {"receipts": str(file)}
    async with configured_router(f"router-{factor:g}", config, folder) as router:
        await drive(router.public, plan.model, sessions(seed, duration_s=duration_s, sessions_per_s=sessions_per_s))
    receipts = receipts_of(file)
    return [one for one in receipts if one.result == "ok" and one.ttft_ms is not None]


def _add(table: Table, prior: str, receipts: list[Receipt], first: int) -> None:
    times = [(one.predicted_ms, one.ttft_ms) for one in receipts if one.predicted_ms is not None and one.ttft_ms]
    if not times:
        return
    of_one = statistics.fmean(abs(expected - actual) / actual for expected, actual in times)
    of_sum = sum(abs(expected - actual) for expected, actual in times) / sum(actual for _, actual in times)
    table.add_row(prior, f"{first + 1} to {first + len(receipts)}", f"{of_one:.1%}", f"{of_sum:.1%}")


if __name__ == "__main__":
    typer.run(main)
