"""Keeps the memory of this process from pausing requests, and returns what is free.

**Collector.** Python searches young objects for cycles after a number of net allocations. A router with full caches
frees an old prompt for each new one, so no search starts for seconds, and the next one covers tens of thousands of
objects. `gc_loop` therefore searches young objects at a fixed interval, while they are few. A full search takes tens of
milliseconds, so it runs while the router is idle, or rarely.

**Allocator.** glibc returns a large block to the operating system when it is freed, but only until the first one has
been freed: it then keeps blocks of up to that size, at most 32 MiB, in the heap of each thread. Cached prompts are
allocated between them, so the memory is never returned: a few bodies of 32 MiB cost 100 MiB for good. The pieces in
which a body arrives are in the heap in any case: what is free between cached prompts is returned every few seconds.
That takes 4 ms for each 100 MiB that were freed since the last time, so it is done more often while large bodies
arrive. A thread would not help: until it has finished, larger allocations of the event loop wait for the heap's lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Awaitable, Callable
from time import monotonic

# --- Python's collector ---

YOUNG_OBJECTS, YOUNG_SEARCHES = 2_000, 10
"""Thresholds of Python's collector: new objects per search of the youngest generation, and such searches per search of
the next one. A search of 20,000 objects blocks requests for 10 to 25 ms, one of 2,000 mostly for one or two. A few
requests allocate more than Python's default of 700."""
NEVER = 1_000_000
SEARCH_S, MIDDLE_EVERY = 0.05, 4
"""Interval of searches, and searches per search of the middle generation: 0.2 ms each at 1,000 requests a second."""
IDLE_SEARCH_S = 0.25
"""The interval while the router is idle, to save CPU."""
QUIET_S, BUSY_S = 60.0, 600.0
"""Interval of full searches while the router is idle, and while it serves: a precaution, no cycles are known."""
IDLE_S = 1.0
"""The router counts as idle after this time without a request."""


def tune_gc() -> None:
    """Exclude all present objects from searches and set the thresholds. Call it after startup, when tokenizers,
    templates and libraries have created hundreds of thousands of permanent objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_SEARCHES, NEVER)


async def gc_loop(is_serving: Callable[[], bool], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Search until cancelled, unless the collector is disabled. `is_serving`: whether a request is in progress."""
    searches, since_all_s, idle_s = 0, 0.0, 0.0
    while True:
        pause_s = IDLE_SEARCH_S if idle_s > IDLE_S else SEARCH_S
        await sleep(pause_s)
        if not gc.isenabled():
            continue
        since_all_s += pause_s
        idle_s = 0.0 if is_serving() else idle_s + pause_s
        if since_all_s > (QUIET_S if idle_s > IDLE_S else BUSY_S):
            gc.collect()
            since_all_s = 0.0
        else:
            searches += 1
            gc.collect(0 if searches % MIDDLE_EVERY else 1)


# --- glibc's allocator ---

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGE_BYTES = 4 << 20
"""Blocks from this size on are returned when they are freed, and cleared by the kernel when they are allocated, which
takes up to 300 us per MiB. Longer than the text of any ordinary prompt."""
KEPT_BYTES = 8 << 20
"""Free memory at the end of a heap that is kept for the next requests."""
RELEASE_S = 10.0
RELEASE_BYTES = 64 << 20
CHECK_S = 0.1


def tune_malloc() -> None:
    """Fix both thresholds, which glibc otherwise raises. Call it before tokenizers are loaded."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release_free_memory() -> None:
    """Return free memory to the operating system: 6 ms of CPU for a heap of 140 MiB of which every second block of
    200 kB was freed, 42 ms for 1 GiB; 0.2 and 1.3 ms if nothing was freed since. Loading a tokenizer leaves 150 MB that
    glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(KEPT_BYTES)


async def release_loop(
    freed_bytes: Callable[[], int], release: Callable[[], None] = release_free_memory, release_s: float = RELEASE_S
) -> None:
    """Return free memory every `release_s`, and each time that `freed_bytes`, the total size of the request bodies that
    were freed, has grown by `RELEASE_BYTES`. Until cancelled."""
    before_bytes, due_s = freed_bytes(), monotonic() + release_s
    while True:
        await asyncio.sleep(CHECK_S)
        if monotonic() >= due_s or freed_bytes() - before_bytes >= RELEASE_BYTES:
            release()
            before_bytes, due_s = freed_bytes(), monotonic() + release_s
