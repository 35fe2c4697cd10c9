"""Tunes Python's garbage collector so that it does not pause requests.

Python searches young objects for cycles when it has allocated more of them than it has freed. A router whose caches
are full frees an old prompt for each new one, so that no search starts for seconds; then one search covers tens of
thousands of objects. `gc_loop` therefore searches the young objects by the clock, while they are few. A full search
takes tens of milliseconds and runs while the router is idle, or rarely. Memory without cycles needs no search.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

YOUNG_OBJECTS, YOUNG_SEARCHES = 2_000, 10
"""Thresholds of Python's collector: new container objects until the youngest generation is searched, and such searches
until the next generation is searched. No request is served meanwhile: with 20,000 objects a search takes 10 to 25 ms,
with 2,000 mostly one or two. Python's default of 700 is less than a few requests allocate."""
NEVER = 1_000_000
SEARCH_S, MIDDLE_EVERY = 0.05, 4
"""Interval of searches by the clock, and how many of them until the middle generation is searched. At 1,000 requests a
second a search takes 0.2 ms; a rarer middle search takes longer."""
IDLE_SEARCH_S = 0.25
"""The interval while the router is idle, to save CPU."""
QUIET_S, BUSY_S = 60.0, 600.0
"""Interval of full searches while the router is idle, and while it serves. Requests and pods are not known to leave
cycles; a full search is for unknown ones."""
IDLE_S = 1.0
"""The router counts as idle after this time without a request."""


def tune_gc() -> None:
    """Exclude all present objects from searches and set the thresholds. Call it after startup: tokenizers, templates
    and libraries are hundreds of thousands of objects that live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_SEARCHES, NEVER)


async def gc_loop(is_serving: Callable[[], bool], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Search by the clock until cancelled, unless the collector is disabled. `is_serving`: whether a request is in
    progress."""
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
