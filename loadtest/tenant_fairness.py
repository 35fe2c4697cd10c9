"""Does a tenant that sends 20 times its share delay another one's requests, over HTTP?

    python loadtest/tenant_fairness.py

Two tenants of equal weight with keys of their own, a router with a queue, mock engines. Each round runs the quiet
tenant alone and with the noisy one, on cleared caches, with the same requests of the quiet one. Prints ratios: the
machine's own load is in both. The first quarter of each run is not counted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from router.cli.child_processes import (
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    configured_router,
    mock_fleet,
    router_config,
    temporary_folder,
)
from router.cli.load_driver import Exchange, RequestResult, StreamedResponse, drive
from router.config.load import shipped
from router.config.priors import load_priors, prior_speed
from router.config.schema import CostPrior
from router.proxy.upstream import UpstreamPool
from router.sim.chat_workload import ChatSession, SessionShape, Shared, mixed_sessions, poisson
from router.sim.virtual.outcome import cached_share

QUIET, NOISY = "quiet", "noisy"
KEYS: Mapping[str, str] = {name: f"sk-wr-key-of-the-{name}-tenant" for name in (QUIET, NOISY)}
MANY_TIMES = 20.0
SHAPE = SessionShape(
    share=1, shared=Shared(texts=8, words=(1000, 3000)), first_words=(200, 2000), answer_tokens=(20, 80)
)
COLUMNS = ("round", "the noisy tenant sends", "quiet: requests", "TTFT p50", "p99", "cached", "refused")


def sessions_of(name: str, per_s: float, duration_s: float, seed: int) -> list[ChatSession]:
    """Requests of one tenant: prompts with shared beginnings, one turn each."""
    random = Random(f"{name} {seed}")
    return mixed_sessions(random, {name: SHAPE}, poisson(random, duration_s, per_s))


def with_key(key: str) -> Exchange:
    """Send with this API key."""
    line = b"content-type: application/json\r\n"

    def exchange(pool: UpstreamPool, message: bytes, _pause_s: float) -> Awaitable[StreamedResponse]:
        return pool.exchange(message.replace(line, b"%bauthorization: Bearer %b\r\n" % (line, key.encode()), 1))

    return exchange


def config_of(plan: FleetPlan, pods: Sequence[str], tenants: Path) -> dict[str, Any]:
    """A router that knows the speed of its pods, with the default SLO and longest wait at their time scale."""
    config = router_config(pods, plan)
    prior = prior_speed(
        load_priors(shipped("config") / "models"), CostPrior(model=plan.speed_model, hardware=plan.speed_hardware)
    )
    for pod in config["pods"]:
        pod["speed"] = {name: value * plan.time_scale for name, value in asdict(prior).items()}
    slo = {"ttft_ms": 2000.0 * plan.time_scale, "tpot_ms": 100.0 * plan.time_scale}
    admission = {"slo": slo, "max_wait_ms": 1200.0 * plan.time_scale}
    entries = (f"- {{name: {name}, keys: [{sha256(key.encode()).hexdigest()}]}}\n" for name, key in KEYS.items())
    tenants.write_text("tenants:\n" + "".join(entries))
    return config | {"log": {"requests": False}, "tenants": str(tenants), "admission": admission}


async def run_once(
    url: str, model: str, rates: Mapping[str, float], duration_s: float, seed: int
) -> list[RequestResult]:
    """All requests that were due after the first quarter."""
    drives = (
        drive(url, model, sessions_of(name, per_s, duration_s, seed), exchange=with_key(KEYS[name]))
        for name, per_s in rates.items()
        if per_s
    )
    results = await asyncio.gather(*drives)
    return [one for result in results for one in result.served if one.due_s >= duration_s / 4]


def compare(number: int, alone: Sequence[RequestResult], both: Sequence[RequestResult], duration_s: float) -> str:
    """Two lines of the table, and what the noisy tenant got. Raises `RuntimeError` if a request failed."""
    quiet = [[one for one in run if one.kind == QUIET] for run in (alone, both)]
    rows = []
    for times, run in zip((0.0, MANY_TIMES), quiet, strict=True):
        base, served = (_served(one) for one in (quiet[0], run))
        p50, p99 = (_ttft_s(served, percent) / _ttft_s(base, percent) for percent in (50, 99))
        hits = cached_share(served) / cached_share(base)
        refused = 1 - len(served) / len(run)
        cells = (
            number,
            f"{times:g} times its share",
            len(run),
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{hits:.3f}",
            f"{refused:.1%}",
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    noisy = [one for one in both if one.kind == NOISY]
    per_s = len(_served(both)) / (0.75 * duration_s)
    late_s = max(one.late_s for one in both)
    rest = f"noisy: {len(noisy)} requests, {1 - len(_served(noisy)) / len(noisy):.0%} refused; "
    return "\n".join(rows) + f"\n{rest}served {per_s:.1f} a second in all; the driver was at most {late_s:.2f} s late"


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
                runs = []
                for times in (0.0, MANY_TIMES):
                    await clear_caches(pods)
                    rates = {QUIET: share_per_s / 2, NOISY: share_per_s * times}
                    async with configured_router(f"router-{number}-{times:g}", config, folder) as router:
                        runs.append(await run_once(router.public, plan.model, rates, duration_s, number))
                print(compare(number, runs[0], runs[1], duration_s), flush=True)


def main(
    pods: Annotated[int, typer.Option(min=1, help="Number of mock engines.")] = 4,
    slower: Annotated[float, typer.Option(help="Factor on the engines' times.")] = 4.0,
    share_per_s: Annotated[float, typer.Option(help="Half of the requests that the fleet serves in a second.")] = 4.0,
    duration_s: Annotated[float, typer.Option(help="Of each run.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 2,
) -> None:
    """Print one table."""
    asyncio.run(_all(FleetPlan(pods=pods, num_blocks=16_384, time_scale=slower), share_per_s, duration_s, rounds))


if __name__ == "__main__":
    typer.run(main)
