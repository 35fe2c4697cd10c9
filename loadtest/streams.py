"""What do ten thousand streams at once cost, in memory and in time to first token?

    python loadtest/streams.py --bench BENCH                             # mock.c and lg.c lie in BENCH
    python loadtest/streams.py --bench BENCH --routers direct,nginx,warmroute --streams 1000,10000

One generator opens the streams at a steady pace and holds them all; while they run, another asks for a few more, whose
times to first token are what is compared, with those of `direct`: the generator straight at a mock pod, under the same
streams. The router's memory is read before the first stream and while all of them run. Pauses between chunks grow with
the number of streams, so that chunks flow at one rate whatever that number is.

A stream takes two sockets of a router. Where the hard limit of open files leaves room for fewer streams than asked
for, so many are held, and the table says how many.
"""

from __future__ import annotations

import json
import math
import resource
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.bodies import Prose, packed, warm_chats
from loadtest.peers.catalog import PEERS
from loadtest.rig import DIRECT, Mocks, Rig, Routed, answered, build, demo_tokenizer, mocks, routed
from router.cli.serve import allow_all_open_files

TITLE = "stream"
PROMPT_TOKENS = 2_000
BODIES = 512
CHUNKS_PER_S = 10_000
"""Of all streams together."""
OPENED_PER_S = 500
SETTLE_S = 2.0
"""After the last stream was opened."""
ASKED_PER_S = 50
ASKED_S = 8.0
MARGIN_S = 4.0
"""How much longer than needed each stream lasts: openers and routers may be late."""
ASKED = round(ASKED_PER_S * ASKED_S)
SPARE_FILES = 200
"""Of a router, besides those of its streams."""
WARM_UP = 300


@dataclass(frozen=True, slots=True)
class Timing:
    """How each stream goes when so many are to be there at once."""

    streams: int

    @property
    def opening_s(self) -> float:
        return self.streams / OPENED_PER_S

    @property
    def pause_us(self) -> int:
        return round(self.streams / CHUNKS_PER_S * 1e6)

    @property
    def chunks(self) -> int:
        """Enough for the first stream to be there when the last question has been answered."""
        needed_s = self.opening_s + SETTLE_S + ASKED_S + MARGIN_S
        return math.ceil(needed_s * 1e6 / self.pause_us) + 1

    @property
    def patience_s(self) -> float:
        """By then the last stream has ended, or never will."""
        return self.opening_s + 2 * self.chunks * self.pause_us / 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """What was seen while the streams ran. `rss_before_bytes` and `rss_bytes` are the router's."""

    router: str
    asked_streams: int
    streams: int
    ttft_p50_us: float
    ttft_p99_us: float
    chunk_p50_us: float
    chunk_p99_us: float
    """From a chunk's sending by the mock to its coming here."""
    rss_before_bytes: int
    rss_bytes: int

    @property
    def bytes_per_stream(self) -> float:
        return (self.rss_bytes - self.rss_before_bytes) / self.streams


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")],
    routers: Annotated[str, typer.Option(help=f"Of {', '.join((DIRECT, *PEERS))}.")] = "direct,nginx,warmroute",
    streams: Annotated[str, typer.Option(help="How many at once, one after the other.")] = "1000,10000",
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
) -> None:
    """Hold streams and ask for more."""
    most = streams_allowed(allow_all_open_files())
    with TemporaryDirectory(prefix="warmroute-streams-") as temporary:
        folder = Path(temporary)
        rig = build(bench, folder)
        chats = warm_chats(Prose(demo_tokenizer()), PROMPT_TOKENS, BODIES)
        rig.bodies(TITLE).write_bytes(packed(chats, stream=True))
        with mocks(rig.mock) as pods:
            found: list[Held] = []
            for asked in map(int, streams.split(",")):
                for name in routers.split(","):
                    found.append(hold(name, asked, min(asked, most), rig, pods, folder / f"{asked}-{name}"))
    Console().print(table(found))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))


def streams_allowed(open_files: int) -> int:
    """How many streams a process with that limit can hold, two sockets each, and take those that come on top."""
    return sys.maxsize if open_files == resource.RLIM_INFINITY else (open_files - SPARE_FILES) // 2 - ASKED


def hold(name: str, asked: int, streams: int, rig: Rig, pods: Mocks, folder: Path) -> Held:
    """Open the streams through one router, ask, and see them all end well. Raises `RuntimeError` where one does not."""
    timing = Timing(streams)
    with routed(name, pods, folder, {"max_in_flight": 2 * streams, "max_connections": 2 * streams}) as router:
        pods.told(chunks=2)
        rig.run(TITLE, router.port, connections=32, requests=WARM_UP, options=["-s"])
        pods.told(chunks=timing.chunks, chunk_pause_us=timing.pause_us)
        rss_before_bytes = router.rss_bytes
        options = ("-s", "-c", streams, "-n", streams, "-r", OPENED_PER_S, "-T", timing.patience_s)
        opener = subprocess.Popen(rig.command(TITLE, router.port, *options), stdout=subprocess.PIPE, text=True)
        try:
            time.sleep(timing.opening_s + SETTLE_S)
            asked_of = ask(rig, router)
            rss_bytes = router.rss_bytes
            said, _ = opener.communicate()
        finally:
            opener.kill()
            opener.wait()
    held = answered(f"{streams} streams through {name}", said, streams)
    added = asked_of["ttft50"] - timing.pause_us, asked_of["ttft99"] - timing.pause_us
    one = Held(name, asked, streams, *added, held["cd50"], held["cd99"], rss_before_bytes, rss_bytes)
    print(one, file=sys.stderr)
    return one


def ask(rig: Rig, router: Routed) -> Mapping[str, float]:
    """Some more streams at a steady pace, left alone once that was long enough; the generator's figures. Raises
    `RuntimeError` where one of them failed."""
    options = ("-s", "-c", ASKED, "-n", ASKED, "-r", ASKED_PER_S, "-T", ASKED_S + MARGIN_S / 2)
    said = subprocess.run(rig.command(TITLE, router.port, *options), capture_output=True, text=True, check=True)
    answer: Mapping[str, float] = json.loads(said.stdout)
    if answer["errs"]:
        raise RuntimeError(f"streams on top: {answer}")
    return answer


def table(found: Sequence[Held]) -> Table:
    """A row for each router under each number of streams."""
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
