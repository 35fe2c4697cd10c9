"""Tunes the C library's allocator so that large requests leave no memory behind. No effect outside of glibc.

glibc returns a large block to the operating system when it is freed, but only until the first one has been freed: it
then keeps blocks of up to that size, at most 32 MiB, in the heap of each thread. Cached prompts are allocated between
them, so the memory is never returned: a few bodies of 32 MiB cost 100 MiB for good. The pieces in which a body arrives
are in the heap in any case: what is free between cached prompts is returned every few seconds.
"""

from __future__ import annotations

import asyncio
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGE_BYTES = 4 << 20
"""Blocks from this size on are returned when they are freed, and cleared by the kernel when they are allocated, which
takes up to 300 us per MiB. Longer than the text of any ordinary prompt."""
KEPT_BYTES = 8 << 20
"""Free memory at the end of a heap that is kept for the next requests."""
RELEASE_S = 10.0


def tune_malloc() -> None:
    """Fix both thresholds, which glibc otherwise raises. Call it before tokenizers are loaded."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release_free_memory() -> None:
    """Return free memory to the operating system: up to 3 ms for a heap of 140 MB full of holes, 0.3 ms if nothing has
    changed since. Loading a tokenizer leaves 150 MB that glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(KEPT_BYTES)


async def release_loop() -> None:
    """Return free memory until cancelled."""
    while True:
        await asyncio.sleep(RELEASE_S)
        release_free_memory()
