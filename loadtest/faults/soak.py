"""Checks that a million requests, a fifth of them abandoned by the client, leave nothing behind.

    python -m loadtest.faults.soak
    python -m loadtest.faults.soak --requests 50000 --out soak.json

Sends streamed and unstreamed chats over many connections. One in ten clients disconnects within milliseconds, mostly
before the first byte, and one in ten in mid-stream. Samples the router's memory; its caches are full after about 50,000
requests, so a shorter run shows growth that would end. Exit code 1 unless the gauges of in-flight requests are 0 at the
end and the kernel has no client connection.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import httptools
import httpx
import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.bench.bodies import MARKER, SourceText, chat_bodies, warm_chats
from loadtest.bench.rig import BENCH, OURS, BenchFolder, RunningRouter, build, launch_router, mocks
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.cli.options import writable

PROMPT_TOKENS = 500
BODIES = 512
CONNECTIONS = 64
CHUNKS = 8
CHUNK_PAUSE_US = 3_000
UNSTREAMED = 0.25
LEAVE_AT_ONCE, LEAVE_MID_STREAM = 0.1, 0.1
AT_ONCE_S = 0.004
"""Maximum wait of a client that leaves at once."""
SAMPLE_S = 0.5
QUIET_WITHIN_S = 30.0
SETTLED = 0.1
"""Part of the requests after which memory should no longer grow."""
GAUGES = ("warmroute_in_flight_requests", "warmroute_pod_in_flight_requests")
_CONNECTED = ("01", "08")
"""ESTABLISHED and CLOSE_WAIT in /proc/net/tcp (proc_net_tcp)."""


class RequestEnd(Enum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    LEFT_AT_ONCE = "left at once"
    LEFT_MID_STREAM = "left in mid-stream"
    REFUSED = "refused"
    """Another status than 200."""
    ROUTER_HUNG_UP = "router hung up"


@dataclass(frozen=True, slots=True)
class Sample:
    """The router's memory after `ended` requests."""

    at_s: float
    ended: int
    rss_bytes: int


@dataclass(slots=True)
class SoakResult:
    """Result of the run. `left_behind`: values that should be 0 at the end, by name; `results`: the router's own
    counts."""

    requests: int
    ends: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    left_behind: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    aborted_at_pods: int = 0
    wall_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing failed and nothing was left behind."""
        failed = self.ends[RequestEnd.REFUSED.value] + self.ends[RequestEnd.ROUTER_HUNG_UP.value]
        return not failed and not any(self.left_behind.values())


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory growth after the first tenth of the requests: first and last sample, and the trend."""

    first_bytes: int
    last_bytes: int
    bytes_per_request: float


def growth(samples: Sequence[Sample], requests: int) -> Growth | None:
    """Least-squares trend; None with fewer than two samples after the first tenth."""
    late = [sample for sample in samples if sample.ended >= requests * SETTLED]
    if len({sample.ended for sample in late}) < 2:
        return None
    trend = linear_regression([sample.ended for sample in late], [sample.rss_bytes for sample in late])
    return Growth(late[0].rss_bytes, late[-1].rss_bytes, trend.slope)


def left_behind(metrics: str) -> dict[str, float]:
    """Sum of each gauge that should be 0, over its labels."""
    return {name: sum(_values(metrics, name).values()) for name in GAUGES}


def results(metrics: str) -> dict[str, float]:
    """The router's request counts by result."""
    found: Counter[str] = Counter()
    for labels, value in _values(metrics, "warmroute_requests_total").items():
        found[labels.partition('result="')[2].partition('"')[0]] += int(value)
    return dict(found)


def connected(table: str, port: int) -> int:
    """Connections with this local port in the text of `/proc/net/tcp`."""
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(int(row[1].rpartition(":")[2], 16) == port and row[3] in _CONNECTED for row in rows)


def _values(metrics: str, name: str) -> dict[str, float]:
    rows = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", metrics, re.MULTILINE)
    return {labels: float(value) for labels, value in rows}


class Asker(asyncio.Protocol):
    """One connection, with one request at a time. `lost` once it is unusable."""

    def __init__(self) -> None:
        self.lost = False
        self._end: asyncio.Future[RequestEnd] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(
        self, request: bytes, *, leave_after_s: float | None = None, leave_after_pieces: int = 0
    ) -> RequestEnd:
        """Send a request and wait for the end of its response, or leave earlier."""
        loop = asyncio.get_running_loop()
        self._end, self._pieces, self._leave_after = loop.create_future(), 0, leave_after_pieces
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        timer = loop.call_later(leave_after_s, self._leave_at_once) if leave_after_s is not None else None
        try:
            return await self._end
        finally:
            if timer:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, _piece: bytes) -> None:
        self._pieces += 1
        if self._leave_after and self._pieces >= self._leave_after:
            self.lost = True
            self._transport.abort()
            self._process(RequestEnd.LEFT_MID_STREAM)

    def on_message_complete(self) -> None:
        self._process(RequestEnd.ANSWERED if self._parser.get_status_code() == httpx.codes.OK else RequestEnd.REFUSED)

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self._process(RequestEnd.ROUTER_HUNG_UP)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _leave_at_once(self) -> None:
        self.lost = True
        self._transport.close()
        self._process(RequestEnd.LEFT_AT_ONCE)

    def _process(self, end: RequestEnd) -> None:
        if self._end and not self._end.done():
            self._end.set_result(end)


@dataclass(frozen=True, slots=True)
class Bodies:
    """Request bodies, with a marker that makes each unique."""

    streamed: Sequence[bytes]
    whole: Sequence[bytes]

    def request(self, number: int, *, stream: bool) -> bytes:
        """The bytes of request `number`."""
        bodies = self.streamed if stream else self.whole
        body = bodies[number % len(bodies)].replace(MARKER.encode(), b"%016x" % number)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def soak(requests: int, bodies: Bodies, router: RunningRouter) -> SoakResult:
    """Send all requests over many connections, and read what is left when all clients are gone."""
    soaked, numbers, began_s = SoakResult(requests), iter(range(requests)), time.monotonic()
    sampling = asyncio.create_task(_sample(soaked, router, began_s))
    async with asyncio.TaskGroup() as clients:
        for seed in range(CONNECTIONS):
            clients.create_task(_ask_on(numbers, bodies, router.port, random.Random(seed), soaked.ends))
    soaked.wall_s = time.monotonic() - began_s
    sampling.cancel()
    await _until_quiet(soaked, router)
    soaked.samples.append(Sample(time.monotonic() - began_s, soaked.ends.total(), router.rss_bytes))
    return soaked


async def _ask_on(numbers: Iterable[int], bodies: Bodies, port: int, chance: random.Random, ends: Counter[str]) -> None:
    """One client after another, until no numbers are left."""
    asker: Asker | None = None
    for number in numbers:
        if asker is None or asker.lost:
            _, asker = await asyncio.get_running_loop().create_connection(Asker, "127.0.0.1", port)
        ends[(await _one(asker, number, bodies, chance)).value] += 1
    if asker:
        asker.close()


def _one(asker: Asker, number: int, bodies: Bodies, chance: random.Random) -> Awaitable[RequestEnd]:
    kind, stream = chance.random(), chance.random() >= UNSTREAMED
    if kind < LEAVE_AT_ONCE:
        return asker.ask(bodies.request(number, stream=stream), leave_after_s=chance.uniform(0, AT_ONCE_S))
    if kind < LEAVE_AT_ONCE + LEAVE_MID_STREAM:
        return asker.ask(bodies.request(number, stream=True), leave_after_pieces=chance.randint(1, 3))
    return asker.ask(bodies.request(number, stream=stream))


async def _sample(soaked: SoakResult, router: RunningRouter, began_s: float) -> None:
    """Sample memory until cancelled."""
    while True:
        rss_bytes = await asyncio.to_thread(lambda: router.rss_bytes)
        soaked.samples.append(Sample(time.monotonic() - began_s, soaked.ends.total(), rss_bytes))
        await asyncio.sleep(SAMPLE_S)


async def _until_quiet(soaked: SoakResult, router: RunningRouter) -> None:
    """Wait until nothing is left behind, or until the timeout."""
    deadline_s = time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < deadline_s:
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(f"{router.admin_url}/metrics")).text
        await asyncio.sleep(0.2)
        clients = connected(await asyncio.to_thread(Path("/proc/net/tcp").read_text), router.port)
        soaked.left_behind = {**left_behind(metrics), "connected clients": clients}
        soaked.results = results(metrics)
        if not any(soaked.left_behind.values()):
            return


def main(
    bench: BenchFolder = BENCH,
    requests: Annotated[int, typer.Option(min=100)] = 1_000_000,
    router: Annotated[str, typer.Option(help="Router to test; only ours has the gauges.")] = OURS,
    out: Annotated[
        Path | None, typer.Option(help="Write results and samples here, as JSON.", callback=writable)
    ] = None,
) -> None:
    """Run the soak test."""
    with TemporaryDirectory(prefix="warmroute-soak-") as temporary:
        rig = build(bench, Path(temporary))
        chats = list(warm_chats(SourceText(mock_tokenizer()), PROMPT_TOKENS, BODIES))
        bodies = Bodies(chat_bodies(chats, stream=True), chat_bodies(chats, stream=False))
        with mocks(rig.mock) as pods, launch_router(router, pods, rig.folder / router) as to:
            pods.configure(chunks=CHUNKS, chunk_pause_us=CHUNK_PAUSE_US)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                soaked = runner.run(soak(requests, bodies, to))
            soaked.aborted_at_pods = pods.count("abort")
    Console().print(table(soaked))
    if out is not None:
        out.write_bytes(msgspec.json.encode(soaked))
    raise typer.Exit(0 if soaked.clean else 1)


def table(soaked: SoakResult) -> Table:
    """One row per value."""
    shown = Table("", "", title=f"{soaked.requests:,} requests in {soaked.wall_s:,.0f} s", show_header=False)
    rows: dict[str, Any] = {f"clients: {name}": f"{count:,}" for name, count in soaked.ends.items()}
    rows |= {f"router: {name}": f"{count:,.0f}" for name, count in soaked.results.items()}
    rows |= {"pods: aborted streams": f"{soaked.aborted_at_pods:,}"}
    rows |= {f"left behind: {name}": f"{value:g}" for name, value in soaked.left_behind.items()}
    if grown := growth(soaked.samples, soaked.requests):
        rows["RSS after a tenth, MiB"] = f"{grown.first_bytes / 2**20:.1f}"
        rows["RSS at the end, MiB"] = f"{grown.last_bytes / 2**20:.1f}"
        rows["trend between, bytes per request"] = f"{grown.bytes_per_request:.1f}"
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


if __name__ == "__main__":
    typer.run(main)
