"""Measures the CPU cost of a request in this router and in others.

    python -m loadtest.bench.hotpath
    python -m loadtest.bench.hotpath --routers warmroute,nginx,sglang-router --rounds 3
    python -m loadtest.bench.hotpath --ours ../other-checkout                  # the router of another commit

CPU microseconds (utime + stime) of the router's process tree per request, or per streamed chunk. A C generator
saturates the router or sends at an even rate; the pods are four C mocks. Each load has a router of its own, so that its
figure does not depend on the loads before it. Results are medians over interleaved rounds. A load that fails is
reported, and the others go on; exit code 1.

The router renders, tokenizes, hashes and matches each prompt and prices it with `cost_aware`. A load fails if the
router's counters show that it did not.
"""

from __future__ import annotations

import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import msgspec
import typer

from loadtest.bench.bodies import PREFIXES, TAIL_TOKENS, Chat, SourceText, fresh_chats, pack, parts_chats, warm_chats
from loadtest.bench.checkout import HERE, Checkout, UnknownSettings
from loadtest.bench.duties import TENANTS, Duty, on_duty
from loadtest.bench.rig import (
    BENCH,
    OURS,
    PLAN,
    PODS,
    BenchFolder,
    GeneratorStats,
    Mocks,
    Rig,
    RunningRouter,
    build,
    launch_router,
    mocks,
)
from loadtest.commands.child_processes import ChildError
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.html_page import PlotAxes, bars, writable_report
from loadtest.peers.catalog import PEERS
from router.cli.options import writable

CHUNKS = 64
"""Per streamed response."""
LONGEST_S = 15.0
"""Time limit per load, because some routers are hundreds of times slower than others."""
BURSTS = 8
"""Turns of each router in one measurement of several."""
MAX_REFUSED_SHARE = 0.05
"""With quotas that routers share through Redis: a burst after a pause may be refused while shares are exchanged."""
TOKEN = " token"
"""The text of each chunk: one token of the router's tokenizer."""
NOTHING = (0.0, 0.02)
"""The template's first tokens are shared."""


@dataclass(frozen=True, slots=True)
class Load:
    """One column of the table. `cached`: range of the cached share that our router must predict."""

    chats: Callable[[SourceText, int, int], Iterator[Chat]]
    tokens: int
    requests: int
    connections: int = 32
    stream: bool = False
    chunk_pause_us: int = 0
    per_s: int = 0
    """Even rate; 0: as fast as possible."""
    duties: tuple[Duty, ...] = ()
    pods_count: bool = False
    """Whether the mocks send usage in streams where the body that they get asks for it; clients do not."""
    cached: tuple[float, float] = (0.8, 1.0)
    """A warm prompt is cached wherever it is sent: every mock holds all conversations of a load (`mock.c`). Anything
    less would measure the router's choice of pods, and pods that answer at once give it no reason to prefer one: it
    learns that a hit saves no time, and spreads the conversations."""

    @property
    def parts(self) -> int:
        """The divisor for CPU time: requests, or chunks."""
        return self.requests * (CHUNKS if self.stream else 1)


_CHUNK = Load(warm_chats, 2_000, 1_024, connections=256, stream=True, chunk_pause_us=20_000)
LOADS: Mapping[str, Load] = {
    "2K fresh": Load(fresh_chats, 2_000, 12_000, cached=NOTHING),
    "2K warm": Load(warm_chats, 2_000, 16_000),
    "8K fresh": Load(fresh_chats, 8_000, 5_000, cached=NOTHING),
    "8K warm": Load(warm_chats, 8_000, 8_000),
    "2K warm, 200 a s": Load(warm_chats, 2_000, 1_200, per_s=200),
    "2K warm, two front ends": Load(warm_chats, 2_000, 16_000, duties=(Duty.FRONT_ENDS,)),
    "2K warm, parts": Load(parts_chats, 2_000, 16_000),
    "2K warm, parts, two front ends": Load(parts_chats, 2_000, 16_000, duties=(Duty.FRONT_ENDS,)),
    "chunk": _CHUNK,
    "chunk, usage": replace(_CHUNK, pods_count=True),
    "chunk, continued": replace(_CHUNK, duties=(Duty.CONTINUATION,)),
    "chunk, burst": Load(warm_chats, 2_000, 4_096, stream=True),
    "2K warm, everything": Load(
        warm_chats, 2_000, 16_000, duties=(Duty.TENANTS, Duty.QUOTAS, Duty.QUEUE, Duty.USAGE, Duty.REDIS)
    ),
}
SHARES: Mapping[str, tuple[tuple[Duty, ...], tuple[Duty, ...]]] = {
    "request log": ((), (Duty.NO_LOG,)),
    "tenants": ((Duty.TENANTS,), ()),
    "quotas": ((Duty.TENANTS, Duty.QUOTAS), (Duty.TENANTS,)),
    "queue": ((Duty.QUEUE,), ()),
    "usage file": ((Duty.USAGE,), ()),
    "KV events over ZMQ": ((Duty.EVENTS,), ()),
    "KV events through Redis": ((Duty.REDIS,), ()),
    "everything": (LOADS["2K warm, everything"].duties, ()),
}
"""What a duty costs: "2K warm" with and without it."""


def warm_with(duties: Sequence[Duty]) -> str:
    """Name of the load "2K warm" with these duties."""
    return ", ".join(["2K warm", *duties]) if duties != SHARES["everything"][0] else "2K warm, everything"


ALL_LOADS: Mapping[str, Load] = {
    **LOADS,
    **{warm_with(duties): replace(LOADS["2K warm"], duties=duties) for pair in SHARES.values() for duties in pair},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one load through one router."""

    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of one load through one router in one round."""

    round: int
    router: str
    load: str
    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


FAILURES = (ChildError, RuntimeError, UnknownSettings, subprocess.CalledProcessError, httpx.HTTPError)
"""One load ends with these; the others go on."""


def main(
    bench: BenchFolder = BENCH,
    routers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = "warmroute",
    loads: Annotated[str, typer.Option(help=f"Of {'; '.join(LOADS)}; separated by semicolons.")] = ";".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    shares: Annotated[bool, typer.Option("--shares", help="Measure what each duty adds to 2K warm.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Longest time of one load.")] = LONGEST_S,
    ours: Annotated[Path | None, typer.Option(exists=True, help="Checkout of our router; default: this one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the results of every round here, as JSON.", callback=writable)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart here, as SVG.", callback=writable_report)] = None,
) -> None:
    """Compare CPU per request. Exit code 1 if a load failed."""
    names, titles = routers.split(","), loads.split(";")
    if shares:
        titles = list(dict.fromkeys(warm_with(duties) for pair in SHARES.values() for duties in pair))
    checkout = Checkout.at(ours) if ours else HERE
    rows: list[Row] = []
    with bench_of(titles, bench) as (rig, pods):
        for number in range(rounds):
            for title in titles:
                for name in names:
                    if cost := measure(name, title, rig, pods, checkout, seconds):
                        rows.append(Row(number, name, title, **asdict(cost)))
    print(markdown(rows))
    if shares:
        print(f"\n{shares_of(rows)}")
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    if plot is not None:
        plot.write_text(bars_of(rows))
    raise SystemExit(len(rows) < rounds * len(titles) * len(names))


@contextmanager
def bench_of(titles: Sequence[str], bench: Path = BENCH) -> Iterator[tuple[Rig, Mocks]]:
    """The generator with the bodies of these loads, and running mocks. SIGTERM ends the block as Ctrl-C does: all other
    processes end with it, and none burns CPU of a later measurement."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with TemporaryDirectory(prefix="warmroute-hotpath-") as temporary:
        rig = build(bench, Path(temporary))
        write_bodies(rig, {title: ALL_LOADS[title] for title in titles})
        with mocks(rig.mock) as pods:
            yield rig, pods


def write_bodies(rig: Rig, loads: Mapping[str, Load]) -> None:
    """Write the bodies of every load for the generator."""
    prose = SourceText(mock_tokenizer())
    for name, load in loads.items():
        chats = load.chats(prose, load.tokens, min(load.requests, 512))
        rig.bodies(name).write_bytes(pack(chats, stream=load.stream))


def measure(
    name: str, title: str, rig: Rig, pods: Mocks, checkout: Checkout = HERE, longest_s: float = LONGEST_S
) -> Cost | None:
    """Run one load through a router of its own for up to `longest_s`. None if that failed; the reason is printed."""
    found = measure_in_turns(name, title, rig, pods, [checkout], longest_s)
    return found[0] if found else None


def measure_in_turns(
    name: str, title: str, rig: Rig, pods: Mocks, checkouts: Sequence[Checkout], longest_s: float = LONGEST_S
) -> Sequence[Cost]:
    """Run one load through a router of each checkout, all at once, for up to `longest_s` each. They take turns in short
    bursts, because the speed of a machine drifts by tens of percent within seconds. Empty if one failed; the reason is
    printed."""
    load = ALL_LOADS[title]
    with TemporaryDirectory(prefix="warmroute-router-") as temporary:
        try:
            pods_stream(pods, load)
            with ExitStack() as running:
                routers = []
                for number, checkout in enumerate(checkouts):
                    folder = Path(temporary) / str(number)
                    folder.mkdir()
                    duties = load.duties if name == OURS else ()
                    settings = running.enter_context(on_duty(duties, rig.bodies(title), pods, folder, checkout))
                    launched = launch_router(name, pods, folder / name, settings=settings, checkout=checkout)
                    routers.append(running.enter_context(launched))
                # A burst after a pause exceeds quotas: there, each router is warmed up before its whole load.
                groups = [[router] for router in routers] if Duty.QUOTAS in load.duties else [routers]
                costs = [cost for group in groups for cost in play(name, title, rig, pods, group, longest_s)]
        except FAILURES as error:
            print(f"{name}, {title}: FAILED: {error}", file=sys.stderr)
            return ()
    said = "; ".join(f"{cost.cpu_us:.1f} us, {cost.per_s:.0f} req/s" for cost in costs)
    print(f"{name}, {title}: {said}", file=sys.stderr)
    return costs


def pods_stream(pods: Mocks, load: Load) -> None:
    """Set how the mocks stream in this load, before its routers find out what they can do."""
    (token,) = mock_tokenizer().encode(TOKEN, add_special_tokens=False) if Duty.CONTINUATION in load.duties else (0,)
    mixed = Duty.FRONT_ENDS in load.duties
    pods.configure(
        chunks=CHUNKS, chunk_pause_us=load.chunk_pause_us, usage=load.pods_count, token_id=token, mixed=mixed
    )


def play(
    name: str, title: str, rig: Rig, pods: Mocks, routers: Sequence[RunningRouter], longest_s: float
) -> Sequence[Cost]:
    """Warm up, then run one load on every router. Raises `RuntimeError` if requests failed or prompts were not read."""
    load = ALL_LOADS[title]
    warmth = replace(load, requests=load.requests // 8 + load.connections)
    per_s = min(send(rig, title, warmth, router)["rps"] for router in routers)
    requests = min(load.requests, load.connections + int(per_s * longest_s))
    bursts = max(min(BURSTS, requests // (2 * load.connections)), 1) if len(routers) > 1 else 1
    burst = replace(load, requests=requests // bursts)
    before, asked = [Predicted.by(name, router) for router in routers], Asked.of(pods)
    turns: Sequence[list[Cost]] = [[] for _ in routers]
    for number in range(bursts):
        for at in sorted(range(len(routers)), reverse=number % 2 == 1):
            turns[at].append(play_burst(title, burst, rig, routers[at]))
    if name == OURS:
        for router, predicted in zip(routers, before, strict=True):
            Predicted.by(name, router).check(predicted, replace(load, requests=burst.requests * bursts))
        asked.check(Asked.of(pods), load, burst.requests * bursts * len(routers), title)
    return [mean_cost(costs) for costs in turns]


def play_burst(title: str, load: Load, rig: Rig, router: RunningRouter) -> Cost:
    before_s = router.cpu_s
    answer = send(rig, title, load, router)
    cpu_us = (router.cpu_s - before_s) * 1e6 / load.parts
    return Cost(cpu_us, answer["rps"], answer["p50"], answer["p99"])


def mean_cost(bursts: Sequence[Cost]) -> Cost:
    """That of equal bursts together; times of responses are means, too."""
    return Cost(*map(statistics.fmean, zip(*map(astuple, bursts), strict=True)))


def send(rig: Rig, title: str, load: Load, to: RunningRouter, *options: object) -> GeneratorStats:
    """Send all requests of a load, at its rate or as fast as possible."""
    options = (*options, *(("-s",) if load.stream else ()), *(("-r", load.per_s) if load.per_s else ()))
    if Duty.TENANTS in load.duties:
        options = (*options, "-k", TENANTS)
    refused = int(load.requests * MAX_REFUSED_SHARE) if {Duty.QUOTAS, Duty.REDIS} <= set(load.duties) else 0
    size = {"connections": load.connections, "requests": load.requests, "max_errors": refused}
    answer = rig.run(title, to.port, options=options, **size)
    if load.stream and not answer["errs"] and answer["chunks"] != load.parts:
        raise RuntimeError(f"{title}: clients got {answer['chunks']} chunks, and not the {load.parts} of the answers")
    if answer["errs"]:
        print(f"{title}: {answer['errs']} of {load.requests} refused", file=sys.stderr)
    return answer


def markdown(rows: Sequence[Row]) -> str:
    """Markdown table: CPU us per load, requests per second in brackets; medians over the rounds."""
    loads = _loads(rows)
    lines = [["CPU us (requests/s)", *loads], ["---"] * (len(loads) + 1)]
    for router in _routers(rows):
        cells = [
            f"{_median(rows, router, load, 'cpu_us'):.1f} ({_median(rows, router, load, 'per_s'):,.0f})"
            for load in loads
        ]
        lines.append([router, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shares_of(rows: Sequence[Row]) -> str:
    """Markdown table: what each duty adds to a request of our router, in us and relative to the plain load."""
    lines = ["| duty | added us | of 2K warm |", "| --- | --- | --- |"]
    plain_us = _median(rows, OURS, warm_with(()), "cpu_us")
    for duty, pair in SHARES.items():
        on_us, off_us = (_median(rows, OURS, warm_with(duties), "cpu_us") for duties in pair)
        lines.append(f"| {duty} | {on_us - off_us:.0f} | {(on_us - off_us) / plain_us:.0%} |")
    return "\n".join(lines)


def bars_of(rows: Sequence[Row]) -> str:
    """Bar chart as a complete SVG file, black on white."""
    loads = _loads(rows)
    heights = {router: [_median(rows, router, load, "cpu_us") for load in loads] for router in _routers(rows)}
    axes = PlotAxes(title="CPU of the router", x="load", y="us a request, or a chunk", log_y=True)
    figure = bars(axes, loads, heights)
    begin, end = figure.index("<svg"), figure.index("</svg>") + len("</svg>")
    return figure[begin:end].replace("<svg", '<svg style="color: black; background: white"', 1)


def _loads(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.load for row in rows))


def _routers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.router for row in rows))


def _median(rows: Sequence[Row], router: str, load: str, figure: str) -> float:
    """NaN if the router did not run the load."""
    found = [getattr(row, figure) for row in rows if (row.router, row.load) == (router, load)]
    return statistics.median(found) if found else float("nan")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Prediction counters of our router."""

    prompt_tokens: float = 0
    cached_tokens: float = 0
    unread: float = 0
    indexed_blocks: float = 0
    """From KV events, of all pods."""

    @classmethod
    def by(cls, name: str, router: RunningRouter) -> Predicted:
        """Read the router's metrics; zeros if it is not ours."""
        text = httpx.get(f"{router.admin_url}/metrics").text if name == OURS else ""
        names = (
            "prompt_tokens_total",
            "cached_tokens_(?:captured|predicted)_total",  # predicted: until November 2026
            "unread_prompts_total",
            "index_block_holders",
        )
        found = (re.findall(rf"^warmroute_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE) for name in names)
        return cls(*(sum(map(float, values)) for values in found))

    def check(self, before: Predicted, load: Load) -> None:
        """Raise `RuntimeError` if prompts were not read or not matched, or KV events not applied."""
        read = (self.prompt_tokens - before.prompt_tokens) / load.requests
        share = (self.cached_tokens - before.cached_tokens) / max(self.prompt_tokens - before.prompt_tokens, 1)
        if self.unread or not 0.8 < read / load.tokens < 1.2 or not load.cached[0] <= share <= load.cached[1]:
            raise RuntimeError(f"{read:.0f} tokens per prompt, {share:.0%} of them cached, {self.unread} unread")
        conversations = PODS * PREFIXES * (load.tokens - TAIL_TOKENS) // PLAN.block_size_tokens
        if {Duty.EVENTS, Duty.REDIS} & set(load.duties) and self.indexed_blocks < 1.1 * conversations:
            raise RuntimeError(f"{self.indexed_blocks:.0f} blocks in the index, {conversations} of conversations alone")


@dataclass(frozen=True, slots=True)
class Asked:
    """Streams of the mocks with usage and with token ids, which no client asks for."""

    usage: int
    ids: int

    @classmethod
    def of(cls, pods: Mocks) -> Asked:
        return cls(pods.count("usage"), pods.count("ids"))

    def check(self, now: Asked, load: Load, streams: int, title: str) -> None:
        """Raise `RuntimeError` if the router continues streams and did not ask for their ids. A router that does not
        ask for usage is only reported: older ones do not."""
        if load.pods_count and now.usage - self.usage < streams:
            print(f"{title}: routers asked for usage in {now.usage - self.usage} of {streams} streams", file=sys.stderr)
        if Duty.CONTINUATION in load.duties and now.ids - self.ids < streams:
            raise RuntimeError(f"the router asked for token ids in {now.ids - self.ids} of {streams} streams")


if __name__ == "__main__":
    typer.run(main)
