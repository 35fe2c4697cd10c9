"""Measures what a long agent session costs the running router, and how long it blocks its event loop, by API.

    python -m loadtest.faults.long_chats --sessions agent_sessions.jsonl --watch cpu
    python -m loadtest.faults.long_chats --sessions agent_sessions.jsonl --watch busy
    python -m loadtest.faults.long_chats --sessions agent_sessions.jsonl --watch lag
    python -m loadtest.faults.long_chats --sessions agent_sessions.jsonl --watch callbacks

Sessions with the lengths and the growth of recorded ones send their last steps over HTTP through a router to mock
engines, after a few short chats, which show what any request costs there. The first step is new to the router, as a
session that resumes on another router is. `cpu`: CPU of all threads of the router's process during a request, less that
of an idle router in the same time. `busy`: the same per later step while all sessions send at once. `lag`: the longest
lag of the loop during a request, less the time in which the machine had no core for it (`loop_watch.py`). `callbacks`:
the longest CPU time of a callback, on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from loadtest.commands.child_processes import (
    FleetPlan,
    all_pods_trusted,
    cancel_on_sigterm,
    free_port,
    logged_process,
    mock_fleet,
    router_config,
)
from loadtest.faults.loop_watch import LagSample, LongCallback
from loadtest.faults.stalls import WatchLog
from router.cli.options import writable
from router.config.load import shipped
from router.types import Endpoint
from tests.bench.agent_prompt_bench import APIS, WARM_STEPS, long_sessions, steps

PLAN = FleetPlan(pods=2, num_blocks=65_536, model="m", time_scale=0.01)
OUTPUT_TOKENS = 16
SHORT_CHATS = 40
SETTLE_S = 0.1
"""Between two requests: the records of the first are complete, and each has the loop for itself."""
DEADLINE_S = 60.0
MOST_PLACES = 3


class Watched(Enum):
    """What is measured: each disturbs the others."""

    CPU = "cpu"
    BUSY = "busy"
    LAG = "lag"
    CALLBACKS = "callbacks"


class StepResult(msgspec.Struct, frozen=True):
    """One request: the measured figure, and the stack samples of the longest callback."""

    ms: float
    at: tuple[str, ...] = ()


class ApiResult(msgspec.Struct, frozen=True):
    """Short chats; the first requests of sessions, the next two, and the others."""

    api: str
    short: list[StepResult]
    first: list[StepResult]
    warming: list[StepResult]
    steps: list[StepResult]


@dataclass(slots=True)
class WatchedRouter:
    """A running router."""

    watched: Watched
    pid: int
    looks: WatchLog
    client: httpx.AsyncClient
    idle: float = 0.0
    """Share of a core that it uses without requests."""

    def cpu_ms(self) -> float:
        """CPU time of its threads. Source: the kernel's Documentation/scheduler/sched-stats."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def main(
    sessions: Annotated[Path, typer.Option(exists=True, help="Recorded sessions of agents.")],
    watch: Annotated[Watched, typer.Option(help="What to measure.")] = Watched.CPU,
    out: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.", callback=writable)] = None,
) -> None:
    """One router per API, so that none has the texts of another."""
    found = asyncio.run(_measure_all(sessions, watch))
    Console(width=max(Console().width, 110)).print(table(found, watch))
    for one in found:
        longest = sorted(one.first + one.warming + one.steps, key=lambda step: -step.ms)[:MOST_PLACES]
        print(*(f"{one.api}: {step.ms:.1f} ms {step.at[:2]}" for step in longest if step.at), sep="\n")
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


async def _measure_all(sessions: Path, watched: Watched) -> list[ApiResult]:
    cancel_on_sigterm()
    recorded, found = long_sessions(sessions), []
    with TemporaryDirectory(prefix="warmroute-long-chats-") as temporary:
        async with mock_fleet(PLAN, Path(temporary)) as pods:
            for api, (endpoint, *_) in APIS.items():
                async with running_router(pods, Path(temporary) / api, endpoint, watched) as router:
                    result = ApiResult(api, [], [], [], [])
                    chats = [_short_chat(api, number) for number in range(SHORT_CHATS)]
                    result.short.extend([await _ask(router, endpoint, body) for body in chats])
                    if watched is Watched.BUSY:
                        result.steps.append(await _busy(router, endpoint, [steps(api, one) for one in recorded]))
                    else:
                        for session in recorded:
                            first, *others = [await _ask(router, endpoint, body) for body in steps(api, session)]
                            result.first.append(first)
                            result.warming.extend(others[: WARM_STEPS - 1])
                            result.steps.extend(others[WARM_STEPS - 1 :])
                found.append(result)
    return found


def _short_chat(api: str, number: int) -> bytes:
    text = f"Question {number}: " + "why does the router fail? " * 20
    return msgspec.json.encode({"model": "m", APIS[api][1]: [{"role": "user", "content": text}]})


async def _busy(router: WatchedRouter, endpoint: Endpoint, sessions: Sequence[Sequence[bytes]]) -> StepResult:
    """CPU per request of sessions that send their later steps at once."""

    async def play(bodies: Sequence[bytes]) -> None:
        for body in bodies:
            await _send(router, endpoint, body)

    prepared = [[_streamed(endpoint, body) for body in bodies] for bodies in sessions]
    for bodies in prepared:
        await play(bodies[:WARM_STEPS])
    await asyncio.sleep(SETTLE_S)
    began_s, began_ms = time.monotonic(), router.cpu_ms()
    await asyncio.gather(*(play(bodies[WARM_STEPS:]) for bodies in prepared))
    used_ms = router.cpu_ms() - began_ms - (time.monotonic() - began_s) * 1000 * router.idle
    return StepResult(used_ms / sum(len(bodies[WARM_STEPS:]) for bodies in prepared))


@asynccontextmanager
async def running_router(
    pods: Sequence[str], folder: Path, endpoint: Endpoint, watched: Watched
) -> AsyncIterator[WatchedRouter]:
    """A watched router that trusts its pods and has proven how they convert bodies of the endpoint."""
    folder.mkdir()  # noqa: ASYNC240
    (folder / "warmroute.yaml").write_text(json.dumps(router_config(pods, PLAN)))
    port, admin_port = free_port(), free_port()
    watch: list[object] = [Path(__file__).with_name("loop_watch.py"), folder / "looks"]
    if watched is Watched.CALLBACKS:
        watch.append("callbacks")
    program = ["-m", "router.cli"] if watched in {Watched.CPU, Watched.BUSY} else watch
    serve = ["serve", "--config", folder / "warmroute.yaml", "--policies", shipped("policies")]
    command = [sys.executable, *program, *serve, "--port", port, "--admin-port", admin_port]
    with logged_process("router", list(map(str, command)), folder) as process:
        admin = f"http://127.0.0.1:{admin_port}"
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=DEADLINE_S) as client,
            httpx.AsyncClient(base_url=admin, trust_env=False) as admin_client,
        ):

            async def ready() -> bool | None:
                if not await all_pods_trusted(admin_client, len(pods)):
                    return None
                shown = (await admin_client.get("/admin/pods")).json()
                return endpoint is Endpoint.CHAT or all(endpoint in pod["converts"] for pod in shown) or None

            await process.until(ready)
            router = WatchedRouter(watched, process.process.pid, WatchLog(folder / "looks"), client)
            router.idle = await _idle_share(router)
            yield router


async def _idle_share(router: WatchedRouter) -> float:
    await asyncio.sleep(1.0)
    began_s, before_ms = time.monotonic(), router.cpu_ms()
    await asyncio.sleep(3.0)
    return (router.cpu_ms() - before_ms) / (time.monotonic() - began_s) / 1000


async def _ask(router: WatchedRouter, endpoint: Endpoint, body: bytes) -> StepResult:
    """Send one streamed request. Raises `AssertionError` if it fails."""
    body = _streamed(endpoint, body)
    await asyncio.sleep(SETTLE_S)
    began_s, began_ms = time.monotonic(), router.cpu_ms()
    await _send(router, endpoint, body)
    ended_s, ended_ms = time.monotonic(), router.cpu_ms()
    if router.watched in {Watched.CPU, Watched.BUSY}:
        return StepResult(ended_ms - began_ms - (ended_s - began_s) * 1000 * router.idle)
    await asyncio.sleep(SETTLE_S)
    lines = router.looks.between(began_s, time.monotonic())
    if router.watched is Watched.LAG:
        return StepResult(max((line.own_s * 1000 for line in lines if isinstance(line, LagSample)), default=0.0))
    calls = [line for line in lines if isinstance(line, LongCallback)]
    longest = max(calls, key=lambda line: line.cpu_s, default=LongCallback(0.0, 0.0, ()))
    return StepResult(longest.cpu_s * 1000, longest.at)


def _streamed(endpoint: Endpoint, body: bytes) -> bytes:
    limit = "max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"
    return msgspec.json.encode(msgspec.json.decode(body) | {"stream": True, limit: OUTPUT_TOKENS})


async def _send(router: WatchedRouter, endpoint: Endpoint, body: bytes) -> None:
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    answer = await router.client.post(endpoint, content=body, headers=headers)
    assert answer.status_code == 200, answer.text


def table(found: Sequence[ApiResult], watched: Watched) -> Table:
    """Rows per API: short chats, new sessions, their next two requests, and later steps."""
    names = ("n", f"{watched.value} ms, median", "p90", "longest")
    shown = Table("API", "requests", *(Column(name, justify="right") for name in names), box=SIMPLE_HEAD)
    for one in found:
        kinds = {"short": one.short, "new": one.first, "next two": one.warming, "steps": one.steps}
        for kind, measured in kinds.items():
            if not measured:
                continue
            values = sorted(step.ms for step in measured)
            cells = (statistics.median(values), values[len(values) * 9 // 10], values[-1])
            shown.add_row(one.api, kind, f"{len(values)}", *(f"{cell:.2f}" for cell in cells))
    return shown


if __name__ == "__main__":
    typer.run(main)
