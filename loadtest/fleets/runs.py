"""Runs a workload against a fleet that it starts, once per policy, or against an existing URL.

On a started fleet each run begins with empty caches and a new router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console

from loadtest.commands.child_processes import ChildError, FleetPlan, clear_caches, mock_fleet, running_router
from loadtest.fleets.record import Run, run_of
from loadtest.fleets.run_progress import show_progress
from loadtest.traffic.load_driver import DriveResults, OnProgress
from router.config.load import shipped
from router.config.policy_files import find_policy, load_policies

AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True)
class Workload:
    """`planned` requests at a rate. `play(url, model, on_progress)` sends them once; `ideal` returns the tokens that an
    infinite cache would have saved, which may take seconds."""

    rate_per_s: float
    planned: int
    play: Callable[[str, str, OnProgress], Awaitable[DriveResults]]
    ideal: Callable[[DriveResults], int]


async def run_on_fleet(
    loads: Sequence[Workload], policies: Sequence[str], plan: FleetPlan, console: Console
) -> list[Run]:
    """Run each workload under each policy. Raises `ConfigError` or `ChildError`."""
    known = load_policies(shipped("policies"))
    for policy in policies:
        find_policy(known, policy)
    names = [f"pod-{n}" for n in range(plan.pods)]
    runs = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-load-")))
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        for load in loads:
            for policy in policies:
                await clear_caches(pods)
                async with running_router(policy, pods, plan, folder) as router:
                    results = await _play(load, router.public, plan.model, policy, console)
                ideal = await asyncio.to_thread(load.ideal, results)
                runs.append(run_of(policy, load.rate_per_s, load.planned, results, names, ideal))
    return runs


async def run_on_url(
    loads: Sequence[Workload], url: str, model: str, console: Console, *, ideal_known: bool
) -> list[Run]:
    """Run each workload against a URL. `ideal_known` requires that the model uses our tokenizer."""
    runs = []
    for load in loads:
        results = await _play(load, url, model, AS_IT_IS, console)
        ideal = await asyncio.to_thread(load.ideal, results) if ideal_known else None
        runs.append(run_of(AS_IT_IS, load.rate_per_s, load.planned, results, [], ideal))
    return runs


async def first_model(url: str) -> str:
    """The first model of a server. Raises `ChildError` without one."""
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
            return str(models[0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ChildError(f"{url}/v1/models has no model ({error!r}); set --model") from error


async def _play(load: Workload, url: str, model: str, name: str, console: Console) -> DriveResults:
    async with show_progress(console, f"{name}, {load.rate_per_s:g}/s", load.planned) as on_progress:
        return await load.play(url, model, on_progress)
