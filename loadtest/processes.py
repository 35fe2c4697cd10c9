"""Compares the ways to use several cores: one router, one router of several workers, several routers that share Redis.

    python loadtest/processes.py [--seconds 12] [--rounds 3] [--processes 2]

A fleet of mock engines, a publisher, Valkey and the routers run each in their own process. The load is the demo's
sessions; each request goes to the next router or connection, as behind a balancer. Engines announce their KV blocks, or
(`plain`) do not, so that routers only know what they sent themselves. Medians over interleaved rounds; CPU and memory (PSS)
are those of all router processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.cluster_index import PLAN, SESSIONS_PER_S, ClusterSetup, fresh
from router.cli.child_processes import cancel_on_sigterm, configured_router, mock_fleet, temporary_folder
from router.cli.load_driver import drive
from router.sim.chat_workload import sessions
from router.sim.virtual.outcome import cached_share
from tests.redis_process import redis_process


class Layout(NamedTuple):
    """Some routers of some workers each."""

    name: str
    routers: int
    workers: int


def figures(served: list[Any]) -> dict[str, float]:
    first_tokens_ms = sorted(one.ttft_s * 1000 for one in served if one.ttft_s is not None)
    return {
        "cached share": cached_share(served) * 100,
        "p50 ms": statistics.median(first_tokens_ms),
        "p99 ms": first_tokens_ms[int(len(first_tokens_ms) * 0.99)],
        "errors": sum(bool(one.error) for one in served),
    }


def router_processes(folder: Path) -> list[Path]:
    """Routers whose configuration lies there, and their workers, as folders of /proc."""
    mark = f"serve\0--config\0{folder}".encode()
    return [one.parent for one in Path("/proc").glob("[0-9]*/cmdline") if mark in one.read_bytes()]


def cpu_s(processes: list[Path]) -> float:
    """CPU time of these processes, as the kernel counts it."""
    fields = [(one / "stat").read_text().rpartition(")")[2].split() for one in processes]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def memory_mb(processes: list[Path]) -> float:
    """Their memory; pages that several share are counted once (PSS)."""
    rollups = [(one / "smaps_rollup").read_text() for one in processes]
    return sum(int(kb) for text in rollups for kb in re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)) / 1000


async def measured(scene: ClusterSetup, layout: Layout, announced: bool, seed: int, seconds: float) -> dict[str, float]:
    mix = sessions(seed, duration_s=seconds, sessions_per_s=SESSIONS_PER_S)
    config = scene.config() | {"listen": {"workers": layout.workers}}
    if not announced:
        config["pods"] = [pod | {"kv_events": "off"} for pod in config["pods"]]
    if layout.routers == 1 and not announced:
        del config["index"]
    async with fresh(scene), AsyncExitStack() as stack:
        urls = []
        for _ in range(layout.routers):
            scene.started += 1
            router = configured_router(f"router-{scene.started}", config, scene.folder)
            urls.append((await stack.enter_async_context(router)).public)
        before_s = cpu_s(processes := router_processes(scene.folder))
        served = (await drive(urls, PLAN.model, mix)).served
        used_s, used_mb = cpu_s(processes) - before_s, memory_mb(processes)
    return figures(served) | {"CPU ms/request": used_s * 1000 / len(served), "PSS MB": used_mb}


async def compare(options: argparse.Namespace) -> Table:
    layouts = (
        Layout("one router", 1, 1),
        Layout(f"{options.processes} workers", 1, options.processes),
        Layout(f"{options.processes} routers", options.processes, 1),
    )
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with temporary_folder("processes-") as folder, redis_process("valkey") as redis:
        async with mock_fleet(PLAN, folder) as pods:
            scene = ClusterSetup(pods, redis, folder)
            for seed in range(1, options.rounds + 1):
                for announced in (True, False):
                    for layout in layouts:
                        row = await measured(scene, layout, announced, seed, options.seconds)
                        found[layout.name, "announced" if announced else "plain"].append(row)
                        print(layout.name, announced, row, file=sys.stderr)
    table = Table("processes", "engines", *next(iter(found.values()))[0])
    for key, rows in found.items():
        table.add_row(*key, *(f"{statistics.median(row[name] for row in rows):.1f}" for name in rows[0]))
    return table


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    cancel_on_sigterm()
    Console(width=140).print(await compare(parser.parse_args()))


if __name__ == "__main__":
    asyncio.run(main())
