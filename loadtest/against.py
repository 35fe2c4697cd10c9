"""Against what is a load played: a fleet that we start, under one policy after the other, or a URL that is there?

Own fleets begin each run with empty caches and a new router; a foreign one stays as it is. This file never decides what
is played and never judges it.
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

from loadtest.progress import OnProgress, shown
from loadtest.record import Run, run_of
from router.cli.child_processes import FleetPlan, StageError, clear_caches, mock_fleet, running_router
from router.cli.load_driver import DriveResults
from router.config.policies import choose_policy, load_policies
from router.config.shipped import shipped

AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True)
class Load:
    """What is played: `planned` requests at a rate. `play(url, model, on_progress)` plays it once; `ideal` says what an
    infinite cache would have saved of its results, which may take seconds."""

    rate_per_s: float
    planned: int
    play: Callable[[str, str, OnProgress], Awaitable[DriveResults]]
    ideal: Callable[[DriveResults], int]


async def against_fleet(loads: Sequence[Load], policies: Sequence[str], plan: FleetPlan, console: Console) -> list[Run]:
    """Each load under each policy. Raises `ConfigError` for an unknown policy, `StageError` if something dies."""
    known = load_policies(shipped("policies"))
    for policy in policies:
        choose_policy(known, policy)
    names = [f"pod-{n}" for n in range(plan.pods)]
    runs = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-load-")))
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        for load in loads:
            for policy in policies:
                await clear_caches(pods)
                async with running_router(policy, pods, plan, folder) as url:
                    results = await _played(load, url, plan.model, policy, console)
                ideal = await asyncio.to_thread(load.ideal, results)
                runs.append(run_of(policy, load.rate_per_s, load.planned, results, names, ideal))
    return runs


async def against_url(loads: Sequence[Load], url: str, model: str, console: Console, *, ideal_known: bool) -> list[Run]:
    """Each load as it is routed there; `ideal_known` where that model's tokenizer is ours."""
    runs = []
    for load in loads:
        results = await _played(load, url, model, AS_IT_IS, console)
        ideal = await asyncio.to_thread(load.ideal, results) if ideal_known else None
        runs.append(run_of(AS_IT_IS, load.rate_per_s, load.planned, results, [], ideal))
    return runs


async def first_model(url: str) -> str:
    """What is served there. Raises `StageError` if nothing answers or nothing is served."""
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
            return str(models[0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise StageError(f"{url}/v1/models names no model ({error!r}); say --model") from error


async def _played(load: Load, url: str, model: str, name: str, console: Console) -> DriveResults:
    async with shown(console, f"{name}, {load.rate_per_s:g}/s", load.planned) as on_progress:
        return await load.play(url, model, on_progress)
