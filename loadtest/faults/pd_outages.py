"""What do clients see when prefill or decode pods hang, are full, or when many clients leave at once?

    python -m loadtest.faults.pd_outages [--only hang,storm,full,shares] [--out pd.json]

Four outages of other routers, with mock engines as processes, over sockets. Every request is split: the router believes
that decode pods are slow at prefills. `hang`: one of two prefill pods accepts and never answers. `storm`: 202 of 300
clients leave together. `full`: decode pods with space for few requests. `shares`: one prefill pod and five decode pods.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import (
    JSON_CALL,
    FleetPlan,
    cancel_on_sigterm,
    configured_router,
    mock_fleet,
    priced_config,
    temporary_folder,
)
from loadtest.traffic.load_driver import LoadDriver, RequestResult
from router.cli.options import writable
from router.types import Endpoint

PLAN = FleetPlan(pods=4, num_blocks=16_384, time_scale=0.2)
PROMPT_WORDS, OUTPUT_TOKENS = 250, 150
"""A word has about five tokens."""
SLOW_MS = 1000.0
"""The time of a prompt token on a decode pod, as the router believes."""
LATE_S, TWICE = 10.0, 2.0
"""An answer is late after this time, and after this multiple of the median."""
CLIENTS = 240
LEAVE = 202
_VARIANT = count()


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of whole answers. `late`: those that took longer than `LATE_S` and twice the median. `kv_used`: of the
    KV of each prefill pod, five seconds after the storm."""

    outage: str
    answers: int
    failed: int
    late: int
    p50_s: float
    p99_s: float
    max_s: float
    by_pod: dict[str, int]
    ejected_after_s: float | None = None
    kv_used: list[float] | None = None
    handoffs: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """A router in front of prefill and decode engines."""

    driver: LoadDriver
    admin: httpx.AsyncClient
    engines: list[httpx.AsyncClient]
    began_s: float

    async def ask(
        self, due_s: float | None = None, tokens: int = OUTPUT_TOKENS, words: int = PROMPT_WORDS
    ) -> RequestResult:
        """One chat that no other has the prefix of."""
        number = next(_VARIANT)
        text = " ".join(f"w{number}x{at}" for at in range(words))
        body = {"model": PLAN.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        return await self.driver.send(Endpoint.CHAT, {**body, "ignore_eos": True}, "chat", due_s)

    async def steadily(self, clients: int, per_s: float, tokens: int = OUTPUT_TOKENS) -> None:
        start_s = self.driver.elapsed_s()

        async def one(number: int) -> None:
            due_s = start_s + number / per_s
            await self.driver.until(due_s)
            await self.ask(due_s, tokens)

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(one(number))

    async def pods(self) -> list[dict[str, Any]]:
        return list((await self.admin.get("/admin/pods")).json())

    async def fault(self, engine: int, **fault: Any) -> None:
        (await self.engines[engine].post("/_fault", json=fault, headers=JSON_CALL)).raise_for_status()

    async def figures(self, outage: str, **more: Any) -> Figures:
        served = [one for one in self.driver.served if one.status or one.error]
        good = sorted(one.e2e_s for one in served if one.status == 200 and not one.error)
        p50_s = good[len(good) // 2] if good else 0.0
        slow = [one for one in served if one.e2e_s > max(LATE_S, TWICE * p50_s)]
        return Figures(
            outage=outage,
            answers=len(good),
            failed=sum(bool(one.error) for one in served),
            late=len(slow),
            p50_s=round(p50_s, 2),
            p99_s=round(good[int(len(good) * 0.99)], 2) if good else 0.0,
            max_s=round(good[-1], 2) if good else 0.0,
            by_pod=dict(sorted(Counter(one.pod for one in served if one.pod).items())),
            handoffs=handoffs((await self.admin.get("/metrics")).text),
            **more,
        )


def handoffs(metrics: str) -> dict[str, int]:
    """Splits by result."""
    lines = [line for line in metrics.splitlines() if line.startswith("warmroute_handoffs_total{")]
    return {line.split('result="')[1].split('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines}


@asynccontextmanager
async def fleet(prefill: int, decode: int, *, num_blocks: int = PLAN.num_blocks) -> AsyncIterator[Fleet]:
    cancel_on_sigterm()
    plan = replace(PLAN, pods=prefill + decode, num_blocks=num_blocks)
    with temporary_folder("warmroute-pd-") as folder:
        async with (
            mock_fleet(plan, folder, ["--pd", "nixl", "--prefill", str(prefill)]) as urls,
            configured_router("router", split_config(urls, plan, prefill), folder) as router,
            httpx.AsyncClient(base_url=router.admin, trust_env=False, timeout=30) as admin,
        ):
            engines = [httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) for url in urls]
            with closing(LoadDriver([router.public], lambda _: None)) as driver:
                yield Fleet(driver, admin, engines, time.monotonic())
            for engine in engines:
                await engine.aclose()


def split_config(urls: list[str], plan: FleetPlan, prefill: int) -> dict[str, Any]:
    """The configuration of a router that splits every request."""
    config = priced_config(urls, plan)
    for number, pod in enumerate(config["pods"]):
        is_prefill = number < prefill
        pod |= {"role": "prefill" if is_prefill else "decode", "handoff": "nixl"}
        if not is_prefill:
            pod["speed"] = {**pod["speed"], "c1_ms_per_token": SLOW_MS}
    links = {"elsewhere": {"t0_ms": 1.0, "gb_per_s": 50.0}}
    return {**config, "policy": "cost_aware_pd", "links": links}


async def hang() -> Figures:
    """One of two prefill pods accepts requests and never answers one."""
    async with fleet(2, 2) as one:
        await one.steadily(20, 5.0)
        one.driver.served.clear()
        ejected, begin_s = asyncio.create_task(_ejected(one)), time.monotonic()
        await one.fault(0, kind="hang", count=None)
        await one.steadily(CLIENTS, 5.0)
        ejected.cancel()
        at_s = ejected.result() - begin_s if ejected.done() and not ejected.cancelled() else None
        return await one.figures("hang", ejected_after_s=None if at_s is None else round(at_s, 1))


async def _ejected(one: Fleet) -> float:
    while True:
        if any(pod["state"] == "ejected" for pod in await one.pods()):
            return time.monotonic()
        await asyncio.sleep(0.1)


async def storm() -> Figures:
    """300 clients at once, of which 202 leave together; 20 later ones."""
    async with fleet(2, 2) as one:
        tasks = [asyncio.create_task(one.ask(words=1500)) for _ in range(300)]
        await asyncio.sleep(4.0)
        leaving = [task for task in tasks if not task.done()][-LEAVE:]
        for task in leaving:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(5.0)
        used = [round(await _kv_usage(engine), 3) for engine in one.engines[:2]]
        await one.steadily(20, 5.0)
        return await one.figures("storm", kv_used=used)


async def _kv_usage(engine: httpx.AsyncClient) -> float:
    lines = (await engine.get("/metrics")).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))


async def full() -> Figures:
    """Decode pods with little memory, and a prefill pod that idles."""
    async with fleet(1, 2, num_blocks=400) as one:
        await one.steadily(80, 10.0, tokens=600)
        return await one.figures("full")


async def shares() -> Figures:
    """One prefill pod and five decode pods, at one request per second."""
    async with fleet(1, 5) as one:
        await one.steadily(60, 1.0)
        return await one.figures("shares")


async def shares_busy() -> Figures:
    """The same at six requests per second."""
    async with fleet(1, 5) as one:
        await one.steadily(60, 6.0)
        return await one.figures("shares_busy")


OUTAGES: dict[str, Callable[[], Coroutine[Any, Any, Figures]]] = {
    one.__name__: one for one in (hang, storm, full, shares, shares_busy)
}


def main(
    only: Annotated[str, typer.Option(help="Outages, separated by commas.")] = ",".join(OUTAGES),
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.", callback=writable)] = None,
) -> None:
    """Print a line for each outage."""
    found = []
    for name in only.split(","):
        found.append(asdict(asyncio.run(OUTAGES[name]())))
        typer.echo(json.dumps(found[-1]))
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
