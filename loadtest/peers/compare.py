"""How well do we route, beside the routers that others would use?

    python loadtest/peers/compare.py --install          # once
    python loadtest/peers/compare.py --rounds 3 --out loadtest/results/peers.json

One fleet of mock engines; then, for each round and router in turn, empty caches, that router in front of the fleet, and
exactly the same traffic. The order rotates from round to round. This file never knows how a router is started.
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvloop
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.peers.catalog import PEERS, Place, Pod
from loadtest.peers.environments import NotInstalled, install, program, version
from loadtest.peers.figures import PodTokens, Round, cached_share, imbalance, markdown, table
from loadtest.peers.processes import launched, used
from loadtest.peers.traffic import Traffic, TrafficOfRound, session_traffic, trace_traffic
from router.cli.child_processes import Child, FleetPlan, StageError, clear_caches, end_on_sigterm, free_port, mock_fleet
from router.cli.figures import percentile, ttfts_ms
from router.cli.mock_engine_command import need_tokenizer
from router.errors import ConfigError

DEFAULT_PEERS = ",".join(name for name in PEERS if name != "litellm")
"""litellm alone would keep one of two cores busy, at the cost of the engines' timing."""
MIB = 1024 * 1024


def main(
    install_peers: Annotated[bool, typer.Option("--install", help="Install the peers, and nothing else.")] = False,
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = DEFAULT_PEERS,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    pods: Annotated[int, typer.Option(min=1)] = 4,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of 16 tokens, of each pod.")] = 2560,
    sessions_per_s: Annotated[float, typer.Option(min=0.1, help="Sessions of several turns, to all pods.")] = 22.0,
    duration_s: Annotated[float, typer.Option(min=1, help="How long new sessions arrive, in each run.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the first round; each round has other sessions.")] = 1,
    trace: Annotated[Path | None, typer.Option(exists=True, help="Play this Mooncake trace instead.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of the trace.")] = 300,
    speedup: Annotated[float, typer.Option(min=0.01, help="Of the trace.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Write the figures: JSON here, a table beside it.")] = None,
) -> None:
    """Exit code 1 when a request failed."""
    if install_peers:
        install()
        return
    names = [name.strip() for name in peers.split(",")]
    plan = FleetPlan(pods=pods, num_blocks=num_blocks)
    try:
        need_tokenizer()
        _check(names)
        told = about(names)
        if trace is not None:
            traffic = trace_traffic(trace, requests, speedup, plan.model)
        else:
            traffic = session_traffic(seed, duration_s, sessions_per_s, plan.model)
        found = uvloop.run(compare(names, rounds, plan, traffic))
    except (StageError, ConfigError, NotInstalled) as error:
        raise SystemExit(f"compare: {error}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    Console().print(table(found, f"{rounds} rounds, {pods} pods, the same traffic through each router"))
    if out is not None:
        write(out, told, found)
    raise SystemExit(1 if any(one.errors for of_one in found.values() for one in of_one) else 0)


def _check(names: Sequence[str]) -> None:
    """Before anything is started."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    for name in names:
        if environment := PEERS[name].environment:
            program(environment)


async def compare(
    names: Sequence[str], rounds: int, plan: FleetPlan, traffic: TrafficOfRound
) -> dict[str, list[Round]]:
    """What each router did in each round. Raises `StageError` where one does not come up or dies."""
    end_on_sigterm()
    found: dict[str, list[Round]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-peers-")))
        pods = [await _pod(url) for url in await stack.enter_async_context(mock_fleet(plan, folder))]
        for number in range(rounds):
            same = traffic(number)
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                place = Place(free_port(), pods, plan, folder / f"{number}-{name}")
                one = await play_round(name, place, same)
                found[name].append(one)
                print(_line(number, name, one), file=sys.stderr)
    return found


async def play_round(name: str, place: Place, traffic: Traffic) -> Round:
    """One router from its start to its end."""
    place.folder.mkdir()
    await clear_caches(place.urls)
    async with running(name, place) as (url, router):
        tokens_before, used_before = await _tokens(place.urls), used(router.process.pid)
        results = await traffic.play(url)
        used_after, tokens_after = used(router.process.pid), await _tokens(place.urls)
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
        ttft_p50_ms=percentile(ttfts_ms(good), 0.50),
        ttft_p99_ms=percentile(ttfts_ms(good), 0.99),
        imbalance=imbalance(pods),
        cpu_ms_per_request=(used_after.cpu_s - used_before.cpu_s) * 1000 / max(len(results.served), 1),
        rss_mib=used_after.rss_bytes / MIB,
    )


@asynccontextmanager
async def running(name: str, place: Place) -> AsyncIterator[tuple[str, Child]]:
    """The router's URL and process. It knows all pods and has answered once, so that no first use is measured."""
    peer = PEERS[name]
    url = f"http://127.0.0.1:{place.port}"
    with launched(name, peer.command(place), place.folder, peer.variables) as router:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as client:

            async def ready() -> bool | None:
                try:
                    return await peer.ready(client, len(place.pods)) or None
                except httpx.TransportError:
                    return None

            async def answered() -> bool | None:
                hello = {"role": "user", "content": "Hello"}
                asked = {"model": place.plan.model, "messages": [hello], "max_tokens": 1}
                return (await client.post("/v1/chat/completions", json=asked)).status_code == 200 or None

            await router.until(ready)
            await router.until(answered)
        yield url, router


# --- pods -----------------------------------------------------------------------------------------------------


async def _pod(url: str) -> Pod:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        source = (await client.get("/kv_event_sources")).json()["0"]
    return Pod(url, source["endpoint"], source["replay_endpoint"])


async def _tokens(urls: Sequence[str]) -> list[PodTokens]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [PodTokens.of_metrics((await client.get(f"{url}/metrics")).text) for url in urls]


# --- results --------------------------------------------------------------------------------------------------


def about(names: Sequence[str]) -> dict[str, Any]:
    """What a figure is worth nothing without; taken before the first round, for a checkout may move."""
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


def write(out: Path, told: dict[str, Any], found: dict[str, list[Round]]) -> None:
    """Every round as JSON, and the table beside it as Markdown."""
    rounds = {name: [asdict(one) for one in of_one] for name, of_one in found.items()}
    out.write_bytes(msgspec.json.format(msgspec.json.encode({**told, "rounds": rounds})) + b"\n")
    head = f"    {told['command']}\n\n{told['date']}, {told['machine']}, warmroute at {told['warmroute']}.\n\n"
    out.with_suffix(".md").write_text(head + markdown(found))


def _machine() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _line(number: int, name: str, one: Round) -> str:
    return (
        f"round {number + 1}, {name}: {one.requests} requests, cached {one.cached_share:.1%}, TTFT p50 "
        f"{one.ttft_p50_ms:.0f} ms, p99 {one.ttft_p99_ms:.0f}, peak {one.imbalance:.2f}, "
        f"{one.cpu_ms_per_request:.2f} CPU ms a request"
    )


if __name__ == "__main__":
    typer.run(main)
