"""How do a load generator, a router and pods that cost next to nothing come together?

The C programs `lg.c` and `mock.c` of a folder are compiled, mocks run many in a process, and one router of any make
stands before them; `DIRECT` is none at all. Ours trusts its pods unseen (`probes.self_test: false`), because the mocks'
answers name 300 prompt tokens whatever was asked. This file measures nothing.
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
from typing import Any

import httpx

from loadtest.bodies import MODEL
from loadtest.peers.catalog import PEERS, Peer, Place, Pod, answers
from loadtest.peers.processes import launched, used
from router.cli.child_processes import Child, FleetPlan, all_pods_trusted, free_port, router_config
from router.cli.mock_engine_command import TOKENIZER
from router.prompt.tokenizer import Tokenizer, load_tokenizer

PODS = 4
MOST_PORTS = 50
"""Of one process of mocks."""
PLAN = FleetPlan(pods=PODS, num_blocks=10_000, model=MODEL)
OURS = "warmroute"
DIRECT = "direct"
"""In place of a router's name: the generator talks to the first mock itself."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The built programs, and a folder for the bodies that the generator sends."""

    mock: Path
    generator: Path
    folder: Path

    def bodies(self, name: str) -> Path:
        """The file of that load's bodies."""
        return self.folder / f"{name}.bin"

    def command(self, title: str, port: int, *options: object) -> list[str]:
        """The generator, with prompts that were never sent before."""
        parts = [self.generator, "-p", port, "-f", self.bodies(title), "-U", time.time_ns(), *options]
        return list(map(str, parts))

    def run(self, title: str, port: int, *, connections: int, requests: int, options: Sequence[object] = ()) -> Answer:
        """Send it all; what the generator saw. Raises `RuntimeError` where a request failed."""
        command = self.command(title, port, "-c", connections, "-n", requests, *options)
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        return answered(title, said.stdout, requests)


Answer = dict[str, Any]
"""As the generator prints it: times in microseconds."""


def answered(title: str, said: str, requests: int) -> Answer:
    """What the generator has said. Raises `RuntimeError` where a request failed."""
    answer: Answer = json.loads(said)
    if answer["errs"] or answer["done"] != requests:
        raise RuntimeError(f"{title}: {answer}")
    return answer


def build(bench: Path, folder: Path) -> Rig:
    """Compile both programs."""
    for name in ("mock", "lg"):
        subprocess.run(["cc", "-O2", "-w", "-o", folder / name, bench / f"{name}.c"], check=True)
    return Rig(folder / "mock", folder / "lg", folder)


def demo_tokenizer() -> Tokenizer:
    """That of the pods."""
    return load_tokenizer(TOKENIZER)


@dataclass(frozen=True, slots=True)
class Mocks:
    """Running mock pods."""

    ports: Sequence[int]

    def told(self, *, chunks: int, chunk_pause_us: int = 0) -> None:
        """How they stream from now on."""
        self._ask(f"_ctl?chunks={chunks}&delay_us={chunk_pause_us}")

    def counted(self, name: str) -> int:
        """The sum over them of one of their counts: `req`, `stream` or `abort`."""
        return sum(port[name] for answer in self._ask("_stats") for port in answer.json()["ports"])

    def _ask(self, path: str) -> list[httpx.Response]:
        """Each process; one that has just begun does not listen at once."""
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            urls = [f"http://127.0.0.1:{port}/{path}" for port in self.ports[::MOST_PORTS]]
            return [client.get(url).raise_for_status() for url in urls]


@contextmanager
def mocks(program: Path, pods: int = PODS) -> Iterator[Mocks]:
    """As many as one process takes in each."""
    ports: set[int] = set()
    while len(ports) < pods:  # a port that is free may be found twice
        ports.add(free_port())
    listed = sorted(ports)
    with ExitStack() as running:
        for first in range(0, pods, MOST_PORTS):
            running.enter_context(_ended([program, *map(str, listed[first : first + MOST_PORTS])]))
        yield Mocks(listed)


@contextmanager
def _ended(command: Sequence[str | Path]) -> Iterator[None]:
    """A process that runs until the block is left."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Routed:
    """Where requests go to; `session` is the router's process tree, None where there is none."""

    port: int
    session: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu_s(self) -> float:
        """Used since it began."""
        return used(self.session).cpu_s if self.session else 0.0

    @property
    def rss_bytes(self) -> int:
        """At this moment."""
        return used(self.session).rss_bytes if self.session else 0


@contextmanager
def routed(
    name: str,
    pods: Mocks,
    folder: Path,
    limits: Mapping[str, int] | None = None,
    program: Sequence[str] = ("-m", "router.cli", "serve"),
) -> Iterator[Routed]:
    """The router of that name before the pods, until the block is left; `limits` are those of our configuration, and
    `program` is what Python runs of ours."""
    if name == DIRECT:
        yield Routed(pods.ports[0])
        return
    folder.mkdir()
    place = Place(free_port(), [Pod(f"http://127.0.0.1:{port}", "", "") for port in pods.ports], PLAN, folder)
    ours = Peer(None, partial(_warmroute, limits or {}, program), all_pods_trusted)
    peer = ours if name == OURS else {**PEERS, **FLOORS}[name]
    with launched(name, peer.command(place), folder, peer.variables) as child:
        to = Routed(place.port, child.process.pid)
        asyncio.run(_until_ready(child, peer, to.url))
        yield to


def _warmroute(limits: Mapping[str, int], program: Sequence[str], place: Place) -> list[str]:
    path = place.folder / "warmroute.yaml"
    config = router_config(place.urls, place.plan) | {"probes": {"self_test": False}, "limits": limits}
    path.write_text(json.dumps(config))
    return [sys.executable, *program, "--config", str(path), "--port", str(place.port)]


def _floor(options: Sequence[str], place: Place) -> list[str]:
    script = Path(__file__).with_name("floor.py")
    return [sys.executable, str(script), "--port", str(place.port), *options, *place.urls]


FLOORS: Mapping[str, Peer] = {
    "floor": Peer(None, partial(_floor, []), answers),
    "floor-tokens": Peer(None, partial(_floor, ["--tokens"]), answers),
}
"""What Python needs for nothing but passing requests on: `floor.py`."""


async def _until_ready(child: Child, peer: Peer, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def ready() -> bool | None:
            try:
                return await peer.ready(client, PODS) or None
            except httpx.TransportError:
                return None

        await child.until(ready)
