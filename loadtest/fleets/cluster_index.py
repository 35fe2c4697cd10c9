"""Measures several routers with one shared index, and failures of its parts.

    python -m loadtest.fleets.cluster_index [--seconds 12] [--rounds 2] [--scenes replicas,restart,redis]

A fleet of mock engines, a publisher, Valkey and routers, each in its own process. The load is the demo's sessions; each
request goes to the next router, as behind a balancer. Three scenarios:

* replicas: the cached share with 1, 2 and 4 routers, medians over interleaved rounds.
* restart: one of two routers is terminated under load and restarted; counts its blind decisions after the restart
  (predicted no cached tokens where the engine had some).
* redis: Valkey is killed under load and comes back empty; failed requests, slow decisions, and the time until the index
  is complete again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.commands.child_processes import (
    Child,
    FleetPlan,
    RouterUrls,
    cancel_on_sigterm,
    child,
    clear_caches,
    configured_router,
    free_port,
    mock_fleet,
    router_config,
)
from loadtest.simulator.outcome import cached_share
from loadtest.traffic.chat_workload import sessions
from loadtest.traffic.load_driver import DriveResults, RequestResult, drive
from router.stores.redis_connection import RedisConnection
from tests.redis_process import RedisProcess, address_of, redis_process

PLAN = FleetPlan(pods=4, num_blocks=2560)
SESSIONS_PER_S = 12.0
PREDICTION_SLACK_TOKENS = 64


@dataclass(slots=True)
class ClusterSetup:
    """The engines and Redis; routers are started as needed."""

    pods: list[str]
    redis: RedisProcess
    folder: Path
    started: int = 0

    def config(self) -> dict[str, Any]:
        """The configuration of routers and publisher."""
        config = router_config(self.pods, PLAN)
        config["index"] = {"redis": {"url": self.redis.url}}
        return config

    @asynccontextmanager
    async def publisher(self) -> AsyncIterator[str]:
        """Start a publisher for all engines; yields its URL."""
        port = free_port()
        path = self.folder / "publisher.yaml"
        path.write_text(json.dumps(self.config()))
        arguments = ["publish", "--config", str(path), "--port", str(port)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            with child("publisher", arguments, self.folder) as process:
                await _answers(process, client, "/readyz")
                yield str(client.base_url)

    def router(self, port: int = 0) -> AbstractAsyncContextManager[RouterUrls]:
        """Run a router; yields its URLs once it trusts all pods."""
        self.started += 1
        return configured_router(f"router-{self.started}", self.config(), self.folder, port)


async def _answers(process: Child, client: httpx.AsyncClient, path: str) -> None:
    async def answered() -> bool | None:
        try:
            return (await client.get(path)).status_code == 200 or None
        except httpx.TransportError:
            return None

    await process.until(answered)


@asynccontextmanager
async def fresh(scene: ClusterSetup) -> AsyncIterator[None]:
    """Clear all caches and Redis, and start a publisher."""
    await clear_caches(scene.pods)
    scene.redis.kill()
    scene.redis.start()
    async with scene.publisher():
        yield


async def gauge(url: str, name: str) -> float:
    """Sum of a metric over its labels. `url`: of an admin listener."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


async def slow_matches(urls: Sequence[str], bound: str) -> tuple[int, int]:
    """(matches slower than `bound` seconds, all matches) of these routers."""
    total, quick = 0.0, 0.0
    for url in urls:
        total += await gauge(url, r'warmroute_phase_seconds_count\{phase="match"\}')
        quick += await gauge(url, rf'warmroute_phase_seconds_bucket\{{le="{bound}",phase="match"\}}')
    return int(total - quick), int(total)


# --- scenarios ---


async def with_replicas(scene: ClusterSetup, replicas: int, seed: int, seconds: float) -> DriveResults:
    """Run the sessions against `replicas` routers."""
    mix = sessions(seed, duration_s=seconds, sessions_per_s=SESSIONS_PER_S)
    async with fresh(scene), AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(scene.router()) for _ in range(replicas)]
        return await drive([router.public for router in routers], PLAN.model, mix)


async def replicas(scene: ClusterSetup, rounds: int, seconds: float) -> Table:
    """1, 2 and 4 routers, interleaved."""
    shares: dict[int, list[float]] = {1: [], 2: [], 4: []}
    errors = dict.fromkeys(shares, 0)
    for seed in range(1, rounds + 1):
        for count, found in shares.items():
            served = (await with_replicas(scene, count, seed, seconds)).served
            found.append(cached_share(served))
            errors[count] += sum(bool(one.error) for one in served)
    table = Table("routers", "cached share", "vs. one router", "errors", title="replicas")
    one = statistics.median(shares[1])
    for count, found in shares.items():
        share = statistics.median(found)
        table.add_row(str(count), f"{share:.1%}", f"{(share - one) * 100:+.1f} points", str(errors[count]))
    return table


async def restart(scene: ClusterSetup, seconds: float) -> Table:
    """Restart one of two routers under load."""
    mix = sessions(7, duration_s=seconds, sessions_per_s=SESSIONS_PER_S)
    port = free_port()
    async with fresh(scene), scene.router() as staying, AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(scene.router(port))
        driving = asyncio.create_task(drive([staying.public, leaving.public], PLAN.model, mix))
        await asyncio.sleep(seconds / 2)
        began_s = time.perf_counter()
        await stack.aclose()
        async with scene.router(port):
            back_s = time.perf_counter() - began_s
            results = await driving
    new_life = [one for one in results.served if one.router == leaving.public and one.sent_s > seconds / 2 + back_s]
    blind = sum(map(is_blind, new_life))
    table = Table("requests", "failed", "after the restart", "blind", "away for", title="restart of a router")
    failed = sum(bool(one.error) for one in results.served)
    share = f"{blind} ({blind / max(len(new_life), 1):.2%})"
    table.add_row(str(len(results.served)), str(failed), str(len(new_life)), share, f"{back_s:.1f} s")
    return table


def is_blind(one: RequestResult) -> bool:
    """Whether a router predicted no cached tokens where the engine had some."""
    return not one.error and one.predicted_cached_tokens == 0 and one.cached_tokens >= PREDICTION_SLACK_TOKENS


async def redis(scene: ClusterSetup, seconds: float) -> Table:
    """Kill Valkey under load; it comes back empty."""
    mix = sessions(8, duration_s=seconds, sessions_per_s=SESSIONS_PER_S)
    async with fresh(scene), scene.router() as first, scene.router() as second:
        urls = [first.admin, second.admin]
        driving = asyncio.create_task(drive([first.public, second.public], PLAN.model, mix))
        await asyncio.sleep(seconds / 3)
        slow_before, _ = await slow_matches(urls, "0.05")
        scene.redis.kill()
        await asyncio.sleep(seconds / 3)
        degraded = sum([await gauge(url, "warmroute_degraded_matches_total") for url in urls])
        scene.redis.start()
        whole_s = await _until_whole(scene, time.perf_counter())
        results = await driving
        slow_after, matches = await slow_matches(urls, "0.05")
    table = Table("requests", "failed", "matches over 50 ms", "degraded meanwhile", "whole again", title="Redis dies")
    failed = sum(bool(one.error) for one in results.served)
    slow = f"{slow_after - slow_before} of {matches}"
    table.add_row(str(len(results.served)), str(failed), slow, f"{degraded:.0f}", f"{whole_s:.1f} s after its return")
    return table


async def _until_whole(scene: ClusterSetup, since_s: float) -> float:
    """Wait until all holders are in Redis again; returns the elapsed time."""
    client = RedisConnection(address_of(scene.redis.url, timeout_s=5)).client
    try:
        while True:
            rows = [key async for key in client.scan_iter("warmroute:1:*:holder:*")]
            if len(rows) == len(scene.pods):
                return time.perf_counter() - since_s
            await asyncio.sleep(0.05)
    finally:
        await client.aclose()


async def run(args: argparse.Namespace) -> None:
    """Run all scenarios."""
    cancel_on_sigterm()
    console = Console()
    with TemporaryDirectory(prefix="warmroute-cluster-") as folder, redis_process("valkey") as server:
        async with mock_fleet(PLAN, Path(folder)) as pods:
            scene = ClusterSetup(pods, server, Path(folder))
            wanted = args.scenes.split(",")
            if "replicas" in wanted:
                console.print(await replicas(scene, args.rounds, args.seconds))
            if "restart" in wanted:
                console.print(await restart(scene, args.seconds))
            if "redis" in wanted:
                console.print(await redis(scene, args.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="how long new sessions arrive in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scenes", default="replicas,restart,redis")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
