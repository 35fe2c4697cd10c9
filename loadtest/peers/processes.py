"""How is a router of any make started and ended, and what has it used?

A router gets a session of its own; whatever it spawns stays in that session even when its parent ends, so that the
session is the process tree. This file never knows which router it runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from router.cli.child_processes import STOP_WITHIN_S, Child

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Used:
    """By a process tree since it began: CPU of user and kernel, and memory at this moment (pages that two processes
    share count twice)."""

    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Stat:
    """What we read of one `/proc/PID/stat` (proc(5)): reaped children's CPU is their parent's."""

    session: int
    ticks: int
    rss_pages: int


def read_stat(line: str) -> Stat:
    """The name in parentheses may hold anything, blanks and parentheses included."""
    fields = line.rpartition(")")[2].split()
    return Stat(session=int(fields[3]), ticks=sum(map(int, fields[11:15])), rss_pages=int(fields[21]))


def used(session: int) -> Used:
    """By every process of that session."""
    found = [stat for _, stat in _processes(session)]
    return Used(sum(stat.ticks for stat in found) / _TICKS_PER_S, sum(stat.rss_pages for stat in found) * _PAGE_BYTES)


@contextmanager
def launched(name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Child]:
    """A running router, ended with all it spawned; `environment` is added to ours."""
    output, log = folder / f"{name}.out", folder / f"{name}.log"
    with output.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=err, start_new_session=True, cwd=folder, env={**os.environ, **environment}
        )
    try:
        yield Child(name, process, output, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kindly at first; then whatever is left of its session."""
    process.terminate()
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, _ in _processes(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile


def _processes(session: int) -> Iterator[tuple[int, Stat]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = read_stat((folder / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended between the listing and the reading
        if stat.session == session:
            yield int(folder.name), stat
