"""Tunes Python's garbage collector so that it does not pause requests.

Python searches young objects for cycles after a number of net allocations. A router with full caches frees an old
prompt for each new one, so no search starts for seconds, and the next one covers tens of thousands of objects.
`gc_loop` therefore searches young objects at a fixed interval, while they are few. A full search takes tens of
milliseconds, so it runs while the router is idle, or rarely.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

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
