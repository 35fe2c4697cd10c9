"""Replaces all engines of a fleet one by one under load, and counts the answers that fail, are cut, or are others.

    python -m loadtest.faults.rolling_update [--pods 4] [--per-s 5] [--tokens 2000] [--out rolling.json]

Twice with the same load: each old engine is terminated when its last answer is complete, as a preStop hook that waits
does it; or at once, and `continuation` moves its answers. The router finds the pods, each a process, at an API server
in memory. The new engines run already; the time until all are replaced is that of the rollout without their start. Some
prompts are sent many times, and all answers to one must be equal.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import (
    Child,
    FleetPlan,
    cancel_on_sigterm,
    child,
    engine_arguments,
    free_port,
    router_config,
    temporary_folder,
)
from loadtest.faults.steady_streams import Answers, continuations, counted, send_steadily
from loadtest.traffic.load_driver import LoadDriver
from router.addresses import split_url
from router.cli.options import writable
from router.types import Endpoint
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes
from tests.feeds.discovery.kubernetes_server import served

PLAN = FleetPlan(pods=1, num_blocks=65_536)
PROMPTS = 5
"""Different ones."""
LATEST_S = 1800.0
"""Longest time of a rollout."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """`replaced_s`: until all engines were replaced. `continued`: what the router counted."""

    continues: bool
    replaced_s: float
    answers: Answers
    continued: dict[str, int]


@dataclass(frozen=True, slots=True)
class Engine:
    """A mock engine, and its name and port as a pod."""

    name: str
    port: int
    process: Child


def main(
    pods: Annotated[int, typer.Option(help="Engines before the rollout, and after.")] = 4,
    per_s: Annotated[float, typer.Option(help="Requests per second.")] = 5.0,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 2000,
    warm_s: Annotated[float, typer.Option(help="Seconds of load before the rollout.")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.", callback=writable)] = None,
) -> None:
    """Print a line for each rollout. Exit code 1 if an answer failed, was cut or changed."""
    found = []
    for continues in (False, True):
        found.append(asyncio.run(_run(pods, per_s, tokens, warm_s, continues=continues)))
        typer.echo(json.dumps(asdict(found[-1])))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    raise SystemExit(not all(one.answers.all_whole for one in found))


async def _run(pods: int, per_s: float, tokens: int, warm_s: float, *, continues: bool) -> Rollout:
    cancel_on_sigterm()
    cluster = FakeKubernetes()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-rollout-"))
        engines = await asyncio.gather(*(_engine(stack, number, folder) for number in range(2 * pods)))
        old, new = engines[:pods], engines[pods:]
        for one in old:
            _put(cluster, one)
        router, url, admin = await _router(stack, await stack.enter_async_context(served(cluster)), continues, folder)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=admin, trust_env=False))
        await _until_ready(client, old, continues=continues)
        driver = stack.enter_context(closing(LoadDriver([url], lambda _: None)))
        asking = asyncio.create_task(send_steadily(driver, per_s, lambda number: _asked(number, tokens)))
        await asyncio.sleep(warm_s)
        begin_s = time.monotonic()
        for before, after in zip(old, new, strict=True):
            _put(cluster, after)
            await _until_ready(client, [after], continues=continues)
            cluster.terminate(before.name)
            if not continues:
                await _until_idle(client, before)
            before.process.process.terminate()
            await asyncio.to_thread(before.process.process.wait, LATEST_S)
            cluster.delete(before.name)
            print(f"{before.name} after {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
        replaced_s = time.monotonic() - begin_s
        asking.cancel()
        await asking
        metrics = (await client.get("/metrics")).text
        answers = counted(driver.served, tokens, {}, [router.log])
    return Rollout(continues, round(replaced_s, 1), answers, dict(continuations(metrics)))


async def _engine(stack: AsyncExitStack, number: int, folder: Path) -> Engine:
    place, port = folder / f"engine-{number}", free_port()
    place.mkdir()
    engine = stack.enter_context(child("engine", engine_arguments(PLAN, port), place))

    async def listens() -> bool | None:
        return bool(engine.output.read_text()) or None

    await engine.until(listens)
    return Engine(f"pod-{number}", port, engine)


def _put(cluster: FakeKubernetes, engine: Engine) -> None:
    cluster.put_pod(engine.name, ip="127.0.0.1", annotations={"warmroute.dev/ports": str(engine.port)})


async def _router(stack: AsyncExitStack, api: str, continues: bool, folder: Path) -> tuple[Child, str, str]:
    path, port, admin_port = folder / "router.yaml", free_port(), free_port()
    source = {"selector": "app=vllm", "namespaces": ["ns"], "node_labels": False, "api": {"url": api}}
    config = router_config([], replace(PLAN, continues=continues)) | {"discovery": {"kubernetes": source}}
    path.write_text(json.dumps(config))
    arguments = ["serve", "--config", str(path), "--port", str(port), "--admin-port", str(admin_port)]
    router = stack.enter_context(child("router", arguments, folder))
    return router, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"


async def _pods(client: httpx.AsyncClient) -> dict[int, dict[str, Any]]:
    """What the router knows of its pods, by port; nothing before it listens."""
    try:
        answer = await client.get("/admin/pods")
    except httpx.TransportError:
        return {}
    return {int(split_url(pod["url"]).port or 0): pod for pod in answer.json()} if answer.status_code == 200 else {}


async def _until_ready(client: httpx.AsyncClient, engines: Sequence[Engine], *, continues: bool) -> None:
    async with asyncio.timeout(LATEST_S):
        while True:
            pods = await _pods(client)
            found = [pods.get(engine.port) for engine in engines]
            if all(pod and pod["state"] == "ready" and (pod["continues"] or not continues) for pod in found):
                return
            await asyncio.sleep(0.2)


async def _until_idle(client: httpx.AsyncClient, engine: Engine) -> None:
    async with asyncio.timeout(LATEST_S):
        while True:
            if not (await _pods(client)).get(engine.port, {}).get("in_flight"):
                return
            await asyncio.sleep(0.2)


def _asked(number: int, tokens: int) -> tuple[Endpoint, dict[str, Any], str]:
    question = f"Question {number % PROMPTS}"
    body = {
        "model": PLAN.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return Endpoint.CHAT, body, question


if __name__ == "__main__":
    typer.run(main)
