"""Does anything that the router does beside requests hold its event loop?

    python loadtest/stalls.py --bench BENCH                              # mock.c and lg.c lie in BENCH
    python loadtest/stalls.py --bench BENCH --holds                      # what is it that holds it?
    python loadtest/stalls.py --bench BENCH --activities requests,metrics --seconds 5 --out stalls.json

A router before a hundred pods under a light load, and one activity after the other. The looks are those that
`warmroute_loop_lag_seconds` counts. A machine that gives the router no core makes it late as well; so beside them stand
the looks of an idle loop at the same time, and how many the router was late for by its own CPU time. That may have been
many short callbacks in a row: `--holds` tells the CPU time of each.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.activities import ACTIVITIES, KINDS, PODS, Stage, staged
from loadtest.bodies import Prose, packed, warm_chats
from loadtest.rig import Rig, build, demo_tokenizer, mocks
from loadtest.watched import Hold, Look
from router.cli.child_processes import end_on_sigterm
from router.cli.serve import allow_all_open_files

TITLE = "stalls"
WIDTH = 100
"""Columns of text that the table has room in; a narrow terminal folds its lines."""
PROMPT_TOKENS = 2_000
BODIES = 512
REQUESTS_PER_S = 100
WARM_UP_S = 5.0
SETTLE_S = 1.0
"""Between two activities."""
BOUNDS_MS = (1, 2, 5, 10)
HELD_MS = 5
"""What nothing may take."""
CULPRITS = 3


class Share(msgspec.Struct, frozen=True):
    """Of some looks: how many came no later than each of `BOUNDS_MS`, and how late the last one was."""

    looks: int
    within: tuple[int, ...]
    worst_ms: float


class Seen(msgspec.Struct, frozen=True):
    """What was seen of one activity. `own`: looks that were late by more than `HELD_MS` of the process' own CPU time;
    `holds`: callbacks that took so much, and `at` what these were at, with how often."""

    activity: str
    router: Share
    idle: Share
    own: int
    worst_own_ms: float
    holds: int
    longest_hold_ms: float
    at: tuple[tuple[str, int], ...]
    failed: int = 0
    """Requests of the load."""


def share(looks: Sequence[Look]) -> Share:
    """Of these looks."""
    within = tuple(sum(look.late_s * 1000 <= bound for look in looks) for bound in BOUNDS_MS)
    return Share(len(looks), within, max((look.late_s * 1000 for look in looks), default=0.0))


def seen(activity: str, router: Sequence[Look | Hold], idle: Sequence[Look | Hold], failed: int = 0) -> Seen:
    """Of what was written down during one activity."""
    looks = [line for line in router if isinstance(line, Look)]
    holds = [line for line in router if isinstance(line, Hold)]
    long = [hold for hold in holds if hold.cpu_s * 1000 > HELD_MS]
    return Seen(
        activity,
        share(looks),
        share([line for line in idle if isinstance(line, Look)]),
        own=sum(look.own_s * 1000 > HELD_MS for look in looks),
        worst_own_ms=max((look.own_s * 1000 for look in looks), default=0.0),
        holds=len(long),
        longest_hold_ms=max((hold.cpu_s * 1000 for hold in holds), default=0.0),
        at=tuple(Counter(at for hold in long for at in hold.at).most_common(CULPRITS)),
        failed=failed,
    )


@dataclass(slots=True)
class Looks:
    """What watched processes write to files that begin with this path."""

    path: Path

    def between(self, began_s: float, ended_s: float) -> list[Look | Hold]:
        """All of that time."""
        files = self.path.parent.glob(f"{self.path.name}.*")
        lines = (line for file in files for line in _decoded(file.read_bytes()))
        return [line for line in lines if began_s <= line.at_s <= ended_s]


def _decoded(text: bytes) -> Iterator[Look | Hold]:
    """Whole lines alone: the last one may not have been written to its end."""
    whole, _, _ = text.rpartition(b"\n")
    return (msgspec.json.decode(line, type=Look | Hold) for line in whole.splitlines())


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c.")],
    activities: Annotated[str, typer.Option(help=f"Of {', '.join(ACTIVITIES)}.")] = ",".join(ACTIVITIES),
    seconds: Annotated[float, typer.Option(min=1, max=60, help="Of each activity, at the least.")] = 10,
    holds: Annotated[bool, typer.Option(help="Run the router on asyncio's own loop, and time each callback.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
) -> None:
    """Do one after the other, and look."""
    wanted = [name for name in ACTIVITIES if name in activities.split(",")]
    allow_all_open_files()
    with TemporaryDirectory(prefix="warmroute-stalls-") as temporary:
        rig = build(bench, Path(temporary))
        rig.bodies(TITLE).write_bytes(packed(warm_chats(Prose(demo_tokenizer()), PROMPT_TOKENS, BODIES), stream=True))
        with idle_loop(rig.folder) as idle, mocks(rig.mock, PODS) as pods:
            pods.told(chunks=4)
            found = asyncio.run(_all(wanted, seconds, rig, pods.ports, idle, holds=holds))
    Console(width=max(Console().width, WIDTH)).print(table(found))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


@contextmanager
def idle_loop(folder: Path) -> Iterator[Looks]:
    """A loop that does nothing but look."""
    path = folder / "idle"
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("watched.py"), path, "idle"])
    try:
        yield Looks(path)
    finally:
        process.kill()
        process.wait()


async def _all(
    wanted: Sequence[str], seconds: float, rig: Rig, ports: Sequence[int], idle: Looks, *, holds: bool
) -> list[Seen]:
    """A router for each kind, with all the activities that need one of that kind."""
    end_on_sigterm()
    found: list[Seen] = []
    for kind in KINDS:
        names = [name for name in wanted if ACTIVITIES[name].kind is kind]
        if names:
            async with staged(kind, ports, rig.folder, holds=holds) as stage:
                await _loaded(rig, stage.port, WARM_UP_S)
                for name in names:
                    found.append(await _one(name, seconds, rig, stage, idle))
    return found


async def _one(name: str, seconds: float, rig: Rig, stage: Stage, idle: Looks) -> Seen:
    """Under load, for so long or until it has ended."""
    activity = ACTIVITIES[name]
    await asyncio.sleep(SETTLE_S)
    async with activity.prepared(stage) as act:
        began_s = time.monotonic()
        load = asyncio.create_task(_loaded(rig, stage.port, seconds if activity.load else 0.0))
        while time.monotonic() < began_s + seconds:
            step_s = time.monotonic()
            await act()
            await asyncio.sleep(max(0.0, step_s + activity.every_s - time.monotonic()))
        failed = await load
        ended_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)  # the last looks are written
    router = Looks(stage.looks)
    result = seen(name, router.between(began_s, ended_s), idle.between(began_s, ended_s), failed)
    print(msgspec.json.encode(result).decode(), file=sys.stderr, flush=True)
    return result


async def _loaded(rig: Rig, port: int, seconds: float) -> int:
    """Streamed requests at a steady pace. How many of them failed, or have not ended long after."""
    requests = round(REQUESTS_PER_S * seconds)
    if not requests:
        return 0
    command = rig.command(TITLE, port, "-s", "-c", 64, "-n", requests, "-r", REQUESTS_PER_S, "-T", seconds + 30)
    said = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(said.stdout)
    return int(answer["errs"] + requests - answer["done"])


def table(found: Sequence[Seen]) -> Table:
    """A row an activity."""
    names = ("looks", *(f"<{bound}" for bound in BOUNDS_MS), "worst", "idle\n<5", "idle\nworst")
    names += ("own\n>5", "own\nworst", "holds\n>5", "holds\nworst", "failed")
    right = (Column(name, justify="right", no_wrap=True) for name in names)
    shown = Table(
        Column("activity", no_wrap=True), *right, title="how late the loop came, ms", box=SIMPLE_HEAD, padding=(0, 0)
    )
    for one in found:
        router, idle = one.router, one.idle
        within = (f"{count / max(router.looks, 1):.1%}" for count in router.within)
        idle_within = f"{idle.within[BOUNDS_MS.index(HELD_MS)] / max(idle.looks, 1):.1%}"
        late = (f"{router.looks:,}", *within, f"{router.worst_ms:.1f}", idle_within, f"{idle.worst_ms:.1f}")
        own = (f"{one.own}", f"{one.worst_own_ms:.1f}", f"{one.holds}", f"{one.longest_hold_ms:.1f}", f"{one.failed}")
        shown.add_row(one.activity, *late, *own)
    return shown


if __name__ == "__main__":
    typer.run(main)
