"""Compares our routing with other routers.

    python loadtest/peers/compare.py --install          # once
    python loadtest/peers/compare.py --rounds 3 --out loadtest/results/peers.json

One fleet of mock engines. Each round runs each router with empty caches and exactly the same traffic; the order rotates
from round to round.
"""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvloop
from rich.console import Console

from router.cli.options import writable

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.commands.child_processes import (
    Child,
    ChildError,
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    free_port,
    mock_fleet,
)
from loadtest.commands.mock_engine_command import need_tokenizer
from loadtest.peers.catalog import PEERS, LaunchPlan, Pod
from loadtest.peers.environments import NotInstalled, install, program, version
from loadtest.peers.figures import PodTokens, Round, cached_share, imbalance, markdown, table
from loadtest.peers.processes import launch, process_usage
from loadtest.peers.traffic import Traffic, TrafficOfRound, agent_traffic_of, session_traffic, trace_traffic
from loadtest.traffic.figures import percentile, ttfts_ms
from router.errors import ConfigError

DEFAULT_PEERS = ",".join(name for name in PEERS if name != "litellm")
"""litellm would use one of two cores and distort the engines' timing."""
MIB = 1024 * 1024


def main(
    install_peers: Annotated[bool, typer.Option("--install", help="Install the peers and exit.")] = False,
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = DEFAULT_PEERS,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    pods: Annotated[int, typer.Option(min=1)] = 4,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of 16 tokens per pod.")] = 2560,
    sessions_per_s: Annotated[float, typer.Option(min=0.1, help="Sessions per second, to all pods.")] = 22.0,
    duration_s: Annotated[float, typer.Option(min=1, help="Seconds during which new sessions start, per run.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Seed of the first round; each round has other sessions.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(exists=True, help="Replay this Mooncake trace instead of sessions.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 300,
    agents: Annotated[Path | None, typer.Option(exists=True, help="Play these coding agents instead.")] = None,
    load: Annotated[float, typer.Option(min=0.01, help="Factor on the starts of the agents' sessions.")] = 1.0,
    speedup: Annotated[float, typer.Option(min=0.01, help="Factor on the trace's arrival rate.")] = 2.0,
    out: Annotated[
        Path | None, typer.Option(help="Write the results as JSON here, and a table as Markdown.", callback=writable)
    ] = None,
) -> None:
    """Compare routers. Exit code 1 if a request failed."""
    if install_peers:
        install()
        return
    names = [name.strip() for name in peers.split(",")]
    plan = FleetPlan(pods=pods, num_blocks=num_blocks)
    try:
        need_tokenizer()
        _check(names)
        context = about(names)
        if trace is not None:
            traffic = trace_traffic(trace, requests, speedup, plan.model)
        elif agents is not None:
            traffic = agent_traffic_of(agents, load, duration_s, seed, plan)
        else:
            traffic = session_traffic(seed, duration_s, sessions_per_s, plan.model)
        found = uvloop.run(compare(names, rounds, plan, traffic))
    except (ChildError, ConfigError, NotInstalled) as error:
        raise SystemExit(f"compare: {error}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    Console().print(table(found, f"{rounds} rounds, {pods} pods, the same traffic through each router"))
    if out is not None:
        write(out, context, found)
    raise SystemExit(1 if any(one.errors for of_one in found.values() for one in of_one) else 0)


def _check(names: Sequence[str]) -> None:
    """Check the names and programs."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"unknown peer: {', '.join(unknown)}; known: {', '.join(PEERS)}")
    for name in names:
        if environment := PEERS[name].environment:
            program(environment)


async def compare(
    names: Sequence[str], rounds: int, plan: FleetPlan, traffic: TrafficOfRound
) -> dict[str, list[Round]]:
    """Rounds by router. Raises `ChildError` if a process fails."""
    cancel_on_sigterm()
    found: dict[str, list[Round]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-peers-")))
        pods = [await _pod(url) for url in await stack.enter_async_context(mock_fleet(plan, folder))]
        for number in range(rounds):
            same = traffic(number)
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                place = LaunchPlan(free_port(), pods, plan, folder / f"{number}-{name}")
                one = await play_round(name, place, same)
                found[name].append(one)
                print(_line(number, name, one), file=sys.stderr)
    return found


async def play_round(name: str, place: LaunchPlan, traffic: Traffic) -> Round:
    """Start one router, run the traffic, stop it."""
    place.folder.mkdir()
    await clear_caches(place.urls)
    async with running(name, place) as (url, router):
        tokens_before, used_before = await _tokens(place.urls), process_usage(router.process.pid)
        results = await traffic.play(url)
        used_after, tokens_after = process_usage(router.process.pid), await _tokens(place.urls)
        router.check_alive()
    pods = [after.since(before) for after, before in zip(tokens_after, tokens_before, strict=True)]
    good = [one for one in results.served if not one.error]
    for one in [one for one in results.served if one.error][:3]:
        print(f"{name}: a {one.kind} request failed: {one.error}", file=sys.stderr)
    ideal_tokens = await asyncio.to_thread(traffic.ideal_cached_tokens, results)
    return Round(
        requests=len(results.served),
        errors=len(results.served) - len(good),
        cached_share=cached_share(pods),
        ideal_share=ideal_tokens / max(sum(pod.prompt for pod in pods), 1),
        ttft_mean_ms=fmean(ttfts_ms(good)) if good else nan,
        ttft_p50_ms=percentile(ttfts_ms(good), 0.50),
        ttft_p99_ms=percentile(ttfts_ms(good), 0.99),
        imbalance=imbalance(pods),
        cpu_ms_per_request=(used_after.cpu_s - used_before.cpu_s) * 1000 / max(len(results.served), 1),
        rss_mib=used_after.rss_bytes / MIB,
        sticky_share=traffic.sticky_share(),
    )


@asynccontextmanager
async def running(name: str, place: LaunchPlan) -> AsyncIterator[tuple[str, Child]]:
    """Start a router; yields its URL and process once it has all pods and has responded once."""
    peer = PEERS[name]
    url = f"http://127.0.0.1:{place.port}"
    with launch(name, peer.command(place), place.folder, peer.variables) as router:
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as client,
            httpx.AsyncClient(base_url=peer.status_url(place), trust_env=False, timeout=30.0) as status,
        ):

            async def ready() -> bool | None:
                try:
                    return await peer.ready(status, len(place.pods)) or None
                except httpx.TransportError:
                    return None

            async def answered() -> bool | None:
                hello = {"role": "user", "content": "Hello"}
                asked = {"model": place.plan.model, "messages": [hello], "max_tokens": 1}
                return (await client.post("/v1/chat/completions", json=asked)).status_code == 200 or None

            await router.until(ready)
            await router.until(answered)
        yield url, router


# --- pods ---


async def _pod(url: str) -> Pod:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        source = (await client.get("/kv_event_sources")).json()["0"]
    return Pod(url, source["endpoint"], source["replay_endpoint"])


async def _tokens(urls: Sequence[str]) -> list[PodTokens]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [PodTokens.of_metrics((await client.get(f"{url}/metrics")).text) for url in urls]


# --- results ---


def about(names: Sequence[str]) -> dict[str, Any]:
    """Command, date, machine and versions, read before the first round."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    environments = {environment for name in names if (environment := PEERS[name].environment)}
    return {
        "command": " ".join(["python loadtest/peers/compare.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": _machine(),
        "warmroute": commit.stdout.strip(),
        "versions": {environment: version(environment) for environment in sorted(environments)},
    }


def write(out: Path, context: dict[str, Any], found: dict[str, list[Round]]) -> None:
    """Write all rounds as JSON, and the table as Markdown."""
    rounds = {name: [asdict(one) for one in of_one] for name, of_one in found.items()}
    out.write_bytes(msgspec.json.format(msgspec.json.encode({**context, "rounds": rounds})) + b"\n")
    head = (
        f"    {context['command']}\n\n{context['date']}, {context['machine']}, warmroute at {context['warmroute']}.\n\n"
    )
    out.with_suffix(".md").write_text(head + markdown(found))


def _machine() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _line(number: int, name: str, one: Round) -> str:
    return (
        f"round {number + 1}, {name}: {one.requests} requests, cached {one.cached_share:.1%}, TTFT mean "
        f"{one.ttft_mean_ms:.0f} ms, p50 {one.ttft_p50_ms:.0f}, p99 {one.ttft_p99_ms:.0f}, peak {one.imbalance:.2f}, "
        f"{one.cpu_ms_per_request:.2f} CPU ms a request"
    )


if __name__ == "__main__":
    typer.run(main)
