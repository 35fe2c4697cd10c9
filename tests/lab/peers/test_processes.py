"""A router's whole process tree is measured and stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from loadtest.peers.processes import Stat, launch, process_usage, read_stat

LARGE_BYTES = 64 * 1024 * 1024

BURNING = "import time\nwhile time.process_time() < 0.3: pass"
PARENT = f"""
import subprocess, sys, time
subprocess.run([sys.executable, '-c', {BURNING!r}], check=True)
print('burnt', flush=True)
time.sleep(60)
"""
ORPHANING = """
import os, time
if os.fork():
    time.sleep(60)
print(os.getpid(), flush=True)
held = b'x' * (64 * 1024 * 1024)
time.sleep(60)
"""


def printed(output: Path) -> str:
    """The first complete line of a child's output: under PYTHONUNBUFFERED a line comes in pieces."""

    def line() -> str:
        first, end, _ = output.read_text().partition("\n")
        return first if end else ""

    return until(line)


def until(found: Callable[[], str]) -> str:
    deadline_s = monotonic() + 20
    while monotonic() < deadline_s:
        if said := found():
            return said
    raise AssertionError("the child printed nothing")


def test_a_name_with_blanks_and_parentheses_does_not_shift_the_fields() -> None:
    """As in proc(5): session is field 6, the times are 14 to 17, resident pages 24."""
    fields = " ".join(str(number) for number in range(4, 53))
    assert read_stat(f"77 (a) b (c) S {fields}") == Stat(session=6, ticks=14 + 15 + 16 + 17, rss_pages=24)


def test_cpu_of_a_child_that_has_ended_still_counts(tmp_path: Path) -> None:
    """Its parent has reaped it."""
    with launch("burner", [sys.executable, "-c", PARENT], tmp_path, {}) as burner:
        assert printed(burner.output) == "burnt"
        # The kernel counts whole ticks of 10 ms and rounds user and system time of each process down.
        assert process_usage(burner.process.pid).cpu_s >= 0.26


def test_memory_of_a_running_child_counts(tmp_path: Path) -> None:
    """The parent alone uses less than its child."""
    with launch("holder", [sys.executable, "-c", ORPHANING], tmp_path, {}) as holder:
        printed(holder.output)
        until(lambda: "held" if process_usage(holder.process.pid).rss_bytes > LARGE_BYTES else "")


def test_children_that_outlive_a_router_are_killed(tmp_path: Path) -> None:
    """SIGTERM reaches only the parent; the others are found by their session."""
    with launch("parent", [sys.executable, "-c", ORPHANING], tmp_path, {}) as parent:
        child = printed(parent.output)
        assert Path(f"/proc/{child}").exists()
    assert until(lambda: "gone" if _is_gone(child) else "") == "gone"


def _is_gone(pid: str) -> bool:
    """Ended, whether init has reaped it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
