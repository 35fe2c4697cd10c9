"""Measures the cost of thousands of concurrent streams: memory, and TTFT of new streams.

    python -m loadtest.bench.streams
    python -m loadtest.bench.streams --routers direct,nginx,warmroute --streams 1000,10000

One generator opens the streams at a steady rate and holds them. Meanwhile another opens a few more; their TTFT is
compared with `direct`, where the generator connects to a mock pod under the same streams. The router's memory is read
before the first stream and while all run. Pauses between chunks grow with the number of streams, so that the total
chunk rate is constant.

A stream needs two sockets of a router. If the hard limit of open files is too low, fewer streams are held, and the
table shows how many.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from loadtest.bench.bodies import SourceText, pack, warm_chats
from loadtest.bench.rig import (
    BENCH,
    DIRECT,
    BenchFolder,
    Mocks,
    Rig,
    RunningRouter,
    build,
    check_stats,
    launch_router,
    mocks,
)
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.peers.catalog import PEERS
from router.cli.options import writable
from router.cli.serve import allow_all_open_files, connections_allowed

TITLE = "stream"
PROMPT_TOKENS = 2_000
BODIES = 512
CHUNKS_PER_S = 10_000
"""Chunk rate of all streams together."""
OPENED_PER_S = 500
SETTLE_S = 2.0
"""After the last stream was opened."""
PROBES_PER_S = 50
PROBES_S = 8.0
MARGIN_S = 4.0
"""Time that each stream lasts longer than needed, because openers and routers may be late."""
PROBES = round(PROBES_PER_S * PROBES_S)
WARM_UP = 300


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of each stream for a number of concurrent streams."""

    streams: int

    @property
    def opening_s(self) -> float:
        return self.streams / OPENED_PER_S

    @property
    def pause_us(self) -> int:
        return round(self.streams / CHUNKS_PER_S * 1e6)

    @property
    def chunks(self) -> int:
        """Enough for the first stream to last until the last probe has its response."""
        needed_s = self.opening_s + SETTLE_S + PROBES_S + MARGIN_S
        return math.ceil(needed_s * 1e6 / self.pause_us) + 1

    @property
    def patience_s(self) -> float:
        """Time by which the last stream has ended."""
        return self.opening_s + 2 * self.chunks * self.pause_us / 1e6


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Result of one router. `rss_before_bytes` and `rss_bytes` are the router's memory."""

    router: str
    asked_streams: int
    streams: int
    ttft_p50_us: float
    ttft_p99_us: float
    chunk_p50_us: float
    chunk_p99_us: float
    """From the mock sending a chunk to its arrival."""
    rss_before_bytes: int
    rss_bytes: int

    @property
    def bytes_per_stream(self) -> float:
        return (self.rss_bytes - self.rss_before_bytes) / self.streams


def main(
    bench: BenchFolder = BENCH,
    routers: Annotated[str, typer.Option(help=f"Of {', '.join((DIRECT, *PEERS))}.")] = "direct,nginx,warmroute",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams.")] = "1000,10000",
    out: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.", callback=writable)] = None,
) -> None:
    """Hold streams and measure probes."""
    most = streams_allowed(allow_all_open_files())
    with TemporaryDirectory(prefix="warmroute-streams-") as temporary:
        folder = Path(temporary)
        rig = build(bench, folder)
        chats = warm_chats(SourceText(mock_tokenizer()), PROMPT_TOKENS, BODIES)
        rig.bodies(TITLE).write_bytes(pack(chats, stream=True))
        with mocks(rig.mock) as pods:
            found: list[StreamResult] = []
            for asked in map(int, streams.split(",")):
                for name in routers.split(","):
                    found.append(measure(name, asked, min(asked, most), rig, pods, folder / f"{asked}-{name}"))
    Console().print(table(found))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))


def streams_allowed(open_files: int) -> int:
    """Number of streams that a process with this limit of open files can hold, with the probes."""
    return connections_allowed(open_files) - PROBES


def measure(name: str, asked: int, streams: int, rig: Rig, pods: Mocks, folder: Path) -> StreamResult:
    """Open the streams through one router, probe, and check that all end well. Raises `RuntimeError`."""
    timing = Timing(streams)
    with launch_router(name, pods, folder, {"max_in_flight": 2 * streams, "max_connections": 2 * streams}) as router:
        pods.configure(chunks=2)
        rig.run(TITLE, router.port, connections=32, requests=WARM_UP, options=["-s"])
        pods.configure(chunks=timing.chunks, chunk_pause_us=timing.pause_us)
        rss_before_bytes = router.rss_bytes
        options = ("-s", "-c", streams, "-n", streams, "-r", OPENED_PER_S, "-T", timing.patience_s)
        opener = subprocess.Popen(rig.command(TITLE, router.port, *options), stdout=subprocess.PIPE, text=True)
        try:
            time.sleep(timing.opening_s + SETTLE_S)
            asked_of = probe(rig, router)
            rss_bytes = router.rss_bytes
            said, _ = opener.communicate()
        finally:
            opener.kill()
            opener.wait()
    held = check_stats(f"{streams} streams through {name}", said, streams)
    added = asked_of["ttft50"] - timing.pause_us, asked_of["ttft99"] - timing.pause_us
    one = StreamResult(name, asked, streams, *added, held["cd50"], held["cd99"], rss_before_bytes, rss_bytes)
    print(one, file=sys.stderr)
    return one


def probe(rig: Rig, router: RunningRouter) -> Mapping[str, float]:
    """Open a few more streams at a steady rate; returns the generator's figures. Raises `RuntimeError`."""
    options = ("-s", "-c", PROBES, "-n", PROBES, "-r", PROBES_PER_S, "-T", PROBES_S + MARGIN_S / 2)
    said = subprocess.run(rig.command(TITLE, router.port, *options), capture_output=True, text=True, check=True)
    answer: Mapping[str, float] = json.loads(said.stdout)
    if answer["errs"]:
        raise RuntimeError(f"probes: {answer}")
    return answer


def table(found: Sequence[StreamResult]) -> Table:
    """One row per router and number of streams."""
    direct = {one.asked_streams: one for one in found if one.router == DIRECT}
    columns = ("TTFT p50 ms", "p99 ms", "chunk p50 us", "p99 us", "KiB a stream", "RSS MiB")
    shown = Table(
        "streams",
        Column("router", no_wrap=True),
        *columns,
        title="added to direct" if direct else "with the mock's pace",
    )
    for one in found:
        least = direct.get(one.asked_streams)
        at = (one.ttft_p50_us, one.ttft_p99_us, one.chunk_p50_us, one.chunk_p99_us)
        off = (least.ttft_p50_us, least.ttft_p99_us, least.chunk_p50_us, least.chunk_p99_us) if least else (0,) * 4
        ttft50, ttft99, chunk50, chunk99 = (a - b if one is not least else a for a, b in zip(at, off, strict=True))
        memory = "" if one.router == DIRECT else f"{one.bytes_per_stream / 1024:.1f}"
        whole = "" if one.router == DIRECT else f"{one.rss_bytes / 2**20:.0f}"
        times = f"{ttft50 / 1e3:.2f}", f"{ttft99 / 1e3:.2f}", f"{chunk50:,.0f}", f"{chunk99:,.0f}"
        shown.add_row(f"{one.streams:,}", one.router, *times, memory, whole)
    return shown


if __name__ == "__main__":
    typer.run(main)
