"""Starts and stops a router process, and measures its CPU and memory.

Each router runs in its own session. Its child processes stay in that session even after their parent ends, so the
session is the process tree.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.commands.child_processes import Child, logged_process

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU of user and kernel since the start of a process tree, and its current memory (shared pages count twice)."""

    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of `/proc/PID/stat` (proc(5)). The CPU of reaped children counts as their parent's."""

    session: int
    ticks: int
    rss_pages: int


def read_stat(line: str) -> Stat:
    """Parse `/proc/PID/stat`. The name in parentheses may contain blanks and parentheses."""
    fields = line.rpartition(")")[2].split()
    return Stat(session=int(fields[3]), ticks=sum(map(int, fields[11:15])), rss_pages=int(fields[21]))


def process_usage(session: int) -> ProcessUsage:
    """Usage of all processes of a session."""
    found = [stat for _, stat in _processes(session)]
    return ProcessUsage(
        sum(stat.ticks for stat in found) / _TICKS_PER_S, sum(stat.rss_pages for stat in found) * _PAGE_BYTES
    )


@contextmanager
def launch(name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Child]:
    """Run a router inside the block, then stop its whole session; `environment` is added to ours."""
    with ExitStack() as stack:
        process = logged_process(name, list(command), folder, cwd=folder, env={**os.environ, **environment})
        with process as child:
            stack.callback(_kill_session, child.process.pid)  # after the process itself has ended
            yield child


def _kill_session(session: int) -> None:
    for pid, _ in _processes(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended meanwhile


def _processes(session: int) -> Iterator[tuple[int, Stat]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = read_stat((folder / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between listing and reading
        if stat.session == session:
            yield int(folder.name), stat
