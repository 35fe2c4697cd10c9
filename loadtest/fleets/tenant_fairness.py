"""Does a tenant that sends 20 times its share delay another one's requests, over HTTP?

    python -m loadtest.fleets.tenant_fairness

Two tenants of equal weight with keys of their own, a router with a queue, mock engines. Each round runs the quiet
tenant alone, with the noisy one at its share, and at 20 times its share, on cleared caches, with the same requests of
the quiet one. Prints ratios: the machine's own load is in all of them. The first quarter of each run is not counted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from loadtest.commands.child_processes import (
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    configured_router,
    mock_fleet,
    priced_config,
    temporary_folder,
)
from loadtest.simulator.outcome import cached_share
from loadtest.traffic.chat_workload import ChatSession, SessionShape, Shared, mixed_sessions, poisson
from loadtest.traffic.load_driver import RequestResult, drive, with_header

QUIET, NOISY = "quiet", "noisy"
KEYS: Mapping[str, str] = {name: f"sk-wr-key-of-the-{name}-tenant" for name in (QUIET, NOISY)}
MANY_TIMES = 20.0
SHAPE = SessionShape(
    share=1, shared=Shared(texts=8, words=(1000, 3000)), first_words=(200, 2000), answer_tokens=(20, 80)
)
TIMES = (0.0, 1.0, MANY_TIMES)
COLUMNS = (
    "round",
    "the noisy tenant sends",
    "quiet: requests",
    "TTFT p50",
    "p99",
    "p99 by that at its share",
    "cached",
    "refused",
    "noisy: refused",
    "all served /s",
    "driver late s: p99",
    "most",
    "load average",
)


def sessions_of(name: str, per_s: float, duration_s: float, seed: int) -> list[ChatSession]:
    """Requests of one tenant: prompts with shared beginnings, one turn each."""
    random = Random(f"{name} {seed}")
    return mixed_sessions(random, {name: SHAPE}, poisson(random, duration_s, per_s))


def config_of(plan: FleetPlan, pods: Sequence[str], tenants: Path) -> dict[str, Any]:
    """A router that knows the speed of its pods, with the default SLO and longest wait at their time scale."""
    config = priced_config(pods, plan)
    slo = {"ttft_ms": 2000.0 * plan.time_scale, "tpot_ms": 100.0 * plan.time_scale, "idle_prefills": 3.0}
    for model in config["models"]:
        model["slo"] = slo
    admission = {"max_wait_ms": 1200.0 * plan.time_scale}
    entries = (f"- {{name: {name}, keys: [{sha256(key.encode()).hexdigest()}]}}\n" for name, key in KEYS.items())
    tenants.write_text("tenants:\n" + "".join(entries))
    return config | {"log": {"requests": False}, "tenants": str(tenants), "admission": admission}


async def run_once(
    url: str, model: str, rates: Mapping[str, float], duration_s: float, seed: int
) -> list[RequestResult]:
    """All requests that were due after the first quarter."""
    keys = {name: with_header(f"authorization: Bearer {key}") for name, key in KEYS.items()}
    drives = (
        drive(url, model, sessions_of(name, per_s, duration_s, seed), exchange=keys[name])
        for name, per_s in rates.items()
        if per_s
    )
    results = await asyncio.gather(*drives)
    return [one for result in results for one in result.served if one.due_s >= duration_s / 4]


def compare(number: int, runs: Sequence[Sequence[RequestResult]], duration_s: float, loads: Sequence[float]) -> str:
    """The lines of one round, of the runs of `TIMES`. `loads`: average number of runnable processes after each run.

    Raises `RuntimeError` if a request failed."""
    alone, at_share = (_served(_of(runs[at], QUIET)) for at in (0, 1))
    rows = []
    for times, run, load in zip(TIMES, runs, loads, strict=True):
        quiet, noisy = _of(run, QUIET), _of(run, NOISY)
        served = _served(quiet)
        late_s = [one.late_s for one in run]
        cells = (
            number,
            f"{times:g} times its share",
            len(quiet),
            f"{_ttft_s(served, 50) / _ttft_s(alone, 50):.2f}",
            f"{_ttft_s(served, 99) / _ttft_s(alone, 99):.2f}",
            f"{_ttft_s(served, 99) / _ttft_s(at_share, 99):.2f}",
            f"{cached_share(served) / cached_share(alone):.3f}",
            f"{1 - len(served) / len(quiet):.1%}",
            f"{1 - len(_served(noisy)) / max(len(noisy), 1):.1%}" if noisy else "",
            f"{len(_served(run)) / (0.75 * duration_s):.1f}",
            f"{np.percentile(late_s, 99):.3f}",
            f"{max(late_s):.2f}",
            f"{load:.1f}",
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _of(run: Sequence[RequestResult], tenant: str) -> list[RequestResult]:
    return [one for one in run if one.kind == tenant]


def _ttft_s(served: Sequence[RequestResult], percent: float) -> float:
    return float(np.percentile([one.ttft_s or 0.0 for one in served], percent))


def _served(run: Sequence[RequestResult]) -> list[RequestResult]:
    failed = [one for one in run if one.error and one.status not in (429, 503)]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, such as: {failed[0].error}")
    return [one for one in run if not one.error]


async def _all(plan: FleetPlan, share_per_s: float, duration_s: float, rounds: int) -> None:
    cancel_on_sigterm()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with temporary_folder("warmroute-fairness-") as folder:
        async with mock_fleet(plan, folder) as pods:
            config = config_of(plan, pods, folder / "tenants.yaml")
            for number in range(1, rounds + 1):
                runs, loads = [], []
                for times in TIMES:
                    await clear_caches(pods)
                    rates = {QUIET: share_per_s / 2, NOISY: share_per_s * times}
                    async with configured_router(f"router-{number}-{times:g}", config, folder) as router:
                        runs.append(await run_once(router.public, plan.model, rates, duration_s, number))
                    loads.append(os.getloadavg()[0])
                print(compare(number, runs, duration_s, loads), flush=True)


def main(
    pods: Annotated[int, typer.Option(min=1, help="Number of mock engines.")] = 4,
    slower: Annotated[float, typer.Option(help="Factor on the engines' times.")] = 4.0,
    share_per_s: Annotated[float, typer.Option(help="Half of the requests that the fleet serves in a second.")] = 4.0,
    duration_s: Annotated[float, typer.Option(help="Of each run.")] = 280.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of three runs each.")] = 2,
) -> None:
    """Print one table."""
    asyncio.run(_all(FleetPlan(pods=pods, num_blocks=16_384, time_scale=slower), share_per_s, duration_s, rounds))


if __name__ == "__main__":
    typer.run(main)
