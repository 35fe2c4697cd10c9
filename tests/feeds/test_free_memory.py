"""Memory of large requests is returned to the operating system."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys

import pytest

from router.feeds.process_memory import RELEASE_BYTES, release_loop
from tests.kit.deadlines import DEADLINE_S

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc"),
]

SCRIPT = """
import sys
from router.feeds.process_memory import release_free_memory, tune_malloc

if "tuned" in sys.argv:
    tune_malloc()

def resident_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) // 1024

before, prompts = resident_mib(), []
for _ in range(8):
    if "pieces" in sys.argv:
        body = [bytes([number]) * (256 << 10) for number in range(96)]
    else:
        body = b"x" * (24 << 20)
    prompts.append(bytearray(100_000))  # cached, and behind the body in the heap
    del body
if "released" in sys.argv:
    release_free_memory()
print(resident_mib() - before)
"""


def kept_mib(*arguments: str) -> int:
    """Memory that bodies of 24 MiB leave in a process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_large_bodies_leave_no_memory_behind() -> None:
    """By default glibc keeps it: a block that is cached after a body prevents that the heap shrinks."""
    assert kept_mib() > 20
    assert kept_mib("tuned") < 5


def test_free_memory_between_cached_prompts_is_returned() -> None:
    """A body arrives in pieces, which are too small to be returned when they are freed."""
    assert kept_mib("tuned", "pieces") > 20
    assert kept_mib("tuned", "pieces", "released") < 12


async def test_memory_is_returned_whenever_many_bodies_were_freed() -> None:
    """Without waiting for the next interval: the time that it takes grows with what is free."""
    freed_bytes, released = 0, asyncio.Event()
    loop = asyncio.create_task(release_loop(lambda: freed_bytes, released.set, release_s=1e9))
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                await asyncio.sleep(0)
                assert not released.is_set()
                freed_bytes += RELEASE_BYTES
                await released.wait()
                released.clear()
    finally:
        loop.cancel()


async def test_memory_is_returned_at_intervals() -> None:
    released = asyncio.Event()
    loop = asyncio.create_task(release_loop(lambda: 0, released.set, release_s=0.0))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await released.wait()
    finally:
        loop.cancel()
