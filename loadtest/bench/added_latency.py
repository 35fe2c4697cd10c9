"""Measures the latency that a router adds at half of its maximum throughput.

    python -m loadtest.bench.added_latency
    python -m loadtest.bench.added_latency --routers nginx,warmroute --share 0.5

First the maximum throughput of each router is measured. Then requests are sent evenly at half of that rate, through the
router and directly to a mock pod; times count from when a request was due. The difference is the added latency. `--at`
gives all routers the same rate; otherwise a faster router is measured under more load.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from loadtest.bench.hotpath import CHUNKS, LOADS, Load, send, write_bodies
from loadtest.bench.rig import (
    BENCH,
    DIRECT,
    BenchFolder,
    GeneratorStats,
    Mocks,
    Rig,
    RunningRouter,
    build,
    launch_router,
    mocks,
)
from loadtest.peers.catalog import PEERS
from router.cli.options import writable

SATURATING = 0.25
"""Part of a load's requests used to find the maximum rate."""
SECONDS = 4.0
CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Latency at one rate through one router and directly: to the last byte, for streams to the first token."""

    round: int
    router: str
    load: str
    max_per_s: float
    per_s: float
    p50_us: float
    p99_us: float
    direct_p50_us: float
    direct_p99_us: float

    @property
    def added_us(self) -> tuple[float, float]:
        """Added p50 and p99."""
        return self.p50_us - self.direct_p50_us, self.p99_us - self.direct_p99_us


def main(
    bench: BenchFolder = BENCH,
    routers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}.")] = "nginx,warmroute",
    loads: Annotated[str, typer.Option(help=f"Of {'; '.join(LOADS)}; separated by semicolons.")] = "2K fresh;2K warm",
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the router's maximum rate.")] = 0.5,
    at: Annotated[float | None, typer.Option(min=1.0, help="Requests per second, instead of a share.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Write the results of every round here, as JSON.", callback=writable)
    ] = None,
) -> None:
    """Compare the latency that routers add."""
    chosen = {name: LOADS[name] for name in loads.split(";")}
    with TemporaryDirectory(prefix="warmroute-added-") as temporary:
        rig = build(bench, Path(temporary))
        write_bodies(rig, chosen)
        with mocks(rig.mock) as pods:
            found: list[LatencyResult] = []
            for number in range(rounds):
                for name in routers.split(","):
                    with launch_router(name, pods, rig.folder / f"{number}-{name}") as router:
                        found += delays(number, name, chosen, rig, pods, router, share=share, at=at)
    Console().print(table(found))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))


def delays(
    number: int,
    name: str,
    loads: Mapping[str, Load],
    rig: Rig,
    pods: Mocks,
    router: RunningRouter,
    *,
    share: float,
    at: float | None,
) -> Iterator[LatencyResult]:
    """Measure each load through one router and directly."""
    for title, load in loads.items():
        pods.configure(chunks=CHUNKS, chunk_pause_us=load.chunk_pause_us)
        max_per_s = send(rig, title, replace(load, requests=int(load.requests * SATURATING)), router)["rps"]
        per_s = at or max_per_s * share
        paced = replace(load, requests=int(per_s * SECONDS), connections=CONNECTIONS)
        with launch_router(DIRECT, pods, rig.folder) as straight:
            ways = [times(send(rig, title, paced, to, "-r", per_s), load) for to in (router, straight)]
        yield LatencyResult(number, name, title, max_per_s, per_s, *ways[0], *ways[1])


def times(answer: GeneratorStats, load: Load) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    return (answer["ttft50"], answer["ttft99"]) if load.stream else (answer["p50"], answer["p99"])


def table(found: Sequence[LatencyResult]) -> Table:
    """Medians over the rounds, one row per router and load."""
    rounds = 1 + max(one.round for one in found)
    columns = ("most/s", "at/s", "p50 us", "p99 us", "added p50 us", "added p99 us")
    shown = Table(Column("router", no_wrap=True), "load", *columns, title=f"medians of {rounds}")
    for router, load in dict.fromkeys((one.router, one.load) for one in found):
        rows = [one for one in found if (one.router, one.load) == (router, load)]
        cells = [(one.max_per_s, one.per_s, one.p50_us, one.p99_us, *one.added_us) for one in rows]
        shown.add_row(router, load, *(f"{statistics.median(column):,.0f}" for column in zip(*cells, strict=True)))
    return shown


if __name__ == "__main__":
    typer.run(main)
