"""What does a request cost us, and what does it cost others?

    python loadtest/hotpath.py --bench BENCH                             # mock.c and lg.c lie in BENCH
    python loadtest/hotpath.py --bench BENCH --routers warmroute,nginx,sglang-router --rounds 3

CPU microseconds of the router's whole process tree (utime + stime) for each request, or each streamed chunk, while a C
generator keeps it busy in front of four C mock upstreams that cost next to nothing. Medians over rounds in which the
routers take turns.

The mock's answers name 300 prompt tokens whatever was asked, so that no self-test could ever trust it: the router's
configuration has `feeds.parity: false`, which trusts every pod. So each prompt is really rendered, tokenized (with the
tokenizer of DeepSeek), hashed, matched with what was sent before (the mock publishes no events) and priced by
`cost_aware`; a run whose predictions say that this did not happen fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.bodies import MODEL, Chat, Prose, fresh_chats, packed, warm_chats
from loadtest.peers.catalog import PEERS, Peer, Place, Pod
from loadtest.peers.processes import launched, used
from router.cli.mock_engine import TOKENIZER
from router.cli.stage import Child, FleetPlan, all_pods_trusted, free_port, router_config
from router.prompt.tokenizer import load_tokenizer

PODS = 4
PLAN = FleetPlan(pods=PODS, num_blocks=10_000, model=MODEL)
CHUNKS = 64
"""Of each streamed answer."""
OURS = "warmroute"
NOTHING = (0.0, 0.02)
"""The template's first tokens are shared."""


@dataclass(frozen=True, slots=True)
class Load:
    """One column of the table. `cached`: what part of the prompts our router must expect in caches, least and most."""

    chats: Callable[[Prose, int, int], Iterator[Chat]]
    tokens: int
    requests: int
    connections: int = 32
    stream: bool = False
    chunk_pause_us: int = 0
    cached: tuple[float, float] = (0.8, 1.0)

    @property
    def parts(self) -> int:
        """What the CPU is divided by: requests, or chunks."""
        return self.requests * (CHUNKS if self.stream else 1)


LOADS: Mapping[str, Load] = {
    "2K fresh": Load(fresh_chats, 2_000, 12_000, cached=NOTHING),
    "2K warm": Load(warm_chats, 2_000, 16_000),
    "8K fresh": Load(fresh_chats, 8_000, 5_000, cached=NOTHING),
    "8K warm": Load(warm_chats, 8_000, 8_000),
    "chunk": Load(warm_chats, 2_000, 1_024, connections=256, stream=True, chunk_pause_us=20_000),
    "chunk, burst": Load(warm_chats, 2_000, 4_096, stream=True),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one load through one router."""

    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Bench:
    """The built C programs and the bodies."""

    mock: Path
    generator: Path
    bodies: Path


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")],
    routers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = "warmroute",
    loads: Annotated[str, typer.Option(help=f"Of {'; '.join(LOADS)}; separated by semicolons.")] = ";".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the figures of every round here, as JSON.")] = None,
) -> None:
    """Compare CPU per request."""
    names, chosen = routers.split(","), {name: LOADS[name] for name in loads.split(";")}
    with TemporaryDirectory(prefix="warmroute-hotpath-") as temporary:
        folder = Path(temporary)
        built = build(bench, folder, chosen)
        with mocks(built.mock) as (ports, control):
            found = [
                {name: play(name, chosen, built, folder / f"{number}-{name}", ports, control) for name in names}
                for number in range(rounds)
            ]
    Console().print(table(found))
    if out is not None:
        rows = [
            {"round": number, "router": name, "load": title, **asdict(cost)}
            for number, one in enumerate(found)
            for name, costs in one.items()
            for title, cost in costs.items()
        ]
        out.write_text(json.dumps(rows, indent=1))


def build(bench: Path, folder: Path, loads: Mapping[str, Load]) -> Bench:
    """Compile both programs and write every load's bodies."""
    for name in ("mock", "lg"):
        subprocess.run(["cc", "-O2", "-w", "-o", folder / name, bench / f"{name}.c"], check=True)
    prose = Prose(load_tokenizer(TOKENIZER))
    for name, load in loads.items():
        chats = load.chats(prose, load.tokens, min(load.requests, 512))
        (folder / f"{name}.bin").write_bytes(packed(chats, stream=load.stream))
    return Bench(folder / "mock", folder / "lg", folder)


@contextmanager
def mocks(program: Path) -> Iterator[tuple[list[int], str]]:
    """Ports of running mock upstreams, and the URL that controls them all."""
    ports = [free_port() for _ in range(PODS)]
    process = subprocess.Popen([program, *map(str, ports)], start_new_session=True)
    try:
        yield ports, f"http://127.0.0.1:{ports[0]}/_ctl?chunks={CHUNKS}"
    finally:
        process.kill()
        process.wait()


def play(
    name: str, loads: Mapping[str, Load], bench: Bench, folder: Path, ports: Sequence[int], control: str
) -> dict[str, Cost]:
    """Every load through one router, from its start to its end."""
    folder.mkdir()
    pods = [Pod(f"http://127.0.0.1:{port}", "", "") for port in ports]
    place, peer = Place(free_port(), pods, PLAN, folder), _peer(name)
    url = f"http://127.0.0.1:{place.port}"
    with launched(name, peer.command(place), folder, peer.variables) as child:
        asyncio.run(_until_ready(child, peer, url))
        found = {}
        for title, load in loads.items():
            httpx.get(f"{control}&delay_us={load.chunk_pause_us}").raise_for_status()
            run(bench, title, replace(load, requests=load.requests // 8 + load.connections), place.port)  # warm-up
            predicted, before = Predicted.by(name, url), used(child.process.pid).cpu_s
            answer = run(bench, title, load, place.port)
            cpu_us = (used(child.process.pid).cpu_s - before) * 1e6 / load.parts
            if name == OURS:
                Predicted.by(name, url).check(predicted, load)
            found[title] = Cost(cpu_us, answer["rps"], answer["p50"], answer["p99"])
            print(f"{name}, {title}: {cpu_us:.1f} us, {answer['rps']:.0f} req/s", file=sys.stderr)
    return found


def run(bench: Bench, title: str, load: Load, port: int) -> dict[str, Any]:
    """Send it all; what the generator saw. Raises `RuntimeError` where a request failed."""
    command = [bench.generator, "-p", port, "-f", bench.bodies / f"{title}.bin", "-c", load.connections]
    command += ["-n", load.requests, "-U", time.time_ns(), *(["-s"] if load.stream else [])]
    said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(said.stdout)
    if answer["errs"] or answer["done"] != load.requests:
        raise RuntimeError(f"{title}: {answer}")
    return answer


def table(rounds: Sequence[Mapping[str, Mapping[str, Cost]]]) -> Table:
    """Medians over the rounds, a row a router."""
    titles = list(next(iter(rounds[0].values())))
    shown = Table("CPU us", *titles, title=f"medians of {len(rounds)}; in brackets requests/s")
    for name in rounds[0]:
        costs = [[one[name][title] for one in rounds] for title in titles]
        cells = [(_median(cost.cpu_us for cost in each), _median(cost.per_s for cost in each)) for each in costs]
        shown.add_row(name, *(f"{cpu_us:.1f} ({per_s:,.0f})" for cpu_us, per_s in cells))
    return shown


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


async def _until_ready(child: Child, peer: Peer, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def ready() -> bool | None:
            try:
                return await peer.ready(client, PODS) or None
            except httpx.TransportError:
                return None

        await child.until(ready)


def _peer(name: str) -> Peer:
    """Ourselves with pods that are trusted unseen; the others as they are."""
    return Peer(None, _warmroute, all_pods_trusted) if name == OURS else PEERS[name]


def _warmroute(place: Place) -> list[str]:
    path = place.folder / "warmroute.yaml"
    path.write_text(json.dumps({**router_config(place.urls, place.plan), "feeds": {"parity": False}}))
    return [sys.executable, "-m", "router.cli", "serve", "--config", str(path), "--port", str(place.port)]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What our router says of the prompts it has sent on."""

    prompt_tokens: float = 0
    cached_tokens: float = 0
    unread: float = 0

    @classmethod
    def by(cls, name: str, url: str) -> Predicted:
        """From its metrics; nothing where it is not ours."""
        text = httpx.get(f"{url}/metrics").text if name == OURS else ""
        names = ("prompt_tokens", "cached_tokens_predicted", "unread_prompts")
        found = (re.findall(rf"^warmroute_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names)
        return cls(*(sum(map(float, values)) for values in found))

    def check(self, before: Predicted, load: Load) -> None:
        """Raises `RuntimeError` where prompts were not read, or not matched."""
        read = (self.prompt_tokens - before.prompt_tokens) / load.requests
        share = (self.cached_tokens - before.cached_tokens) / max(self.prompt_tokens - before.prompt_tokens, 1)
        if self.unread or not 0.8 < read / load.tokens < 1.2 or not load.cached[0] <= share <= load.cached[1]:
            raise RuntimeError(f"{read:.0f} tokens a prompt, {share:.0%} of them cached, {self.unread} unread")


if __name__ == "__main__":
    typer.run(main)
