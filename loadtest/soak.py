"""Does anything stay behind when a million requests have come, and every fifth client has left too soon?

    python loadtest/soak.py --bench BENCH                                # mock.c and lg.c lie in BENCH
    python loadtest/soak.py --bench BENCH --requests 50000 --out soak.json

Streamed and unstreamed chats from many connections; one in ten clients hangs up within milliseconds of asking, mostly
before the first byte, and one in ten in the middle of a stream. The router's memory is read all the while; its caches
are full after some 50,000 requests, so that a shorter run shows growth that would end. At the end nothing may be in
flight, by its own gauges, and no client connected, by the kernel; else the exit code is 1.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.bodies import MARKER, Prose, chat_bodies, warm_chats
from loadtest.rig import OURS, Routed, build, demo_tokenizer, mocks, routed

PROMPT_TOKENS = 500
BODIES = 512
CONNECTIONS = 64
CHUNKS = 8
CHUNK_PAUSE_US = 3_000
UNSTREAMED = 0.25
LEAVE_AT_ONCE, LEAVE_AMID = 0.1, 0.1
AT_ONCE_S = 0.004
"""The longest that a client waits who leaves at once."""
SAMPLE_S = 0.5
QUIET_WITHIN_S = 30.0
SETTLED = 0.1
"""Of all requests: what memory grows by after these should be nothing."""
GAUGES = ("warmroute_in_flight_requests", "warmroute_pod_in_flight_requests")
_CONNECTED = ("01", "08")
"""ESTABLISHED and CLOSE_WAIT in /proc/net/tcp (proc_net_tcp)."""


class End(Enum):
    """Of one request, as its client saw it."""

    ANSWERED = "answered"
    LEFT_AT_ONCE = "left at once"
    LEFT_AMID = "left amid the stream"
    REFUSED = "refused"
    """Not with 200."""
    HUNG_UP = "hung up on"


@dataclass(frozen=True, slots=True)
class Sample:
    """The router's memory when so many requests had ended."""

    at_s: float
    ended: int
    rss_bytes: int


@dataclass(slots=True)
class Soaked:
    """What came of it. `left_behind`: what should be 0 at the end, by name; `results` as the router counted them."""

    requests: int
    ends: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    left_behind: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    aborted_at_pods: int = 0
    wall_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Nothing failed, nothing stayed."""
        failed = self.ends[End.REFUSED.value] + self.ends[End.HUNG_UP.value]
        return not failed and not any(self.left_behind.values())


@dataclass(frozen=True, slots=True)
class Growth:
    """Of memory after the first tenth: from its end to the last sample, and the trend."""

    first_bytes: int
    last_bytes: int
    bytes_per_request: float


def growth(samples: Sequence[Sample], requests: int) -> Growth | None:
    """None where fewer than two samples were taken after the first tenth. The trend is that of least squares."""
    late = [sample for sample in samples if sample.ended >= requests * SETTLED]
    if len({sample.ended for sample in late}) < 2:
        return None
    trend = linear_regression([sample.ended for sample in late], [sample.rss_bytes for sample in late])
    return Growth(late[0].rss_bytes, late[-1].rss_bytes, trend.slope)


def left_behind(metrics: str) -> dict[str, float]:
    """The sum of each gauge that should be 0, over its labels."""
    return {name: sum(_values(metrics, name).values()) for name in GAUGES}


def results(metrics: str) -> dict[str, float]:
    """Requests by how they ended for the router."""
    found: Counter[str] = Counter()
    for labels, value in _values(metrics, "warmroute_requests_total").items():
        found[labels.partition('result="')[2].partition('"')[0]] += int(value)
    return dict(found)


def connected(table: str, port: int) -> int:
    """Connections whose local end is that port, of a `/proc/net/tcp`."""
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(int(row[1].rpartition(":")[2], 16) == port and row[3] in _CONNECTED for row in rows)


def _values(metrics: str, name: str) -> dict[str, float]:
    rows = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", metrics, re.MULTILINE)
    return {labels: float(value) for labels, value in rows}


class Asker(asyncio.Protocol):
    """One connection; one request at a time. `lost` once it cannot be used any more."""

    def __init__(self) -> None:
        self.lost = False
        self._end: asyncio.Future[End] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes, *, leave_after_s: float | None = None, leave_after_pieces: int = 0) -> End:
        """Send it and wait for the end of the answer, or leave before."""
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
            self._ended(End.LEFT_AMID)

    def on_message_complete(self) -> None:
        self._ended(End.ANSWERED if self._parser.get_status_code() == httpx.codes.OK else End.REFUSED)

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self._ended(End.HUNG_UP)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._transport.close()

    def _leave_at_once(self) -> None:
        self.lost = True
        self._transport.close()
        self._ended(End.LEFT_AT_ONCE)

    def _ended(self, end: End) -> None:
        if self._end and not self._end.done():
            self._end.set_result(end)


@dataclass(frozen=True, slots=True)
class Bodies:
    """What is sent, with the marker that makes each unlike all others."""

    streamed: Sequence[bytes]
    whole: Sequence[bytes]

    def request(self, number: int, *, stream: bool) -> bytes:
        """The bytes of that request."""
        bodies = self.streamed if stream else self.whole
        body = bodies[number % len(bodies)].replace(MARKER.encode(), b"%016x" % number)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def soak(requests: int, bodies: Bodies, router: Routed) -> Soaked:
    """All of them, from many connections at once, and what is left when all clients have gone."""
    soaked, numbers, began_s = Soaked(requests), iter(range(requests)), time.monotonic()
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
    """One client after another, until there are no more numbers."""
    asker: Asker | None = None
    for number in numbers:
        if asker is None or asker.lost:
            _, asker = await asyncio.get_running_loop().create_connection(Asker, "127.0.0.1", port)
        ends[(await _one(asker, number, bodies, chance)).value] += 1
    if asker:
        asker.close()


def _one(asker: Asker, number: int, bodies: Bodies, chance: random.Random) -> Awaitable[End]:
    kind, stream = chance.random(), chance.random() >= UNSTREAMED
    if kind < LEAVE_AT_ONCE:
        return asker.ask(bodies.request(number, stream=stream), leave_after_s=chance.uniform(0, AT_ONCE_S))
    if kind < LEAVE_AT_ONCE + LEAVE_AMID:
        return asker.ask(bodies.request(number, stream=True), leave_after_pieces=chance.randint(1, 3))
    return asker.ask(bodies.request(number, stream=stream))


async def _sample(soaked: Soaked, router: Routed, began_s: float) -> None:
    """Until cancelled."""
    while True:
        rss_bytes = await asyncio.to_thread(lambda: router.rss_bytes)
        soaked.samples.append(Sample(time.monotonic() - began_s, soaked.ends.total(), rss_bytes))
        await asyncio.sleep(SAMPLE_S)


async def _until_quiet(soaked: Soaked, router: Routed) -> None:
    """Until nothing is left behind, or that has been waited for long enough."""
    deadline_s = time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < deadline_s:
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(f"{router.url}/metrics")).text
        await asyncio.sleep(0.2)
        clients = connected(await asyncio.to_thread(Path("/proc/net/tcp").read_text), router.port)
        soaked.left_behind = {**left_behind(metrics), "connected clients": clients}
        soaked.results = results(metrics)
        if not any(soaked.left_behind.values()):
            return


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")],
    requests: Annotated[int, typer.Option(min=100)] = 1_000_000,
    router: Annotated[str, typer.Option(help="The name of another than ours has no gauges to be read.")] = OURS,
    out: Annotated[Path | None, typer.Option(help="Write figures and samples here, as JSON.")] = None,
) -> None:
    """Ask, leave, and look what stays."""
    with TemporaryDirectory(prefix="warmroute-soak-") as temporary:
        rig = build(bench, Path(temporary))
        chats = list(warm_chats(Prose(demo_tokenizer()), PROMPT_TOKENS, BODIES))
        bodies = Bodies(chat_bodies(chats, stream=True), chat_bodies(chats, stream=False))
        with mocks(rig.mock) as pods, routed(router, pods, rig.folder / router) as to:
            pods.told(chunks=CHUNKS, chunk_pause_us=CHUNK_PAUSE_US)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                soaked = runner.run(soak(requests, bodies, to))
            soaked.aborted_at_pods = pods.counted("abort")
    Console().print(table(soaked))
    if out is not None:
        out.write_bytes(msgspec.json.encode(soaked))
    raise typer.Exit(0 if soaked.clean else 1)


def table(soaked: Soaked) -> Table:
    """Everything, a row a fact."""
    shown = Table("", "", title=f"{soaked.requests:,} requests in {soaked.wall_s:,.0f} s", show_header=False)
    rows: dict[str, Any] = {f"clients: {name}": f"{count:,}" for name, count in soaked.ends.items()}
    rows |= {f"router: {name}": f"{count:,.0f}" for name, count in soaked.results.items()}
    rows |= {"pods: streams broken off": f"{soaked.aborted_at_pods:,}"}
    rows |= {f"left behind: {name}": f"{value:g}" for name, value in soaked.left_behind.items()}
    if grown := growth(soaked.samples, soaked.requests):
        rows["RSS after a tenth, MiB"] = f"{grown.first_bytes / 2**20:.1f}"
        rows["RSS at the end, MiB"] = f"{grown.last_bytes / 2**20:.1f}"
        rows["trend between, bytes a request"] = f"{grown.bytes_per_request:.1f}"
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


if __name__ == "__main__":
    typer.run(main)
