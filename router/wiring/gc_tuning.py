"""How long may Python's search for reference cycles hold everybody up?

Python looks through its young objects when it has made so many more of them than it has freed. A router whose memory is
full frees an old prompt for each new one, so that it never has more, for seconds; then tens of thousands of young
objects are looked through at once. So the young are looked through by the clock as well, while they are few. To look
through all takes tens of milliseconds, however little there is to find: that is done when nobody is served, or late.
This file frees nothing itself: where there are no cycles, memory comes back without any search.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

YOUNG_OBJECTS, YOUNG_SEARCHES = 2_000, 10
"""How many more container objects than before until the youngest are searched for cycles, and how many such searches
until those that outlived one are searched as well. Nobody is served meanwhile: at 20,000 a search takes 10 to 25 ms, at
2,000 mostly one or two. Python's own 700 is less than a few requests make."""
NEVER = 1_000_000
SEARCH_S, MIDDLE_EVERY = 0.05, 4
"""Between two searches by the clock, and how many until those that outlived one are searched as well. At 1,000 requests
a second one takes 0.2 ms; a middle one takes the longer, the rarer it comes."""
IDLE_SEARCH_S = 0.25
"""Where nobody is served, little is left behind, and a router that only waits should cost next to nothing."""
QUIET_S, BUSY_S = 60.0, 600.0
"""After so long all are searched where nobody is served, and after so long whoever is. Nothing that is done for
requests and pods is known to leave cycles; this is for what is not known."""
IDLE_S = 1.0
"""Between two requests of a light load, nobody is served either."""


def tune_gc() -> None:
    """Tokenizers, templates and libraries are hundreds of thousands of objects that live as long as the process, and a
    request's own rarely form cycles: walking the former after every few of the latter takes percents of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_SEARCHES, NEVER)


async def gc_loop(serves: Callable[[], bool], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Until cancelled; nothing is searched where the collector is off. `serves`: is anybody being served?"""
    searches, since_all_s, idle_s = 0, 0.0, 0.0
    while True:
        pause_s = IDLE_SEARCH_S if idle_s > IDLE_S else SEARCH_S
        await sleep(pause_s)
        if not gc.isenabled():
            continue
        since_all_s += pause_s
        idle_s = 0.0 if serves() else idle_s + pause_s
        if since_all_s > (QUIET_S if idle_s > IDLE_S else BUSY_S):
            gc.collect()
            since_all_s = 0.0
        else:
            searches += 1
            gc.collect(0 if searches % MIDDLE_EVERY else 1)
