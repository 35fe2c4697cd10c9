"""Measures what continuable streams cost the router itself: CPU per streamed chunk, with continuation and without.

    python -m loadtest.bench.continuation_cost [--rounds 10]

Two routers in front of the same mock engines, one with `continuation`, get the same streams in turn; which is first
alternates. Half of the rounds are of routers that were started the other way round: the first one can be cheaper by a
few percent. Printed are the microseconds that the kernel counts for each router per chunk of a client, and their
difference with an interval of 95 % over the pairs of rounds. The share of a request in it is small: its answer is long.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from loadtest.commands.child_processes import (
    FleetPlan,
    all_pods_trusted,
    cancel_on_sigterm,
    child,
    free_port,
    mock_fleet,
    router_config,
    temporary_folder,
)
from loadtest.traffic.load_driver import LoadDriver
from router.types import Endpoint

PLAN = FleetPlan(pods=2, num_blocks=8192, time_scale=0.5)
STREAMS, ANSWER_TOKENS = 48, 400
CHUNKS = STREAMS * ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Measured:
    url: str
    process: int

    @property
    def cpu_us(self) -> float:
        """Sums all threads, as the scheduler counts them."""
        tasks = Path(f"/proc/{self.process}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1000


def main(rounds: Annotated[int, typer.Option(min=4, help="Pairs of rounds, an even number.")] = 10) -> None:
    """Print both costs and their difference."""
    pairs = asyncio.run(_pairs(rounds))
    added = [on - off for off, on in pairs]
    spread = 2.26 * statistics.stdev(added) / math.sqrt(len(added))
    off, on = (statistics.mean(side) for side in zip(*pairs, strict=True))
    print(f"us a chunk: {off:.1f} without, {on:.1f} with; added {statistics.mean(added):.2f} +- {spread:.2f}")
    print(" ".join(f"{before:.1f}/{after:.1f}" for before, after in pairs))


async def _pairs(rounds: int) -> list[tuple[float, float]]:
    cancel_on_sigterm()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-continuation-"))
        pods = await stack.enter_async_context(mock_fleet(PLAN, folder))
        halves = [await _half(pods, folder, first, rounds // 2) for first in (False, True)]
        return [pair for half in halves for pair in half]


async def _half(pods: list[str], folder: Path, continues_first: bool, rounds: int) -> list[tuple[float, float]]:
    """Pairs of rounds of two routers. `continues_first`: whether the one that continues is started before the other."""
    order = (continues_first, not continues_first)
    async with AsyncExitStack() as stack:
        plans = {continues: replace(PLAN, continues=continues) for continues in order}
        routers = {key: await stack.enter_async_context(_router(pods, plan, folder)) for key, plan in plans.items()}
        for router in routers.values():
            await _round(router, 0)
        pairs = []
        for number in range(1, rounds + 1):
            turns = order if number % 2 else order[::-1]
            found = {continues: await _round(routers[continues], number) for continues in turns}
            pairs.append((found[False], found[True]))
        return pairs


@asynccontextmanager
async def _router(pods: list[str], plan: FleetPlan, folder: Path) -> AsyncIterator[Measured]:
    name, port, admin_port = f"router-{plan.continues}", free_port(), free_port()
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(router_config(pods, plan)))
    arguments = ["serve", "--config", str(path), "--port", str(port), "--admin-port", str(admin_port)]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False) as client:
        with child(name, arguments, folder) as router:

            async def ready() -> bool | None:
                return await all_pods_trusted(client, plan.pods, continues=plan.continues) or None

            await router.until(ready)
            yield Measured(f"http://127.0.0.1:{port}", router.process.pid)


async def _round(router: Measured, number: int) -> float:
    """CPU of the router per chunk."""
    with closing(LoadDriver([router.url], lambda _: None)) as driver:
        bodies = [
            {
                "model": PLAN.model,
                "messages": [{"role": "user", "content": f"Question {number} {stream}"}],
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
            }
            for stream in range(STREAMS)
        ]
        before_us = router.cpu_us
        results = await asyncio.gather(*(driver.send(Endpoint.CHAT, body, "") for body in bodies))
        spent_us = router.cpu_us - before_us
    if failed := [one.error for one in results if one.error or one.output_tokens != ANSWER_TOKENS]:
        raise RuntimeError(f"failed: {failed}")
    return spent_us / CHUNKS


if __name__ == "__main__":
    typer.run(main)
