"""Tunes the C library's allocator so that large requests leave no memory behind. No effect outside of glibc.

glibc returns a large block to the operating system when it is freed, but only until the first one has been freed: it
then keeps blocks of up to that size, at most 32 MiB, in the heap of each thread. Cached prompts are allocated between
them, so the memory is never returned: a few bodies of 32 MiB cost 100 MiB for good. The pieces in which a body arrives
are in the heap in any case: what is free between cached prompts is returned every few seconds.

That takes 4 ms for each 100 MiB that were freed since the last time, so it is done more often while large bodies
arrive. A thread would not help: until it has finished, larger allocations of the event loop wait for the heap's lock.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from time import monotonic

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
