"""What does a request cost us, and what does it cost others?

    python loadtest/hotpath.py --bench BENCH                             # mock.c and lg.c lie in BENCH
    python loadtest/hotpath.py --bench BENCH --routers warmroute,nginx,sglang-router --rounds 3

CPU microseconds of the router's whole process tree (utime + stime) for each request, or each streamed chunk, while a C
generator keeps it busy, or asks at an even pace, in front of four C mock upstreams that cost next to nothing. Medians
over rounds in which the routers take turns.

Each prompt is really rendered, tokenized (with the tokenizer of DeepSeek), hashed, matched with what was sent before
(the mock publishes no events) and priced by `cost_aware`; a run whose predictions say that this did not happen fails.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import msgspec
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.bodies import Chat, Prose, fresh_chats, packed, warm_chats
from loadtest.peers.catalog import PEERS
from loadtest.rig import OURS, Answer, Mocks, Rig, Routed, build, demo_tokenizer, mocks, routed
from router.report.plots import Axes, bars

CHUNKS = 64
"""Of each streamed answer."""
LONGEST_S = 15.0
"""A router that is slow is asked no longer than this: some need hundreds of times as long as others."""
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
    per_s: int = 0
    """Evenly so many; 0: as fast as they are answered."""
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
    "2K warm, 200 a s": Load(warm_chats, 2_000, 1_200, per_s=200),
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


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One load through one router in one round."""

    round: int
    router: str
    load: str
    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")],
    routers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = "warmroute",
    loads: Annotated[str, typer.Option(help=f"Of {'; '.join(LOADS)}; separated by semicolons.")] = ";".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the figures of every round here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart here, as SVG.")] = None,
) -> None:
    """Compare CPU per request."""
    names, chosen = routers.split(","), {name: LOADS[name] for name in loads.split(";")}
    with TemporaryDirectory(prefix="warmroute-hotpath-") as temporary:
        folder = Path(temporary)
        rig = build(bench, folder)
        write_bodies(rig, chosen)
        with mocks(rig.mock) as pods:
            found: list[dict[str, dict[str, Cost]]] = []
            for number in range(rounds):
                found.append({name: play(name, chosen, rig, pods, folder / f"{number}-{name}") for name in names})
    rows = [
        Row(number, name, title, **asdict(cost))
        for number, one in enumerate(found)
        for name, costs in one.items()
        for title, cost in costs.items()
    ]
    print(markdown(rows))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    if plot is not None:
        plot.write_text(bars_of(rows))


def write_bodies(rig: Rig, loads: Mapping[str, Load]) -> None:
    """Every load's bodies, where the generator finds them."""
    prose = Prose(demo_tokenizer())
    for name, load in loads.items():
        chats = load.chats(prose, load.tokens, min(load.requests, 512))
        rig.bodies(name).write_bytes(packed(chats, stream=load.stream))


def play(name: str, loads: Mapping[str, Load], rig: Rig, pods: Mocks, folder: Path) -> dict[str, Cost]:
    """Every load through one router, from its start to its end."""
    with routed(name, pods, folder) as router:
        found = {}
        for title, load in loads.items():
            pods.told(chunks=CHUNKS, chunk_pause_us=load.chunk_pause_us)
            warmed = send(rig, title, replace(load, requests=load.requests // 8 + load.connections), router)
            load = replace(load, requests=min(load.requests, load.connections + int(warmed["rps"] * LONGEST_S)))
            predicted, before_s = Predicted.by(name, router), router.cpu_s
            answer = send(rig, title, load, router)
            cpu_us = (router.cpu_s - before_s) * 1e6 / load.parts
            if name == OURS:
                Predicted.by(name, router).check(predicted, load)
            found[title] = Cost(cpu_us, answer["rps"], answer["p50"], answer["p99"])
            print(f"{name}, {title}: {cpu_us:.1f} us, {answer['rps']:.0f} req/s", file=sys.stderr)
    return found


def send(rig: Rig, title: str, load: Load, to: Routed, *options: object) -> Answer:
    """All requests of that load, as fast as they are answered where nothing says otherwise."""
    options = (*options, *(("-s",) if load.stream else ()), *(("-r", load.per_s) if load.per_s else ()))
    return rig.run(title, to.port, connections=load.connections, requests=load.requests, options=options)


def markdown(rows: Sequence[Row]) -> str:
    """CPU us of each load, a row a router, medians over the rounds; requests a second in brackets."""
    loads = _loads(rows)
    lines = [["CPU us (requests/s)", *loads], ["---"] * (len(loads) + 1)]
    for router in _routers(rows):
        cells = [
            f"{_median(rows, router, load, 'cpu_us'):.1f} ({_median(rows, router, load, 'per_s'):,.0f})"
            for load in loads
        ]
        lines.append([router, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bars_of(rows: Sequence[Row]) -> str:
    """A whole SVG file, black on white."""
    loads = _loads(rows)
    heights = {router: [_median(rows, router, load, "cpu_us") for load in loads] for router in _routers(rows)}
    axes = Axes(title="CPU of the router", x="load", y="us a request, or a chunk", log_y=True)
    figure = bars(axes, loads, heights)
    begin, end = figure.index("<svg"), figure.index("</svg>") + len("</svg>")
    return figure[begin:end].replace("<svg", '<svg style="color: black; background: white"', 1)


def _loads(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.load for row in rows))


def _routers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.router for row in rows))


def _median(rows: Sequence[Row], router: str, load: str, figure: str) -> float:
    """NaN for a load that the router never had."""
    found = [getattr(row, figure) for row in rows if (row.router, row.load) == (router, load)]
    return statistics.median(found) if found else float("nan")


@dataclass(frozen=True, slots=True)
class Predicted:
    """What our router says of the prompts it has sent on."""

    prompt_tokens: float = 0
    cached_tokens: float = 0
    unread: float = 0

    @classmethod
    def by(cls, name: str, router: Routed) -> Predicted:
        """From its metrics; nothing where it is not ours."""
        text = httpx.get(f"{router.url}/metrics").text if name == OURS else ""
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
