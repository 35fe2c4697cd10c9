"""Builds and runs the C load generator and mock pods, with one router between them.

Compiles `lg.c` and `mock.c` of a folder, by default `loadtest/bench`; many mocks run in one process. `DIRECT` is no
router. Our router is that of this checkout or of another. It runs without the self-test (`probes.self_test: false`),
because the mocks report 300 prompt tokens for every request.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.bench.bodies import MODEL
from loadtest.bench.checkout import HERE, Checkout
from loadtest.commands.child_processes import Child, FleetPlan, all_pods_trusted, free_port, router_config
from loadtest.peers.catalog import PEERS, LaunchPlan, Peer, Pod, ports, responds
from loadtest.peers.processes import launch, process_usage

BENCH = Path(__file__).parent
BenchFolder = Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")]
PODS = 4
MAX_PORTS = 50
"""Per mock process."""
PLAN = FleetPlan(pods=PODS, num_blocks=10_000, model=MODEL)
OURS = "warmroute"
DIRECT = "direct"
"""In place of a router's name: requests go directly to the first mock."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The compiled programs, and the folder of request bodies."""

    mock: Path
    generator: Path
    folder: Path

    def bodies(self, name: str) -> Path:
        """File with the bodies of a load."""
        return self.folder / f"{name}.bin"

    def command(self, title: str, port: int, *options: object) -> list[str]:
        """Command line of the generator, with prompts that were never sent before."""
        parts = [self.generator, "-p", port, "-f", self.bodies(title), "-U", time.time_ns(), *options]
        return list(map(str, parts))

    def run(
        self,
        title: str,
        port: int,
        *,
        connections: int,
        requests: int,
        options: Sequence[object] = (),
        max_errors: int = 0,
    ) -> GeneratorStats:
        """Run the generator to its end. Raises `RuntimeError` if more than `max_errors` requests failed."""
        command = self.command(title, port, "-c", connections, "-n", requests, *options)
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        return check_stats(title, said.stdout, requests, max_errors)


GeneratorStats = dict[str, Any]
"""Output of the generator; times are in microseconds."""


def check_stats(title: str, said: str, requests: int, max_errors: int = 0) -> GeneratorStats:
    """Parse the generator's output. Raises `RuntimeError` if more than `max_errors` requests failed."""
    answer: GeneratorStats = json.loads(said)
    if answer["errs"] > max_errors or answer["done"] != requests:
        raise RuntimeError(f"{title}: {answer}")
    return answer


def build(bench: Path, folder: Path) -> Rig:
    """Compile both programs."""
    for name in ("mock", "lg"):
        subprocess.run(["cc", "-O2", "-w", "-o", folder / name, bench / f"{name}.c"], check=True)
    return Rig(folder / "mock", folder / "lg", folder)


@dataclass(frozen=True, slots=True)
class Mocks:
    """Running mock pods."""

    ports: Sequence[int]

    def configure(
        self, *, chunks: int, chunk_pause_us: int = 0, usage: bool = False, token_id: int = 0, mixed: bool = False
    ) -> None:
        """Set how all mocks stream. `usage`: whether streams have it where it is asked for; `token_id`: that of each
        token, for streams whose ids are asked for, or 0 for mocks that do not continue streams. `mixed`: each second
        mock has vLLM's front end in Rust."""
        self._get(f"_ctl?chunks={chunks}&delay_us={chunk_pause_us}&usage={usage:d}&ids={token_id}&rust={mixed:d}")

    def count(self, name: str) -> int:
        """Sum of one counter over all mocks: `req`, `stream` or `abort`; streams with `usage`, or with `ids`."""
        return sum(port[name] for answer in self._get("_stats") for port in answer.json()["ports"])

    def _get(self, path: str) -> list[httpx.Response]:
        """Send to each process; retries until it listens."""
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            urls = [f"http://127.0.0.1:{port}/{path}" for port in self.ports[::MAX_PORTS]]
            return [client.get(url).raise_for_status() for url in urls]


@contextmanager
def mocks(program: Path, pods: int = PODS) -> Iterator[Mocks]:
    """Run mocks, `MAX_PORTS` per process."""
    ports: set[int] = set()
    while len(ports) < pods:  # a free port may be found twice
        ports.add(free_port())
    listed = sorted(ports)
    with ExitStack() as running:
        for first in range(0, pods, MAX_PORTS):
            running.enter_context(_process([program, *map(str, listed[first : first + MAX_PORTS])]))
        yield Mocks(listed)


@contextmanager
def _process(command: Sequence[str | Path]) -> Iterator[None]:
    """Run a process inside the block."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """Where requests go. `session` identifies the router's process tree; None if there is none."""

    port: int
    session: int | None = None
    admin_port: int = 0
    """The port of our own router."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def cpu_s(self) -> float:
        """CPU seconds since its start."""
        return process_usage(self.session).cpu_s if self.session else 0.0

    @property
    def rss_bytes(self) -> int:
        """Current memory."""
        return process_usage(self.session).rss_bytes if self.session else 0


@contextmanager
def launch_router(
    name: str,
    pods: Mocks,
    folder: Path,
    limits: Mapping[str, int] | None = None,
    program: Sequence[str] = ("-m", "router.cli", "serve"),
    settings: Mapping[str, object] | None = None,
    checkout: Checkout = HERE,
) -> Iterator[RunningRouter]:
    """Run the router `name` in front of the pods. `limits` and `settings` are for our configuration, `program` are the
    Python arguments of our router, `checkout` is its tree. Raises `UnknownSettings` if it is too old for them."""
    if name == DIRECT:
        yield RunningRouter(pods.ports[0])
        return
    folder.mkdir()
    place = LaunchPlan(free_port(), [Pod(f"http://127.0.0.1:{port}", "", "") for port in pods.ports], PLAN, folder)
    ours = Peer(
        None,
        partial(_warmroute, {"limits": limits or {}, **(settings or {})}, program, checkout),
        all_pods_trusted,
        checkout.variables,
        has_admin_port=checkout.has_admin_port,
    )
    peer = ours if name == OURS else {**PEERS, **FLOORS}[name]
    with launch(name, peer.command(place), folder, peer.variables) as child:
        to = RunningRouter(place.port, child.process.pid, place.admin_port if peer.has_admin_port else place.port)
        asyncio.run(_until_ready(child, peer, peer.status_url(place)))
        yield to


def _warmroute(
    settings: Mapping[str, object], program: Sequence[str], checkout: Checkout, place: LaunchPlan
) -> list[str]:
    path = place.folder / "warmroute.yaml"
    config = router_config(place.urls, place.plan) | {"probes": {"self_test": False}, **settings}
    path.write_text(json.dumps(checkout.known(config)))
    listeners = ports(place) if checkout.has_admin_port else ["--port", str(place.port)]
    return [str(checkout.python), *program, "--config", str(path), *listeners]


def _floor(options: Sequence[str], place: LaunchPlan) -> list[str]:
    script = Path(__file__).with_name("floor.py")
    return [sys.executable, str(script), "--port", str(place.port), *options, *place.urls]


FLOORS: Mapping[str, Peer] = {
    "floor": Peer(None, partial(_floor, []), responds),
    "floor-tokens": Peer(None, partial(_floor, ["--tokens"]), responds),
}
"""Minimal Python proxies: `floor.py`."""


async def _until_ready(child: Child, peer: Peer, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def ready() -> bool | None:
            try:
                return await peer.ready(client, PODS) or None
            except httpx.TransportError:
                return None

        await child.until(ready)
