"""Runs a workload against a fleet that it starts, once per policy, or against an existing URL.

On a started fleet each run begins with empty caches and a new router.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loadtest.commands.child_processes import (
    ChildError,
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    mock_fleet,
    running_router,
)
from loadtest.commands.mock_engine_command import need_tokenizer
from loadtest.fleets.record import Record, Run, judged, run_of, table, warnings, write_record
from loadtest.fleets.report import write_report
from loadtest.html_page import PlotsUnavailable
from loadtest.simulator.outcome import cached_share
from loadtest.traffic.figures import percentile, ttfts_ms
from loadtest.traffic.load_driver import DriveResults, OnProgress, RequestResult
from router.config.load import shipped
from router.config.policy_files import find_policy, load_policies
from router.errors import ConfigError

REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RECENT = 200
"""Number of requests in the displayed figures."""


@dataclass(slots=True)
class RunProgress:
    done: int = 0
    errors: int = 0
    recent: deque[RequestResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, result: RequestResult) -> None:
        self.done += 1
        self.errors += bool(result.error)
        self.recent.append(result)

    def __str__(self) -> str:
        parts = []
        if times_ms := ttfts_ms(self.recent):
            late_ms = percentile([result.late_s * 1000 for result in self.recent], 0.99)
            parts += [
                f"last {len(self.recent)}: cached {cached_share(self.recent):.1%}",
                f"TTFT {percentile(times_ms, 0.5):.0f} ms",
                f"p99 {percentile(times_ms, 0.99):.0f}",
                f"client late {late_ms:.1f}",
            ]
        if self.errors:
            parts.append(f"{self.errors} errors")
        return ", ".join(parts)


@asynccontextmanager
async def show_progress(console: Console, label: str, planned: int) -> AsyncIterator[OnProgress]:
    """Display the results passed to the yielded callback: a bar on a terminal, otherwise a line every few seconds.

    The display refreshes at an interval and not per request, so that it does not slow the run.
    """
    seen = RunProgress()
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=planned, so_far="")

        def draw() -> None:
            progress.update(bar, completed=seen.done, so_far=str(seen), refresh=True)

        def print_line() -> None:
            parts = filter(None, (f"{label}: {seen.done} of {planned}", str(seen)))
            console.print(", ".join(parts), highlight=False, markup=False)

        show, every_s = (draw, REFRESH_S) if console.is_terminal else (print_line, LINE_EVERY_S)
        refreshing = asyncio.create_task(_repeat(show, every_s))
        try:
            yield seen
        finally:
            refreshing.cancel()
            show()


async def _repeat(show: Callable[[], None], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        show()


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


def command() -> str:
    """The command line, for the record."""
    return shlex.join(["python", *sys.argv])


def run_script(played: Callable[[Console], Awaitable[Record]], out: Path | None, report: Path | None) -> NoReturn:
    """Run a load test: print the table and warnings, write the files. Exit code 1 if a request failed."""
    console = Console()

    async def stopped_by_sigterm() -> Record:
        cancel_on_sigterm()
        return await played(console)

    try:
        record = uvloop.run(stopped_by_sigterm())
        if out is not None:
            write_record(out, record)
        console.print(table(record))
        for sentence in warnings(judged(record)):
            console.print(sentence, style="bold red", markup=False)
        if report is not None:
            write_report(report, [record])
    except (ChildError, ConfigError, PlotsUnavailable, ValueError) as error:
        raise SystemExit(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    raise SystemExit(any(row.error for run in record.runs for row in run.requests))


async def replayed(load: Workload, plan: FleetPlan, url: str, policies: str, console: Console) -> list[Run]:
    """Run traffic of our tokenizer under each policy, or against a URL."""
    need_tokenizer()
    if url:
        return await run_on_url([load], url, plan.model, console, ideal_known=True)
    return await run_on_fleet([load], policies.split(","), plan, console)


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
