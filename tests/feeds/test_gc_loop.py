"""Young objects are searched for cycles while they are few."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from weakref import ref

import pytest

from router.feeds.process_memory import BUSY_S, IDLE_S, IDLE_SEARCH_S, QUIET_S, SEARCH_S, YOUNG_OBJECTS, gc_loop

pytestmark = pytest.mark.anyio

REMEMBERED = 10 * YOUNG_OBJECTS


@pytest.fixture
def rare_collector() -> Iterator[None]:
    """The thresholds of a started router."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    yield
    gc.set_threshold(*before)


def replace_in_full_cache(memory: deque[list[int]]) -> None:
    """Each new object frees an old one."""
    for number in range(REMEMBERED):
        memory.popleft()
        memory.append([number])


class Cycle:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.itself = self


def young() -> int:
    return len(gc.get_objects(generation=0))


@pytest.mark.usefixtures("rare_collector")
async def test_young_objects_do_not_accumulate_in_a_full_cache() -> None:
    """With Python's thresholds alone they would: their number never grows."""
    memory = deque([number] for number in range(REMEMBERED))
    gc.collect()
    replace_in_full_cache(memory)
    assert young() > REMEMBERED - YOUNG_OBJECTS
    searches = asyncio.create_task(gc_loop(lambda: False))
    try:
        while young() > YOUNG_OBJECTS:
            await asyncio.sleep(SEARCH_S)
    finally:
        searches.cancel()


@pytest.mark.parametrize(("busy", "after_s"), [((False,), QUIET_S), ((True,), BUSY_S), ((True, False), BUSY_S)])
async def test_full_searches_run_while_idle_or_rarely(busy: tuple[bool, ...], after_s: float) -> None:
    """A short pause between two requests does not count as idle."""
    old = Cycle()
    left = ref(old)
    gc.collect()
    del old
    slept_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds
        await asyncio.sleep(0)

    searches = asyncio.create_task(gc_loop(partial(next, cycle(busy)), sleep))
    try:
        while left():
            await asyncio.sleep(0)
    finally:
        searches.cancel()
    assert slept_s == pytest.approx(after_s, rel=0.01)


async def test_the_interval_is_longer_while_idle() -> None:
    """It is short again with the next request."""
    served = iter([False] * 30 + [True] * 30)
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await gc_loop(partial(next, served), sleep)
    idle = slept_s.index(IDLE_SEARCH_S)
    assert sum(slept_s[:idle]) == pytest.approx(IDLE_S, abs=2 * SEARCH_S)
    assert slept_s[:idle] == [SEARCH_S] * idle
    assert slept_s[idle:] == [IDLE_SEARCH_S] * (31 - idle) + [SEARCH_S] * 30


async def test_a_disabled_collector_is_respected() -> None:
    """Somebody has disabled it on purpose."""
    lost = Cycle()
    left = ref(lost)
    gc.disable()
    searches = asyncio.create_task(gc_loop(lambda: False))
    try:
        del lost
        await asyncio.sleep(3 * SEARCH_S)
        assert left()
        gc.enable()
        while left():
            await asyncio.sleep(SEARCH_S)
    finally:
        gc.enable()
        searches.cancel()
