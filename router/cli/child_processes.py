"""How are a fleet of mock engines and a router brought up beside this program, and surely taken down again?

Each is a child process whose output goes to a file. Leaving the `async with` ends it, for whatever reason; a child that
does not come up is an error that shows the end of what it wrote. This file never sends load.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from router.cli.mock_engine_command import TOKENIZER

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0
POLL_S = 0.05
TAIL_LINES = 15

T = TypeVar("T")


class StageError(Exception):
    """A child did not come up or died; the message shows its log and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The mock engines: how many, how fast (a row of config/models), with how much KV."""

    pods: int
    num_blocks: int
    block_size_tokens: int = 16
    model: str = "demo"
    speed_model: str = "llama-3.1-70b"
    speed_hardware: str = "h100x4"
    time_scale: float = 1.0
    """10 is ten times slower."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process of ours; `output` is what it prints, `log` what it complains."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    async def until(self, ready: Callable[[], Awaitable[T | None]]) -> T:
        """Wait for `ready` to return something. Raises `StageError` if the child dies or takes too long."""
        deadline_s = asyncio.get_running_loop().time() + READY_WITHIN_S
        while asyncio.get_running_loop().time() < deadline_s:
            self.check_alive()
            if (found := await ready()) is not None:
                return found
            await asyncio.sleep(POLL_S)
        raise StageError(self._complaint(f"was not ready after {READY_WITHIN_S:g} s"))

    def check_alive(self) -> None:
        """Raises `StageError` if it ended by itself."""
        if self.process.poll() is not None:
            raise StageError(self._complaint(f"ended with exit code {self.process.returncode}"))

    def _complaint(self, what: str) -> str:
        lines = [*self.output.read_text().splitlines(), *self.log.read_text().splitlines()][-TAIL_LINES:]
        command = " ".join(map(str, self.process.args)) if isinstance(self.process.args, list) else ""
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)"
        return f"the {self.name} {what}. The end of its log:\n{tail}\nTo see it alone, run:\n  {command}"


@asynccontextmanager
async def mock_fleet(plan: FleetPlan, folder: Path) -> AsyncIterator[list[str]]:
    """The URLs of running engines."""
    arguments = [
        *("mock-engine", "--count", str(plan.pods), "--port", "0", "--model", plan.model),
        *("--speed-model", plan.speed_model, "--speed-hardware", plan.speed_hardware),
        *("--block-size", str(plan.block_size_tokens), "--num-blocks", str(plan.num_blocks)),
        *("--time-scale", str(plan.time_scale)),
    ]
    with child("fleet", arguments, folder) as fleet:

        async def announced() -> list[str] | None:
            lines = fleet.output.read_text().splitlines()
            return [json.loads(line)["url"] for line in lines] if len(lines) == plan.pods else None

        urls = await fleet.until(announced)
        try:
            yield urls
        finally:
            fleet.check_alive()  # its death explains better than the errors that followed from it


@asynccontextmanager
async def running_router(
    policy: str, pods: Sequence[str], plan: FleetPlan, folder: Path, port: int = 0
) -> AsyncIterator[str]:
    """The URL of a router in front of `pods` that trusts them all; port 0 is any free one."""
    port = port or free_port()
    config = folder / f"router-{policy}.yaml"
    config.write_text(json.dumps(router_config(pods, plan), indent=2))
    url = f"http://127.0.0.1:{port}"
    arguments = ["serve", "--config", str(config), "--policy", policy, "--port", str(port)]
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with child(f"router-{policy}", arguments, folder) as router:

            async def all_trusted() -> bool | None:
                return await all_pods_trusted(client, len(pods)) or None

            await router.until(all_trusted)
            try:
                yield url
            finally:
                router.check_alive()


def end_on_sigterm() -> None:
    """SIGTERM cancels the calling task, as Ctrl-C does, so that no child outlives us."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def clear_caches(pods: Sequence[str]) -> None:
    """Let every engine forget its KV."""
    async with httpx.AsyncClient(trust_env=False) as client:
        for url in pods:
            (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()


def free_port(preferred: int = 0) -> int:
    """`preferred` if it is free, else any that is."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise StageError("no TCP port is free on 127.0.0.1")


def router_config(pods: Sequence[str], plan: FleetPlan) -> dict[str, Any]:
    """A router's configuration for these pods, as it stands in a file."""
    model = {
        "name": plan.model,
        "tokenizer": TOKENIZER.path,
        "chat_template": TOKENIZER.chat_template,
        "block_size_tokens": plan.block_size_tokens,
        "cost": {"model": plan.speed_model, "hardware": plan.speed_hardware},
    }
    return {"models": [model], "pods": [{"url": url, "id": f"pod-{n}"} for n, url in enumerate(pods)]}


async def all_pods_trusted(client: httpx.AsyncClient, pods: int) -> bool:
    """Does the router at the end of `client` know so many pods, and trust all of them?"""
    try:
        answer = await client.get("/admin/pods")
    except httpx.TransportError:
        return False
    found = answer.json() if answer.status_code == 200 else []
    return len(found) == pods and all(pod["state"] == "ready" and pod["trust"] == "trusted" for pod in found)


@contextmanager
def child(name: str, arguments: Sequence[str], folder: Path) -> Iterator[Child]:
    """A `warmroute` of its own process group: Ctrl-C reaches only us, and we end it."""
    output, log = folder / f"{name}.out", folder / f"{name}.log"
    with output.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.cli", *arguments], stdout=out, stderr=err, start_new_session=True
        )
    try:
        yield Child(name, process, output, log)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
