"""How long may Python's search for reference cycles hold everybody up?

Python looks through its young objects when it has made so many more of them than it has freed. A router whose memory is
full frees an old prompt for each new one, so that it never has more, for seconds; then tens of thousands of young
objects are looked through at once. So the young are looked through by the clock as well, while they are few. This file
frees nothing itself: where there are no cycles, memory comes back without any search.
"""

from __future__ import annotations

import asyncio
import gc

YOUNG_OBJECTS, YOUNG_SEARCHES, MIDDLE_SEARCHES = 2_000, 10, 100
"""How many more container objects than before until the youngest are searched for cycles, how many such searches until
those that outlived one are searched as well, and how many of these until all are. Nobody is served meanwhile: at 20,000
a search takes 10 to 25 ms, at 2,000 mostly one or two. Python's own 700 is less than a few requests make."""
SEARCH_S = 0.05
"""Between two searches by the clock. At 1,000 requests a second one takes 0.2 ms."""


def spare_the_old() -> None:
    """Tokenizers, templates and libraries are hundreds of thousands of objects that live as long as the process, and a
    request's own rarely form cycles: walking the former after every few of the latter takes percents of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_SEARCHES, MIDDLE_SEARCHES)


async def search_by_the_clock() -> None:
    """Until cancelled; nothing is searched where the collector is off."""
    searches = 0
    while True:
        await asyncio.sleep(SEARCH_S)
        if gc.isenabled():
            searches += 1
            gc.collect(0 if searches % YOUNG_SEARCHES else 1)
