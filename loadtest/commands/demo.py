"""`warmroute demo`: compares policies on mock engines, in a minute.

Runs a fleet of mock engines with the timing of a real model and the router with its in-memory index. Sends the same
realistic sessions under each policy and prints one table; or kills a pod in the middle of answers and counts those that
were cut. Needs nothing outside the installed package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loadtest.commands.child_processes import (
    ChildError,
    FleetPlan,
    RouterUrls,
    cancel_on_sigterm,
    clear_caches,
    configured_router,
    free_port,
    mock_fleet,
    router_config,
    running_router,
    temporary_folder,
)
from loadtest.commands.mock_engine_command import mock_tokenizer, need_tokenizer
from loadtest.traffic.chat_workload import ChatSession, sessions
from loadtest.traffic.figures import Figures, figures, ideal_cached_tokens, table
from loadtest.traffic.load_driver import DriveResults, LoadDriver, RequestResult, drive
from router.cli.options import flag
from router.config.load import shipped
from router.config.policy_files import find_policy, load_policies
from router.types import Endpoint

POLICIES = "round_robin,ring_bounded_load,cost_aware"
NUM_BLOCKS = 2560
"""KV per pod: 40,960 tokens. Small, so that eviction matters within seconds."""
SESSIONS_PER_POD_S = 5.5
STREAMS_PER_POD = 8
KILL_AT_S = 2.0
"""All answers have begun, and none has ended."""
PORT, ADMIN_PORT = 8080, 9480
"""Ports of the router that is kept, where they are free: those of `warmroute serve`, where other commands look."""
NUMBERS = 800
"""A prompt of as many has 1,600 tokens: its prefill decides, and not the hash of its first blocks."""


def demo_command(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds during which new sessions start, per policy.")] = 10.0,
    pods: Annotated[int, typer.Option(min=1, help="Number of mock engines.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 1,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare, in order, separated by commas.", show_default=POLICIES.replace(",", ", ")
        ),
    ] = POLICIES,
    keep: Annotated[bool, flag("--keep", "Keep fleet and router running afterwards, until Ctrl-C.")] = False,
    kill: Annotated[
        bool, flag("--kill", "Kill a pod in the middle of answers instead, and count those that were cut.")
    ] = False,
) -> None:
    """Run the demo. Exit code 1 if a request failed."""
    need_tokenizer()
    names = [name.strip() for name in policies.split(",")]
    known = load_policies(shipped("policies"))
    for name in names:
        find_policy(known, name)
    mix = sessions(seed, duration_s=seconds, sessions_per_s=SESSIONS_PER_POD_S * pods)
    plan = FleetPlan(pods=pods, num_blocks=NUM_BLOCKS)
    try:
        failed = uvloop.run(_kill_a_pod(plan) if kill else _run_demo(Console(), names, mix, plan, keep))
    except ChildError as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    raise typer.Exit(1 if failed else 0)


async def _run_demo(
    console: Console, policies: Sequence[str], mix: Sequence[ChatSession], plan: FleetPlan, keep: bool
) -> bool:
    cancel_on_sigterm()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-demo-"))
        _print_setup(console, mix, plan)
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        results = {}
        for policy in policies:  # each with a new router and empty caches
            await clear_caches(pods)
            async with running_router(policy, pods, plan, folder) as router:
                results[policy] = await _drive(console, policy, router, plan, mix)
        rows = await asyncio.to_thread(_figures, results, len(pods))
        console.print(
            table(rows, f"{rows[0].requests} requests, {len(pods)} pods, the same sessions under each policy")
        )
        _print_failures(console, results)
        if keep:
            await _keep(pods, plan, folder)
        return any(row.errors for row in rows)


async def _keep(pods: Sequence[str], plan: FleetPlan, folder: Path) -> None:
    port, admin_port = map(free_port, (PORT, ADMIN_PORT))
    async with configured_router("router-kept", router_config(pods, plan), folder, port, admin_port) as router:
        print(_usage_hint(router, plan.model), flush=True)  # unwrapped, so that the command can be pasted
        await asyncio.Event().wait()


async def _drive(
    console: Console, policy: str, router: RouterUrls, plan: FleetPlan, mix: Sequence[ChatSession]
) -> DriveResults:
    """Send the sessions, with a bar. It refreshes at an interval and not per request."""
    columns = TextColumn("{task.description:<17}"), BarColumn(12), MofNCompleteColumn()
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task(policy, total=sum(len(session.turns) for session in mix))
        return await drive(router.public, plan.model, mix, lambda _: progress.advance(bar))


async def _kill_a_pod(plan: FleetPlan) -> bool:
    """Whether an answer was cut, or is not the one that the same request gets when no pod dies."""
    cancel_on_sigterm()
    plan = replace(plan, continues=True)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-demo-"))
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        router = await stack.enter_async_context(running_router("cost_aware", pods, plan, folder))
        driver = stack.enter_context(closing(LoadDriver([router.public], lambda _: None)))

        def ask_all() -> asyncio.Future[list[RequestResult]]:
            asked = [
                {
                    "model": plan.model,
                    "messages": [{"role": "user", "content": f"Question {number}"}],
                    "max_tokens": 300,
                }
                for number in range(STREAMS_PER_POD * plan.pods)
            ]
            return asyncio.gather(*(driver.send(Endpoint.CHAT, body, "story") for body in asked))

        answers = ask_all()
        await driver.until(KILL_AT_S)
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{pods[0]}/_fault", json={"kind": "die"})
        broken, whole = await answers, await ask_all()
    cut = sum(bool(answer.error) for answer in broken)
    changed = sum(not one.error and one.text != other.text for one, other in zip(broken, whole, strict=True))
    killed = sum(answer.pod == "pod-0" for answer in broken)
    print(f"pod-0 died while it wrote {killed} of {len(broken)} answers: {cut} were cut, {changed} are other answers")
    return cut + changed > 0


def _figures(results: dict[str, DriveResults], pods: int) -> list[Figures]:
    """Figures per policy, relative to an infinite cache with the same requests in the same order."""
    tokenizer = mock_tokenizer()
    names = [f"pod-{n}" for n in range(pods)]
    return [
        figures(policy, result, ideal_cached_tokens(result.served, tokenizer), names)
        for policy, result in results.items()
    ]


def _print_setup(console: Console, mix: Sequence[ChatSession], plan: FleetPlan) -> None:
    kinds = [session.kind for session in mix]
    kinds_text = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(
        f"{plan.pods} mock engines with the speed of {plan.speed_model} on {plan.speed_hardware}, each with KV for "
        f"{plan.num_blocks * plan.block_size_tokens:,} tokens; {len(mix)} sessions ({kinds_text}).",
        highlight=False,
    )


def _print_failures(console: Console, results: dict[str, DriveResults]) -> None:
    for policy, result in results.items():
        for one in [one for one in result.served if one.error][:3]:
            console.print(f"{policy}: a {one.kind} request on {one.pod or 'no pod'} failed: {one.error}", markup=False)


def _usage_hint(router: RouterUrls, model: str) -> str:
    url = router.public
    return f"""
The router (cost_aware) listens on {url}. Ask it twice with 1,600 tokens, and for the reason of the second choice:

for turn in first second; do
  curl -sN {url}/v1/chat/completions -H 'content-type: application/json' -H "x-request-id: $turn" \\
    -d '{{"model": "{model}", "stream": true, "stream_options": {{"include_usage": true}}, "max_tokens": 20,
    "messages": [{{"role": "user", "content": "'"$(seq -s ' ' {NUMBERS})"'"}}]}}' | tail -n 3
done
warmroute explain second --url {router.admin}

Page: {router.admin}/ui   pods: {router.admin}/admin/pods   metrics: {router.admin}/metrics   Ctrl-C ends all of it."""
