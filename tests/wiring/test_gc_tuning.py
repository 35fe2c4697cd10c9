"""Young objects are looked through while they are few."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from weakref import ref

import pytest

from router.wiring.gc_tuning import BUSY_S, IDLE_S, IDLE_SEARCH_S, QUIET_S, SEARCH_S, YOUNG_OBJECTS, gc_loop

pytestmark = pytest.mark.anyio

REMEMBERED = 10 * YOUNG_OBJECTS


@pytest.fixture
def rare_collector() -> Iterator[None]:
    """Python's own searches come as rarely as a router has them that is started for good."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    yield
    gc.set_threshold(*before)


def forget_as_much_as_is_learnt(memory: deque[list[int]]) -> None:
    """A full memory takes in as much again as it holds."""
    for number in range(REMEMBERED):
        memory.popleft()
        memory.append([number])


class Cycle:
    """What only a search finds."""

    def __init__(self) -> None:
        self.itself = self


def young() -> int:
    return len(gc.get_objects(generation=0))


@pytest.mark.usefixtures("rare_collector")
async def test_a_full_memory_does_not_gather_young_objects() -> None:
    """Python alone lets them gather, because there are never more than before."""
    memory = deque([number] for number in range(REMEMBERED))
    gc.collect()
    forget_as_much_as_is_learnt(memory)
    assert young() > REMEMBERED - YOUNG_OBJECTS
    searches = asyncio.create_task(gc_loop(lambda: False))
    try:
        while young() > YOUNG_OBJECTS:
            await asyncio.sleep(SEARCH_S)
    finally:
        searches.cancel()


@pytest.mark.parametrize(("busy", "after_s"), [((False,), QUIET_S), ((True,), BUSY_S), ((True, False), BUSY_S)])
async def test_the_old_are_searched_when_nobody_is_served_or_late(busy: tuple[bool, ...], after_s: float) -> None:
    """A cycle that has outlived all other searches is there for as long; a moment between two requests is none."""
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


async def test_where_nobody_is_served_it_wakes_up_less_often() -> None:
    """And as often as ever once somebody is found to be served."""
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


async def test_where_the_collector_is_off_nothing_is_searched() -> None:
    """Whoever turned it off had a reason."""
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
