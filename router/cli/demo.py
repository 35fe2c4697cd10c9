"""What does prefix-aware routing gain, to be seen in a minute?

    warmroute demo

A fleet of mock engines with the timing of a real model, the router with its in-memory index, one realistic mix of
sessions, sent again under each policy; then one table. Nothing outside the installed package is needed. This file only
directs: `stage` starts and stops, `drive` sends, `figures` counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from router.cli.child_processes import (
    FleetPlan,
    StageError,
    clear_caches,
    end_on_sigterm,
    free_port,
    mock_fleet,
    running_router,
)
from router.cli.figures import Figures, cached_share, figures, ideal_cached_tokens, percentile, table, ttfts_ms
from router.cli.load_driver import DriveResults, RequestResult, drive
from router.cli.mock_engine_command import mock_tokenizer, need_tokenizer
from router.config.policies import choose_policy, load_policies
from router.config.shipped import shipped
from router.sim.chat_workload import ChatSession, sessions

POLICIES = "round_robin,ring_bounded_load,cost_aware"
NUM_BLOCKS = 2560
"""KV of one pod: 40,960 tokens. Small, so that eviction matters within seconds."""
SESSIONS_PER_POD_S = 5.5
PORT = 8080


@dataclass(slots=True)
class Show:
    """What the viewer sees while it runs: bars on a terminal, a line a policy elsewhere."""

    console: Console
    progress: Progress
    total: int
    served: dict[TaskID, list[RequestResult]] = field(default_factory=dict)

    def begin(self, policy: str) -> TaskID:
        """Its router is being started."""
        if not self.console.is_terminal:
            self.console.print(f"{policy}: {self.total} requests ...")
        task = self.progress.add_task(policy, total=self.total, so_far="starting the router ...")
        self.served[task] = []
        return task

    def took(self, task: TaskID, one: RequestResult) -> None:
        """One more request is done."""
        served = self.served[task]
        served.append(one)
        self.progress.update(task, advance=1, so_far=_so_far(served))

    def end(self, policy: str, task: TaskID) -> None:
        """All of them are."""
        if not self.console.is_terminal:
            self.console.print(f"{policy}: {_so_far(self.served[task])}", highlight=False)


def demo_command(
    seconds: Annotated[float, typer.Option(min=1, help="How long new sessions arrive, for each policy.")] = 10.0,
    pods: Annotated[int, typer.Option(min=1, help="How many mock engines.")] = 4,
    seed: Annotated[int, typer.Option(help="Another seed, another mix.")] = 1,
    policies: Annotated[str, typer.Option(help="Which policies, in order.")] = POLICIES,
    keep: Annotated[bool, typer.Option("--keep", help="Leave fleet and router up afterwards, until Ctrl-C.")] = False,
) -> None:
    """Exit code 1 when a request failed."""
    need_tokenizer()
    names = [name.strip() for name in policies.split(",")]
    known = load_policies(shipped("policies"))
    for name in names:
        choose_policy(known, name)
    mix = sessions(seed, duration_s=seconds, sessions_per_s=SESSIONS_PER_POD_S * pods)
    try:
        failed = uvloop.run(_until_done(Console(), names, mix, FleetPlan(pods=pods, num_blocks=NUM_BLOCKS), keep))
    except StageError as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    raise typer.Exit(1 if failed else 0)


async def _until_done(
    console: Console, policies: Sequence[str], mix: Sequence[ChatSession], plan: FleetPlan, keep: bool
) -> bool:
    """True where a request failed."""
    end_on_sigterm()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-demo-")))
        _introduce(console, mix, plan)
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        results = await _compare(console, policies, mix, plan, pods, folder)
        rows = await asyncio.to_thread(_judge, results, len(pods))
        console.print(table(rows, f"{rows[0].requests} requests, {len(pods)} pods, the same mix under each policy"))
        _complain(console, results)
        if keep:
            url = await stack.enter_async_context(running_router("cost_aware", pods, plan, folder, free_port(PORT)))
            print(_invitation(url, plan.model), flush=True)  # as it is: a wrapped command cannot be pasted
            await asyncio.Event().wait()
        return any(row.errors for row in rows)


async def _compare(
    console: Console,
    policies: Sequence[str],
    mix: Sequence[ChatSession],
    plan: FleetPlan,
    pods: list[str],
    folder: Path,
) -> dict[str, DriveResults]:
    """The same mix under each policy: a fresh router and empty caches each time."""
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    results = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        show = Show(console, progress, sum(len(session.turns) for session in mix))
        for policy in policies:
            task = show.begin(policy)
            await clear_caches(pods)
            async with running_router(policy, pods, plan, folder) as url:
                results[policy] = await drive(url, plan.model, mix, partial(show.took, task))
            show.end(policy, task)
    return results


def _judge(results: dict[str, DriveResults], pods: int) -> list[Figures]:
    """Figures of each policy, against an infinite cache that is asked the same in the same order."""
    tokenizer = mock_tokenizer()
    names = [f"pod-{n}" for n in range(pods)]
    return [
        figures(policy, result, ideal_cached_tokens(result.served, tokenizer), names)
        for policy, result in results.items()
    ]


def _so_far(served: Sequence[RequestResult]) -> str:
    ttft_ms = ttfts_ms(served)
    return (
        f"cached {cached_share(served):5.1%}, "
        f"TTFT {percentile(ttft_ms, 0.5):3.0f} ms, p99 {percentile(ttft_ms, 0.99):3.0f}"
    )


def _introduce(console: Console, mix: Sequence[ChatSession], plan: FleetPlan) -> None:
    kinds = [session.kind for session in mix]
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(
        f"{plan.pods} mock engines, as fast as {plan.speed_model} on {plan.speed_hardware}, each with KV for "
        f"{plan.num_blocks * plan.block_size_tokens:,} tokens; {len(mix)} sessions ({told}).",
        highlight=False,
    )


def _complain(console: Console, results: dict[str, DriveResults]) -> None:
    """The first few failures by name; the table only counts them."""
    for policy, result in results.items():
        for one in [one for one in result.served if one.error][:3]:
            console.print(f"{policy}: a {one.kind} request on {one.pod or 'no pod'} failed: {one.error}", markup=False)


def _invitation(url: str, model: str) -> str:
    return f"""
The router (cost_aware) listens on {url}. Ask it twice and look at the header x-warmroute-cached-tokens:

curl -i {url}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "max_tokens": 20, "messages": [{{"role": "user",
       "content": "Which pod holds my prefix? A block is 16 tokens; this question is long enough to fill one."}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello there."}}])
print(answer.choices[0].message.content, answer.usage)

Pods: {url}/admin/pods   metrics: {url}/metrics   Ctrl-C ends all of it."""
