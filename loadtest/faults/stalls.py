"""Measures whether work besides requests blocks the router's event loop.

    python -m loadtest.faults.stalls
    python -m loadtest.faults.stalls --callbacks                  # which callbacks block it
    python -m loadtest.faults.stalls --activities requests,metrics --seconds 5 --out stalls.json

A router in front of 100 pods under a light load, with one activity after the other. The lag samples are those of
`warmroute_loop_lag_seconds`. A busy machine makes the router late as well, so the samples of an idle loop are shown
for comparison, and the lag that the router's own CPU time explains. That may have been many short callbacks in a row:
`--callbacks` measures the CPU time of each.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from loadtest.bench.bodies import SourceText, pack, warm_chats
from loadtest.bench.rig import BENCH, BenchFolder, Rig, build, mocks
from loadtest.commands.child_processes import cancel_on_sigterm
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.faults.activities import ACTIVITIES, PODS, SETUPS, Target, running_target
from loadtest.faults.loop_watch import LagSample, LongCallback
from router.cli.options import writable
from router.cli.serve import allow_all_open_files

TITLE = "stalls"
WIDTH = 100
"""Minimum width of the table in columns."""
PROMPT_TOKENS = 2_000
BODIES = 512
REQUESTS_PER_S = 100
WARM_UP_S = 5.0
SETTLE_S = 1.0
"""Between two activities."""
BOUNDS_MS = (1, 2, 5, 10)
MAX_HOLD_MS = 5
"""The most that one callback may take."""
MAX_SOURCES = 3


class LagSummary(msgspec.Struct, frozen=True):
    """Lag samples: how many were within each of `BOUNDS_MS`, and the worst."""

    looks: int
    within: tuple[int, ...]
    worst_ms: float


class ActivityResult(msgspec.Struct, frozen=True):
    """Result of one activity. `own`: samples whose lag of more than `MAX_HOLD_MS` the process's own CPU time explains;
    `callbacks`: callbacks longer than that, and `at` their most frequent stack samples with counts."""

    activity: str
    router: LagSummary
    idle: LagSummary
    own: int
    worst_own_ms: float
    callbacks: int
    longest_hold_ms: float
    at: tuple[tuple[str, int], ...]
    failed: int = 0
    """Failed requests of the load."""


def summarize(looks: Sequence[LagSample]) -> LagSummary:
    """Summarize lag samples."""
    within = tuple(sum(look.late_s * 1000 <= bound for look in looks) for bound in BOUNDS_MS)
    return LagSummary(len(looks), within, max((look.late_s * 1000 for look in looks), default=0.0))


def activity_result(
    activity: str, router: Sequence[LagSample | LongCallback], idle: Sequence[LagSample | LongCallback], failed: int = 0
) -> ActivityResult:
    """Summarize the records of one activity."""
    looks = [line for line in router if isinstance(line, LagSample)]
    callbacks = [line for line in router if isinstance(line, LongCallback)]
    long = [hold for hold in callbacks if hold.cpu_s * 1000 > MAX_HOLD_MS]
    return ActivityResult(
        activity,
        summarize(looks),
        summarize([line for line in idle if isinstance(line, LagSample)]),
        own=sum(look.own_s * 1000 > MAX_HOLD_MS for look in looks),
        worst_own_ms=max((look.own_s * 1000 for look in looks), default=0.0),
        callbacks=len(long),
        longest_hold_ms=max((hold.cpu_s * 1000 for hold in callbacks), default=0.0),
        at=tuple(Counter(at for hold in long for at in hold.at).most_common(MAX_SOURCES)),
        failed=failed,
    )


@dataclass(slots=True)
class WatchLog:
    """Files that watched processes write, by path prefix."""

    path: Path

    def between(self, began_s: float, ended_s: float) -> list[LagSample | LongCallback]:
        """All records of a time range."""
        files = self.path.parent.glob(f"{self.path.name}.*")
        lines = (line for file in files for line in _decoded(file.read_bytes()))
        return [line for line in lines if began_s <= line.at_s <= ended_s]


def _decoded(text: bytes) -> Iterator[LagSample | LongCallback]:
    """Decode complete lines; the last one may still be being written."""
    whole, _, _ = text.rpartition(b"\n")
    return (msgspec.json.decode(line, type=LagSample | LongCallback) for line in whole.splitlines())


def main(
    bench: BenchFolder = BENCH,
    activities: Annotated[str, typer.Option(help=f"Of {', '.join(ACTIVITIES)}.")] = ",".join(ACTIVITIES),
    seconds: Annotated[float, typer.Option(min=1, max=60, help="Minimum seconds per activity.")] = 10,
    callbacks: Annotated[
        bool, typer.Option(help="Run the router on asyncio's own loop, and time each callback.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.", callback=writable)] = None,
) -> None:
    """Run the activities one after the other."""
    wanted = [name for name in ACTIVITIES if name in activities.split(",")]
    allow_all_open_files()
    with TemporaryDirectory(prefix="warmroute-stalls-") as temporary:
        rig = build(bench, Path(temporary))
        rig.bodies(TITLE).write_bytes(
            pack(warm_chats(SourceText(mock_tokenizer()), PROMPT_TOKENS, BODIES), stream=True)
        )
        with watch_idle_loop(rig.folder) as idle, mocks(rig.mock, PODS) as pods:
            pods.configure(chunks=4)
            found = asyncio.run(_measure_all(wanted, seconds, rig, pods.ports, idle, callbacks=callbacks))
    Console(width=max(Console().width, WIDTH)).print(table(found))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


@contextmanager
def watch_idle_loop(folder: Path) -> Iterator[WatchLog]:
    """Record the lag of an idle loop."""
    path = folder / "idle"
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("loop_watch.py"), path, "idle"])
    try:
        yield WatchLog(path)
    finally:
        process.kill()
        process.wait()


async def _measure_all(
    wanted: Sequence[str], seconds: float, rig: Rig, ports: Sequence[int], idle: WatchLog, *, callbacks: bool
) -> list[ActivityResult]:
    """Run one router per setup, with the activities that need it."""
    cancel_on_sigterm()
    found: list[ActivityResult] = []
    for setup in SETUPS:
        names = [name for name in wanted if ACTIVITIES[name].setup is setup]
        if names:
            async with running_target(setup, ports, rig.folder, callbacks=callbacks) as target:
                await _send_load(rig, target.port, WARM_UP_S)
                for name in names:
                    found.append(await _measure(name, seconds, rig, target, idle))
    return found


async def _measure(name: str, seconds: float, rig: Rig, target: Target, idle: WatchLog) -> ActivityResult:
    """Run an activity under load, for `seconds` or until it ends."""
    activity = ACTIVITIES[name]
    await asyncio.sleep(SETTLE_S)
    async with activity.prepared(target) as action:
        began_s = time.monotonic()
        load = asyncio.create_task(_send_load(rig, target.port, seconds if activity.load else 0.0))
        while time.monotonic() < began_s + seconds:
            step_s = time.monotonic()
            await action()
            await asyncio.sleep(max(0.0, step_s + activity.every_s - time.monotonic()))
        failed = await load
        ended_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)  # until the last samples are written
    router = WatchLog(target.looks)
    result = activity_result(name, router.between(began_s, ended_s), idle.between(began_s, ended_s), failed)
    print(msgspec.json.encode(result).decode(), file=sys.stderr, flush=True)
    return result


async def _send_load(rig: Rig, port: int, seconds: float) -> int:
    """Send streamed requests at a steady rate; returns how many failed or did not finish."""
    requests = round(REQUESTS_PER_S * seconds)
    if not requests:
        return 0
    command = rig.command(TITLE, port, "-s", "-c", 64, "-n", requests, "-r", REQUESTS_PER_S, "-T", seconds + 30)
    said = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(said.stdout)
    return int(answer["errs"] + requests - answer["done"])


def table(found: Sequence[ActivityResult]) -> Table:
    """One row per activity."""
    names = ("looks", *(f"<{bound}" for bound in BOUNDS_MS), "worst", "idle\n<5", "idle\nworst")
    names += ("own\n>5", "own\nworst", "calls\n>5", "calls\nworst", "failed")
    right = (Column(name, justify="right", no_wrap=True) for name in names)
    shown = Table(Column("activity", no_wrap=True), *right, title="loop lag, ms", box=SIMPLE_HEAD, padding=(0, 0))
    for one in found:
        router, idle = one.router, one.idle
        within = (f"{count / max(router.looks, 1):.1%}" for count in router.within)
        idle_within = f"{idle.within[BOUNDS_MS.index(MAX_HOLD_MS)] / max(idle.looks, 1):.1%}"
        late = (f"{router.looks:,}", *within, f"{router.worst_ms:.1f}", idle_within, f"{idle.worst_ms:.1f}")
        own = (
            f"{one.own}",
            f"{one.worst_own_ms:.1f}",
            f"{one.callbacks}",
            f"{one.longest_hold_ms:.1f}",
            f"{one.failed}",
        )
        shown.add_row(one.activity, *late, *own)
    return shown


if __name__ == "__main__":
    typer.run(main)
