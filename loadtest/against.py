"""Against what is a load played: a fleet that we start, under one policy after the other, or a URL that is there?

Own fleets begin each run with empty caches and a new router; a foreign one stays as it is. This file never decides what
is played and never judges it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loadtest.record import Run, run_of
from router.cli.child_processes import FleetPlan, StageError, clear_caches, mock_fleet, running_router
from router.cli.figures import percentile, ttfts_ms
from router.cli.load_driver import DriveResults, RequestResult
from router.config.policies import choose_policy, load_policies
from router.config.shipped import shipped

AS_IT_IS = "as it is"
OnProgress: TypeAlias = Callable[[RequestResult], None]
REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RECENT = 200
"""The figures shown are of so many requests."""


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


# --- progress ---


@dataclass(slots=True)
class Seen:
    """What is done so far."""

    done: int = 0
    errors: int = 0
    recent: deque[RequestResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, one: RequestResult) -> None:
        """One more."""
        self.done += 1
        self.errors += bool(one.error)
        self.recent.append(one)

    def __str__(self) -> str:
        times_ms = ttfts_ms(self.recent)
        if not times_ms:
            return f"{self.errors} errors" if self.errors else ""
        late_ms = percentile([one.late_s * 1000 for one in self.recent], 0.99)
        failed = f", {self.errors} errors" if self.errors else ""
        return (
            f"TTFT {percentile(times_ms, 0.5):.0f} ms, p99 {percentile(times_ms, 0.99):.0f}, late {late_ms:.1f}{failed}"
        )


@asynccontextmanager
async def shown(console: Console, label: str, planned: int) -> AsyncIterator[OnProgress]:
    """While this is open, what the yielded function is told is shown."""
    seen = Seen()
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=planned, so_far="")

        def draw() -> None:
            progress.update(bar, completed=seen.done, so_far=str(seen), refresh=True)

        def say() -> None:
            console.print(f"{label}: {seen.done} of {planned}, {seen}", highlight=False, markup=False)

        show, every_s = (draw, REFRESH_S) if console.is_terminal else (say, LINE_EVERY_S)
        watching = asyncio.create_task(_again_and_again(show, every_s))
        try:
            yield seen
        finally:
            watching.cancel()
            show()


async def _again_and_again(show: Callable[[], None], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        show()
