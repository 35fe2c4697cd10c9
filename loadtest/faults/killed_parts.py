"""Kills pods, a router, Redis and the publisher under streams of seconds, and counts the answers that are not whole.

    python -m loadtest.faults.killed_parts [--only pod,redis] [--per-s 40] [--continues] [--out killed.json]

Mock engines, two routers, a publisher and a real Redis or Valkey run as processes of their own. Clients use both
routers in turn, as behind a balancer, and send chats (greedy, sampled, with a seed) and completions. The parts are
killed one after the other and start again; the next one waits until both routers trust all pods, and streams have
ended. Answers to the same request must be equal, also those that another pod has continued.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import (
    Child,
    FleetPlan,
    RouterUrls,
    all_pods_trusted,
    cancel_on_sigterm,
    child,
    engine_arguments,
    free_port,
    router_config,
    temporary_folder,
)
from loadtest.faults.steady_streams import Answers, continuations, counted, send_steadily
from loadtest.traffic.load_driver import LoadDriver
from router.cli.options import writable
from router.errors import ConnectFailed
from router.frontends.http.upstream import UpstreamPool
from router.request.inbound import IncomingResponse
from router.types import Endpoint
from tests.redis_process import RedisProcess, redis_process

PLAN = FleetPlan(pods=5, num_blocks=16_384, time_scale=4.0)
"""Four times slower than the hardware: 100 tokens take about five seconds, and the engines fit on a few cores."""
ROUTERS = 2
PROMPTS = 40
"""Different ones."""
FORMS: Sequence[tuple[Endpoint, Mapping[str, Any]]] = (
    (Endpoint.CHAT, {"temperature": 0}),
    (Endpoint.CHAT, {}),
    (Endpoint.CHAT, {"seed": 7}),
    (Endpoint.COMPLETIONS, {"temperature": 0}),
)
QUESTION = "What do we know about the tides of this coast? " * 20
AWAY_S = 8.0
"""How long a killed part stays away."""


# --- the parts ---


@dataclass(slots=True)
class Part:
    """A process that can be killed and started again with the same command."""

    name: str
    arguments: Sequence[str]
    stack: AsyncExitStack
    folder: Path
    process: Child = field(init=False)
    starts: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.process = self.stack.enter_context(child(f"{self.name}-{self.starts}", self.arguments, self.folder))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.process.pid, number)

    async def kill(self) -> None:
        self.process.process.kill()
        await self.ended()

    async def ended(self) -> None:
        await asyncio.to_thread(self.process.process.wait)


@dataclass(frozen=True, slots=True)
class Parts:
    pods: Sequence[Part]
    routers: Sequence[Part]
    urls: Sequence[RouterUrls]
    publisher: Part
    redis: RedisProcess
    client: httpx.AsyncClient
    away: set[str] = field(default_factory=set)
    """URLs of routers that are not ready: a balancer sends them nothing."""

    def exchange(self, pool: UpstreamPool, message: bytes, _pause_s: float) -> Awaitable[IncomingResponse]:
        """Send a request to a router that is ready."""
        if pool.pod in self.away:
            raise ConnectFailed("the router is not ready")
        return pool.exchange(message)

    @property
    def logs(self) -> list[Path]:
        return [log for router in self.routers for log in router.folder.glob(f"{router.name}-*.log")]

    async def until_trusted(self, *, continues: bool) -> None:
        """Wait until all routers trust all pods; then they are ready."""
        for router, url in zip(self.routers, self.urls, strict=True):

            async def trusted(admin: str = url.admin) -> bool | None:
                async with httpx.AsyncClient(base_url=admin, trust_env=False) as client:
                    return await all_pods_trusted(client, PLAN.pods, continues=continues) or None

            await router.process.until(trusted)
        self.away.clear()

    async def continued(self) -> Counter[str]:
        """What the routers have counted since their starts, by labels."""
        pages = [(await self.client.get(f"{url.admin}/metrics")).text for url in self.urls]
        return sum(map(continuations, pages), Counter[str]())


@asynccontextmanager
async def _parts(*, continues: bool) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-killed-"))
        redis = stack.enter_context(redis_process())
        ports = [free_port() for _ in range(PLAN.pods)]
        pods = [Part(f"pod-{number}", engine_arguments(PLAN, port), stack, folder) for number, port in enumerate(ports)]
        config = router_config([f"http://127.0.0.1:{port}" for port in ports], replace(PLAN, continues=continues))
        path = folder / "router.yaml"
        path.write_text(json.dumps(config | {"index": {"redis": {"url": redis.url}}}))
        command = ["--config", str(path), "--port"]
        publisher = Part("publisher", ["publish", *command, str(free_port())], stack, folder)
        routers, urls = [], []
        for number in range(ROUTERS):
            port, admin_port = free_port(), free_port()
            listen = [str(port), "--admin-port", str(admin_port)]
            routers.append(Part(f"router-{number}", ["serve", *command, *listen], stack, folder))
            urls.append(RouterUrls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=None))
        yield Parts(pods, routers, urls, publisher, redis, client)


# --- what happens to them ---


async def _kill_pod(parts: Parts) -> None:
    await _restart(parts.pods[:1])


async def _kill_pods(parts: Parts) -> None:
    await _restart(parts.pods[1:3])


async def _terminate(parts: Parts) -> None:
    pod = parts.pods[3]
    pod.send(signal.SIGTERM)
    await pod.ended()
    pod.start()


async def _stop(parts: Parts) -> None:
    parts.pods[4].send(signal.SIGSTOP)
    await asyncio.sleep(2 * AWAY_S)
    parts.pods[4].send(signal.SIGCONT)


async def _kill_redis(parts: Parts) -> None:
    await asyncio.to_thread(parts.redis.kill)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(parts.redis.start)


async def _stop_redis(parts: Parts) -> None:
    parts.redis.pause()
    await asyncio.sleep(AWAY_S)
    parts.redis.resume()


async def _kill_publisher(parts: Parts) -> None:
    await _restart([parts.publisher])


async def _kill_router(parts: Parts) -> None:
    parts.away.add(parts.urls[0].public)
    await _restart(parts.routers[:1])


async def _kill_several(parts: Parts) -> None:
    await asyncio.gather(_kill_redis(parts), _restart([parts.pods[2], parts.publisher]))


async def _restart(killed: Sequence[Part]) -> None:
    await asyncio.gather(*(part.kill() for part in killed))
    await asyncio.sleep(AWAY_S)
    for part in killed:
        part.start()


@dataclass(frozen=True, slots=True)
class Event:
    title: str
    happens: Callable[[Parts], Awaitable[None]]
    kills_router: bool = False


EVENTS: Mapping[str, Event] = {
    "pod": Event("a pod is killed", _kill_pod),
    "pods": Event("two of five pods are killed", _kill_pods),
    "terminated": Event("a pod gets SIGTERM and falls silent", _terminate),
    "stopped": Event(f"a pod is stopped for {2 * AWAY_S:g} s", _stop),
    "redis": Event("Redis is killed", _kill_redis),
    "redis-stopped": Event(f"Redis is stopped for {AWAY_S:g} s", _stop_redis),
    "publisher": Event("the publisher is killed", _kill_publisher),
    "several": Event("a pod, Redis and the publisher are killed", _kill_several),
    "router": Event("one of two routers is killed", _kill_router, kills_router=True),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """`answers`: those that ended between two events, without broken ones of a killed router."""

    title: str
    answers: Answers
    of_killed_router: int = 0
    continued: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """Streams while parts are killed. `texts`: the answer to each request."""

    parts: Parts
    driver: LoadDriver
    tokens: int
    rest_s: float
    continues: bool
    seen: list[Seen] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    counted_s: float = 0.0

    async def watch(self, event: Event) -> None:
        """Let it happen; wait until all pods are trusted and the streams of this time have ended."""
        before = await self.parts.continued()
        await event.happens(self.parts)
        await self.parts.until_trusted(continues=self.continues)
        await asyncio.sleep(self.rest_s)
        after = await self.parts.continued()
        self.count(event.title, self.parts.urls[0].public if event.kills_router else "", +(after - before))

    def count(self, title: str, killed: str = "", continued: Mapping[str, int] = MappingProxyType({})) -> None:
        """Count the answers that have ended since the last call."""
        since_s, self.counted_s = self.counted_s, self.driver.elapsed_s()
        served = [one for one in self.driver.served if one.e2e_s and since_s <= one.due_s + one.e2e_s < self.counted_s]
        rest = [one for one in served if not (one.error and one.router == killed)]
        answers = counted(rest, self.tokens, self.texts, self.parts.logs)
        self.seen.append(Seen(title, answers, len(served) - len(rest), dict(continued)))
        typer.echo(f"  {json.dumps(asdict(self.seen[-1]))}", err=True)


async def _run(names: Sequence[str], per_s: float, tokens: int, rest_s: float, *, continues: bool) -> list[Seen]:
    cancel_on_sigterm()
    async with _parts(continues=continues) as parts:
        await parts.until_trusted(continues=continues)
        with closing(LoadDriver([url.public for url in parts.urls], lambda _: None, parts.exchange)) as driver:
            sending = asyncio.create_task(send_steadily(driver, per_s, lambda number: _asked(number, tokens)))
            found = Run(parts, driver, tokens, rest_s, continues)
            await asyncio.sleep(2 * rest_s)
            found.count("before all")
            for name in names:
                await found.watch(EVENTS[name])
            sending.cancel()
            await sending
            found.count("after all")
    return found.seen


def _asked(number: int, tokens: int) -> tuple[Endpoint, dict[str, Any], str]:
    endpoint, fields = FORMS[number % len(FORMS)]
    question = f"Question {number % PROMPTS}. {QUESTION}"
    prompt = {"prompt": question} if endpoint is Endpoint.COMPLETIONS else {"messages": [_said(question)]}
    body = {"model": PLAN.model, "max_tokens": tokens, "ignore_eos": True, **prompt, **fields}
    return endpoint, body, f"{number % PROMPTS} {endpoint} {fields}"


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def table(seen: Sequence[Seen]) -> list[str]:
    """Markdown."""
    lines = ["| event | answers | failed | cut | changed | continued | of the killed router |", "|---" * 7 + "|"]
    for one in seen:
        found, joined = one.answers, sum(n for labels, n in one.continued.items() if 'outcome="joined"' in labels)
        counts = (found.answers, found.failed, found.cut, found.changed, int(joined), one.of_killed_router)
        lines.append(f"| {one.title} | {' | '.join(map(str, counts))} |")
    return lines


def main(
    only: Annotated[str, typer.Option(help="Events, separated by commas.")] = ",".join(EVENTS),
    per_s: Annotated[float, typer.Option(help="Requests per second.")] = 40.0,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 100,
    rest_s: Annotated[float, typer.Option(help="Seconds after each event; longer than an answer.")] = 15.0,
    continues: Annotated[bool, typer.Option("--continues", help="Let the routers continue broken streams.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.", callback=writable)] = None,
) -> None:
    """Print a line for each event. Exit code 1 if an answer is not whole, but for those of a killed router."""
    names = only.split(",")
    if unknown := set(names) - EVENTS.keys():
        raise typer.BadParameter(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(EVENTS)}")
    seen = asyncio.run(_run(names, per_s, tokens, rest_s, continues=continues))
    typer.echo("\n".join(table(seen)))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in seen], indent=1) + "\n")
    raise SystemExit(not all(one.answers.all_whole for one in seen))


if __name__ == "__main__":
    typer.run(main)
