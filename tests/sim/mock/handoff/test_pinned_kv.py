"""KV is taken once, or its lease ends; its blocks are given back in either case, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.mock.pinned_kv import HandoffCounters, PinnedKv, PinTable

pytestmark = [pytest.mark.net, pytest.mark.anyio]
HOURS_S = 9999.0


def kept_as(key: str, released: Counter[str]) -> PinnedKv:
    return PinnedKv(key, 1, 48, (1, 2, 3), 0, lambda: released.update([key]))


async def test_what_is_kept_is_taken_once_and_freed_on_arrival() -> None:
    """While it is on its way its blocks are still in use, but nobody else gets it."""
    released, pins = Counter[str](), PinTable(HOURS_S, HandoffCounters())
    pins.add(kept_as("a", released))
    taken = await pins.take("a", wait=False)
    assert taken is not None
    assert (pins.keys, released.total()) == (("a",), 0)
    assert await pins.take("a", wait=False) is None
    pins.free(taken)
    pins.free(taken)
    assert (pins.keys, released, taken.delivered.result()) == ((), {"a": 1}, True)


async def test_a_lease_ends_by_itself() -> None:
    """It is counted, the blocks are free, and whoever waits for the delivery hears that there is none."""
    released, counters = Counter[str](), HandoffCounters()
    pins = PinTable(0.0, counters)
    kept = kept_as("a", released)
    pins.add(kept)
    assert await kept.delivered is False
    assert (pins.keys, released, counters.expired) == ((), {"a": 1}, 1)
    assert await pins.take("a", wait=False) is None


async def test_what_is_on_its_way_is_under_no_lease() -> None:
    """The decode leg keeps it alive."""
    counters = HandoffCounters()
    pins = PinTable(0.0, counters)
    for key in "ab":
        pins.add(kept_as(key, Counter()))
    await pins.take("a", wait=False)
    while len(pins.keys) == 2:
        await asyncio.sleep(0)
    assert (pins.keys, counters.expired) == (("a",), 1)
    pins.add(kept_as("c", Counter()))
    pins.expire_all()
    assert (pins.keys, counters.expired) == (("a",), 2)


async def test_a_decode_leg_can_come_first() -> None:
    """It waits for its own key, whatever else arrives."""
    pins = PinTable(HOURS_S, HandoffCounters())
    waiting = asyncio.ensure_future(pins.take("b", wait=True))
    for key in "ab":
        await asyncio.sleep(0)
        assert not waiting.done()
        pins.add(kept_as(key, Counter()))
    taken = await waiting
    assert taken is not None and taken.key == "b"


async def test_a_key_that_is_used_again_loses_what_it_had() -> None:
    """The first one's blocks are free; its lease does not end the second one."""
    released, pins = Counter[str](), PinTable(HOURS_S, HandoffCounters())
    first, second = kept_as("a", released), kept_as("a", released)
    pins.add(first)
    pins.add(second)
    pins.drop(first)
    assert released == {"a": 1} and await pins.take("a", wait=False) is second


@given(st.lists(st.tuples(st.sampled_from(["keep", "take", "free", "drop", "expire"]), st.sampled_from("ab"))))
@settings(max_examples=40)
def test_every_block_is_given_back_exactly_once(acts: list[tuple[str, str]]) -> None:
    """In whatever order things are kept, taken, freed, dropped and forgotten."""
    released = Counter[int]()
    kept: list[PinnedKv] = []

    async def play() -> None:
        pins = PinTable(HOURS_S, HandoffCounters())
        taken: list[PinnedKv] = []
        for act, key in acts:
            if act == "keep":
                kept.append(PinnedKv(key, 1, 16, (), 0, partial(released.update, [len(kept)])))
                pins.add(kept[-1])
            elif act == "take" and (found := await pins.take(key, wait=False)):
                taken.append(found)
            elif act == "free" and taken:
                pins.free(taken.pop())
            elif act == "drop" and kept:
                pins.drop(kept[-1])
            elif act == "expire":
                pins.expire_all()
        pins.clear()
        assert pins.keys == ()

    asyncio.run(play())
    assert released == Counter(range(len(kept)))
