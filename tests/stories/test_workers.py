"""Several worker processes serve as one router, in front of mock engines in the test process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.cli.child_processes import JSON_CALL, free_port, logged_process
from router.sim.mock.faults import Fault, FaultKind
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock_engine import MockEngine, running_engines
from tests.stories.conftest import DEADLINE_S, SOURCE, SPEED, TEMPLATE
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

WORKERS = 2


@dataclass(frozen=True)
class Worker:
    """Clients of one worker's listeners."""

    public: httpx.AsyncClient
    admin: httpx.AsyncClient


@dataclass
class Router:
    """The parent process of the workers."""

    process: asyncio.subprocess.Process
    url: str
    admin_url: str
    engines: list[MockEngine]
    log: Path

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[dict[int, Worker]]:
        """The workers by process id."""
        async with AsyncExitStack() as stack:
            public = await self._connected(stack, self.url, "/livez")
            admin = await self._connected(stack, self.admin_url, "/readyz")
            yield {pid: Worker(client, admin[pid]) for pid, client in public.items()}

    async def _connected(self, stack: AsyncExitStack, url: str, path: str) -> dict[int, httpx.AsyncClient]:
        """A client per worker: opens connections until each worker has one."""
        found: dict[int, httpx.AsyncClient] = {}
        while len(found) < WORKERS:
            transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=1))
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, transport=transport, timeout=DEADLINE_S, headers=JSON_CALL)
            )
            found.setdefault(self._server_of(await client.get(path)), client)
        return found

    def _server_of(self, answer: httpx.Response) -> int:
        """Process id of the worker at the other end of the connection."""
        stream = answer.extensions["network_stream"]
        client_port, port = stream.get_extra_info("client_addr")[1], stream.get_extra_info("server_addr")[1]
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = f":{port:04X}", f":{client_port:04X}"
        inode = next(row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1]))
        return next(pid for pid in self.workers() if f"socket:[{inode}]" in _descriptors(pid))


def _descriptors(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(each.readlink()))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
async def router(engine_config: Callable[..., MockEngineConfig], tmp_path: Path) -> AsyncIterator[Router]:
    """See `running_router`."""
    async with running_router(engine_config, tmp_path) as found:
        yield found


@asynccontextmanager
async def running_router(
    engine_config: Callable[..., MockEngineConfig], folder: Path, **settings: Any
) -> AsyncIterator[Router]:
    """Two workers in front of two engines with real step times; ready and trusted. `settings`: of its configuration."""
    config, log = folder / "router.json", folder / "router.log"
    port, admin_port = free_port(), free_port()
    configs = [engine_config(time_scale=1.0)] * 2
    async with asyncio.timeout(DEADLINE_S), running_engines(configs) as engines:
        model = {"name": "demo", "tokenizer": SOURCE.path, "chat_template": TEMPLATE, "fast_tokenizer": False}
        speed = {name: getattr(SPEED, name) for name in SPEED.__dataclass_fields__}
        parts = {
            "listen": {"port": port, "workers": WORKERS},
            "admin": {"port": admin_port},
            "models": [model],
            "pods": [{"url": engine.url, "speed": speed} for engine in engines],
            "probes": {"health_interval_s": 0.1, "load_interval_s": 0.05},
            "limits": {"drain_delay_s": 0.0, "retries": 0},
            **settings,
        }
        config.write_text(json.dumps(parts))
        with log.open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.cli", "serve", "--config", str(config)), stderr=written
            )
        router = Router(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", engines, log)
        try:
            await until_up(router)
            yield router
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await process.wait()


async def until_up(router: Router) -> None:
    """Wait until both workers serve and trust both pods."""
    async with httpx.AsyncClient(base_url=router.admin_url) as client:
        while True:
            assert router.process.returncode is None, router.log.read_text()
            try:
                if b"warmroute_workers 2.0" in (await client.get("/metrics")).content:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    async with router.clients() as clients:
        for worker in clients.values():
            while not all(pod["trust"] == "trusted" for pod in await pods(worker)):
                await asyncio.sleep(0.05)


async def pods(worker: Worker) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await worker.admin.get("/admin/pods")).json()
    return found


async def chat(worker: Worker, about: str, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": opening(about), "max_tokens": 4, **fields}
    return await worker.public.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def stream(worker: Worker, about: str, max_tokens: int) -> AsyncIterator[httpx.Response]:
    """A stream that has started."""
    body = {"model": "demo", "messages": opening(about), "max_tokens": max_tokens, "stream": True}
    async with worker.public.stream("POST", "/v1/chat/completions", json=body) as answer:
        yield answer


async def seen(worker: Worker, **wanted: Any) -> list[str]:
    """Wait until this worker sees pods with these values; returns their ids."""
    while True:
        found = [pod["id"] for pod in await pods(worker) if all(pod[key] == value for key, value in wanted.items())]
        if found:
            return found
        await asyncio.sleep(0.005)


async def test_two_workers_serve_as_one_router_until_both_are_drained(router: Router) -> None:
    """Predictions, decisions, leases, admin commands and ejections of one worker reach the other; metrics are sums."""
    async with router.clients() as clients:
        one, two = clients.values()
        await one_index_and_journal(one, two)
        await one_page(router)
        async with stream(one, "winds", 200) as answer:
            pod = answer.headers["x-warmroute-pod"]
            assert await seen(two, in_flight=1) == [pod]
        await seen(two, id=pod, in_flight=0)
        await two.admin.post(f"/admin/pods/{pod}/drain")
        assert await seen(one, state="draining") == [pod]
        await one.admin.post(f"/admin/pods/{pod}/undrain")
        for worker in (one, two):
            await seen(worker, id=pod, state="ready")
        await one_breaker(router, one, two)
        router.process.send_signal(signal.SIGHUP)
        for worker in (one, two):
            while b'warmroute_policy_reloads_total{result="ok"}' not in (await worker.admin.get("/metrics")).content:
                await asyncio.sleep(0.01)
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(stream(worker, "tides", 100)) for worker in (one, two)]
            router.process.send_signal(signal.SIGTERM)
            for answer in streams:
                assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
    assert await router.process.wait() == 0


async def one_index_and_journal(one: Worker, two: Worker) -> None:
    """Each worker serves one request; both have both in index and journal."""
    first, again = await chat(one, "tides"), await chat(two, "tides")
    assert first.headers["x-warmroute-pod"] == again.headers["x-warmroute-pod"]
    assert int(again.headers["x-warmroute-cached-tokens"]) > int(first.headers["x-warmroute-cached-tokens"])
    for worker in (one, two):
        text = (await worker.admin.get("/metrics")).text
        assert 'warmroute_requests_total{endpoint="/v1/chat/completions",model="demo",result="ok"} 2.0' in text
        for answer in (first, again):
            request_id = answer.headers["x-request-id"]
            explained = await worker.admin.get(f"/admin/explain/{request_id}")
            assert explained.json()["explanation"]["request_id"] == request_id
        assert (await worker.admin.get("/admin/explain/none")).status_code == 404


async def one_page(router: Router) -> None:
    """Any worker shows the requests and decisions of both."""
    client = httpx.AsyncClient(base_url=router.admin_url, timeout=DEADLINE_S)
    async with client, asyncio.timeout(DEADLINE_S), client.stream("GET", "/ui/events") as answer:
        line = await anext(answer.aiter_lines())
    shown = json.loads(line.removeprefix("data: "))
    assert shown["workers"] == WORKERS
    assert len(shown["decisions"]) == WORKERS
    assert sum(numbers[0] for _, numbers in shown["metrics"]["warmroute_class_requests"]) == WORKERS


async def one_breaker(router: Router, one: Worker, two: Worker) -> None:
    """A pod that fails several clients at one worker is ejected at the other, then both readmit it."""
    for engine in router.engines:
        engine.inject(Fault(kind=FaultKind.RESET, count=None))
    tenants = itertools.cycle("xy")
    while not any(pod["state"] == "ejected" for pod in await pods(one)):
        one.public.headers["x-tenant-id"] = next(tenants)
        await chat(one, "tides")
    ejected = await seen(two, state="ejected")
    for engine in router.engines:
        engine.faults.clear()
    for worker in (one, two):
        for pod in ejected:
            await seen(worker, id=pod, state="ready")


async def test_a_killed_worker_loses_only_its_requests_and_a_killed_parent_stops_all(router: Router) -> None:
    """The other worker serves meanwhile; the replacement has the admin commands."""
    async with router.clients() as clients:
        (victim_pid, victim), (_, other) = clients.items()
        async with stream(other, "tides", 200) as running, stream(victim, "winds", 5000) as lost:
            drained = running.headers["x-warmroute-pod"]
            await send_command(router, f"/admin/pods/{drained}/drain")
            os.kill(victim_pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost.aread()
            assert (await running.aread()).endswith(b"data: [DONE]\n\n")
        for pod in await pods(other):
            await seen(other, id=pod["id"], in_flight=0)
        assert (await chat(other, "deserts")).status_code == 200
        while len(router.workers()) < WORKERS or victim_pid in router.workers():
            await asyncio.sleep(0.01)
    async with router.clients() as clients:
        for worker in clients.values():
            assert await seen(worker, state="draining") == [drained]
            answer = await chat(worker, "deserts")
            assert answer.headers["x-warmroute-pod"] != drained
            assert int(answer.headers["x-warmroute-cached-tokens"]) > 0
    workers = router.workers()
    router.process.kill()
    await router.process.wait()
    while any(map(_lives, workers)):
        await asyncio.sleep(0.02)


async def send_command(router: Router, order: str) -> None:
    """Send a command to any worker."""
    async with httpx.AsyncClient(base_url=router.admin_url, headers=JSON_CALL) as anybody:
        assert (await anybody.post(order)).status_code == 200


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_workers_start_with_a_long_tmpdir(tmp_path: Path) -> None:
    """Their sockets are then elsewhere."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    arguments = ["serve", "--port", str(free_port()), "--workers", "2"]
    command = [sys.executable, "-m", "router.cli", *arguments, "--admin-port", str(free_port())]
    with logged_process("router", command, tmp_path, env={**os.environ, "TMPDIR": str(long)}) as router:

        async def serving() -> bool | None:
            return '"serving"' in router.log.read_text() or None

        await router.until(serving)
    assert "Traceback" not in router.log.read_text()
