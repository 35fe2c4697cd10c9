"""Starts mock engines and routers as child processes, and stops them.

Output goes to files. Leaving the `async with` block always stops the child. If a child fails, the error shows the end
of its log.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import httpx

from loadtest.commands.mock_engine_command import TOKENIZER
from router.config.load import shipped
from router.config.models import load_priors, prior_speed
from router.config.schema import CostPrior

READY_TIMEOUT_S = 120.0
"""A router whose self-test of a pod fails, because the machine is busy, repeats it after 30 to 60 s."""
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
TAIL_LINES = 15

JSON_CALL = {"content-type": "application/json"}
"""Header that the admin listener requires of every call that changes something."""

T = TypeVar("T")


class ChildError(Exception):
    """A child process did not start or died. The message shows its log and command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A fleet of mock engines: number, speed (a row of config/models) and KV size."""

    pods: int
    num_blocks: int
    block_size_tokens: int = 16
    model: str = "demo"
    speed_model: str = "llama-3.1-70b"
    speed_hardware: str = "h100x4"
    time_scale: float = 1.0
    """Factor on all times of the engines: 10 is ten times slower."""
    continues: bool = False
    """Whether the router continues broken streams."""


@dataclass(frozen=True, slots=True)
class Child:
    """One child process; `output` is its stdout, `log` its stderr."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    async def until(self, ready: Callable[[], Awaitable[T | None]]) -> T:
        """Wait until `ready` returns a value. Raises `ChildError` if the child dies or the timeout expires."""
        deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline_s:
            self.check_alive()
            if (found := await ready()) is not None:
                return found
            await asyncio.sleep(POLL_S)
        raise ChildError(self._failure(f"was not ready after {READY_TIMEOUT_S:g} s"))

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise ChildError(self._failure(f"ended with exit code {self.process.returncode}"))

    def _failure(self, what: str) -> str:
        lines = [*self.output.read_text().splitlines(), *self.log.read_text().splitlines()][-TAIL_LINES:]
        command = " ".join(map(str, self.process.args)) if isinstance(self.process.args, list) else ""
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (no output)"
        return f"{self.name} {what}. End of its log:\n{tail}\nTo reproduce, run:\n  {command}"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder for the files of child processes, removed at the end. Raises `ChildError` if there is none."""
    try:
        folder = TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ChildError(f"no folder for temporary files: {error}; set TMPDIR to a writable folder") from error
    with folder as name:
        yield Path(name)


def engine_arguments(plan: FleetPlan, port: int) -> list[str]:
    """The command of one mock engine of the plan."""
    return [
        *("mock-engine", "--port", str(port), "--model", plan.model),
        *("--speed-model", plan.speed_model, "--speed-hardware", plan.speed_hardware),
        *("--block-size", str(plan.block_size_tokens), "--num-blocks", str(plan.num_blocks)),
        *("--time-scale", str(plan.time_scale)),
    ]


@asynccontextmanager
async def mock_fleet(plan: FleetPlan, folder: Path, options: Sequence[str] = ()) -> AsyncIterator[list[str]]:
    """Run mock engines, with more `options` of the command; yields their URLs."""
    arguments = engine_arguments(plan, 0)
    with child("fleet", [*arguments, "--count", str(plan.pods), *options], folder) as fleet:

        async def announced() -> list[str] | None:
            lines = fleet.output.read_text().splitlines()
            return [json.loads(line)["url"] for line in lines] if len(lines) == plan.pods else None

        urls = await fleet.until(announced)
        try:
            yield urls
        finally:
            fleet.check_alive()  # its end is the better explanation of an error in the block


class RouterUrls(NamedTuple):
    public: str
    admin: str


@asynccontextmanager
async def running_router(policy: str, pods: Sequence[str], plan: FleetPlan, folder: Path) -> AsyncIterator[RouterUrls]:
    """Run a router in front of `pods`; yields its URLs once it trusts them all."""
    config = router_config(pods, plan) | {"policy": policy}
    async with configured_router(f"router-{policy}", config, folder) as urls:
        yield urls


@asynccontextmanager
async def configured_router(
    name: str,
    config: Mapping[str, Any],
    folder: Path,
    port: int = 0,
    admin_port: int = 0,
    options: Sequence[str] = (),
) -> AsyncIterator[RouterUrls]:
    """Run a router with this configuration and more `options` of `serve`; yields its URLs once it trusts all its pods.
    Port 0: a free port."""
    port, admin_port = port or free_port(), admin_port or free_port()
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=2))
    urls = RouterUrls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    arguments = ["serve", "--config", str(path), "--port", str(port), "--admin-port", str(admin_port), *options]
    async with httpx.AsyncClient(base_url=urls.admin, trust_env=False) as client:
        with child(name, arguments, folder) as router:

            async def all_trusted() -> bool | None:
                return await all_pods_trusted(client, len(config["pods"]), continues="continuation" in config) or None

            await router.until(all_trusted)
            try:
                yield urls
            finally:
                router.check_alive()


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the calling task, as Ctrl-C does, so that children are stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def clear_caches(pods: Sequence[str]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for url in pods:
            (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()


def free_port(preferred: int = 0) -> int:
    """`preferred` if it is free, else any free port.

    It is below the ephemeral ports: one of those could be given to a connection before its server binds it.
    """
    drawn = (SystemRandom().randrange(10_000, 32_768) for _ in range(100))
    for port in (preferred or next(drawn), *drawn):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ChildError("no TCP port is free on 127.0.0.1")


def router_config(pods: Sequence[str], plan: FleetPlan) -> dict[str, Any]:
    model = {
        "name": plan.model,
        "tokenizer": TOKENIZER.path,
        "chat_template": TOKENIZER.chat_template,
        "block_size_tokens": plan.block_size_tokens,
        "cost": {"model": plan.speed_model, "hardware": plan.speed_hardware},
    }
    listed = [{"url": url, "id": f"pod-{n}"} for n, url in enumerate(pods)]
    config = {"models": [model], "pods": listed}
    return {**config, "continuation": {"enabled": True}} if plan.continues else config


def priced_config(pods: Sequence[str], plan: FleetPlan, factor: float = 1.0) -> dict[str, Any]:
    """The same for a router that knows the speed of its pods, or is wrong by a factor."""
    cost = CostPrior(model=plan.speed_model, hardware=plan.speed_hardware)
    true = prior_speed(load_priors(shipped("config") / "models"), cost)
    speed = asdict(true.scaled(factor * plan.time_scale))
    config = router_config(pods, plan)
    return {**config, "pods": [{**pod, "speed": speed} for pod in config["pods"]]}


async def all_pods_trusted(client: httpx.AsyncClient, pods: int, *, continues: bool = False) -> bool:
    """Whether the router has this number of pods and trusts them all, with `continues` also to continue streams.
    `client`: of its admin listener."""
    try:
        answer = await client.get("/admin/pods")
    except httpx.TransportError:
        return False
    found = answer.json() if answer.status_code == 200 else []
    is_proven = not continues or all(pod["continues"] for pod in found)
    is_trusted = all(pod["state"] == "ready" and pod["trust"] == "trusted" for pod in found)
    return len(found) == pods and is_trusted and is_proven


def child(name: str, arguments: Sequence[str], folder: Path) -> AbstractContextManager[Child]:
    return logged_process(name, [sys.executable, "-m", "router.cli", *arguments], folder)


@contextmanager
def logged_process(name: str, command: Sequence[str], folder: Path, **options: Any) -> Iterator[Child]:
    """Run a command in its own session, so that Ctrl-C in the terminal does not reach it. `options` are of `Popen`."""
    output, log = folder / f"{name}.out", folder / f"{name}.log"
    with output.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, **options)
    try:
        yield Child(name, process, output, log)
    finally:
        stop_process(process)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """End a process with SIGTERM, or with SIGKILL if that takes too long. Returns when it has ended."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
