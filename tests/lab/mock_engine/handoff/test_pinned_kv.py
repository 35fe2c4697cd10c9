"""Held KV is taken once, or its lease ends; its blocks are released exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.mock_engine.pinned_kv import HandoffCounters, PinnedKv, PinTable

pytestmark = [pytest.mark.net, pytest.mark.anyio]
HOURS_S = 9999.0


def held_as(key: str, released: Counter[str]) -> PinnedKv:
    return PinnedKv(key, 1, 48, (1, 2, 3), 0, lambda: released.update([key]))


async def test_held_kv_is_taken_once_and_freed_after_the_transfer() -> None:
    """During the transfer its blocks are in use, and nobody else gets it."""
    released, pins = Counter[str](), PinTable(HOURS_S, HandoffCounters())
    pins.add(held_as("a", released))
    taken = await pins.take("a", wait=False)
    assert taken is not None
    assert (pins.keys, released.total()) == (("a",), 0)
    assert await pins.take("a", wait=False) is None
    pins.free(taken)
    pins.free(taken)
    assert (pins.keys, released, taken.delivered.result()) == ((), {"a": 1}, True)


async def test_a_lease_ends_by_itself() -> None:
    """It is counted, the blocks are free, and `delivered` resolves to False."""
    released, counters = Counter[str](), HandoffCounters()
    pins = PinTable(0.0, counters)
    kept = held_as("a", released)
    pins.add(kept)
    assert await kept.delivered is False
    assert (pins.keys, released, counters.expired) == ((), {"a": 1}, 1)
    assert await pins.take("a", wait=False) is None


async def test_kv_in_transfer_has_no_lease() -> None:
    """The decode leg keeps it."""
    counters = HandoffCounters()
    pins = PinTable(0.0, counters)
    for key in "ab":
        pins.add(held_as(key, Counter()))
    await pins.take("a", wait=False)
    while len(pins.keys) == 2:
        await asyncio.sleep(0)
    assert (pins.keys, counters.expired) == (("a",), 1)


async def test_a_decode_leg_can_arrive_first() -> None:
    """It waits for its own key."""
    pins = PinTable(HOURS_S, HandoffCounters())
    waiting = asyncio.ensure_future(pins.take("b", wait=True))
    for key in "ab":
        await asyncio.sleep(0)
        assert not waiting.done()
        pins.add(held_as(key, Counter()))
    taken = await waiting
    assert taken is not None and taken.key == "b"


async def test_a_reused_key_drops_its_older_kv() -> None:
    """The first entry's blocks are free; its lease does not end the second entry."""
    released, pins = Counter[str](), PinTable(HOURS_S, HandoffCounters())
    first, second = held_as("a", released), held_as("a", released)
    pins.add(first)
    pins.add(second)
    pins.drop(first)
    assert released == {"a": 1} and await pins.take("a", wait=False) is second


@given(st.lists(st.tuples(st.sampled_from(["keep", "take", "free", "drop"]), st.sampled_from("ab"))))
def test_every_block_is_released_exactly_once(acts: list[tuple[str, str]]) -> None:
    """In any order of add, take, free, drop and clear."""
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
        pins.clear()
        assert pins.keys == ()

    asyncio.run(play())
    assert released == Counter(range(len(kept)))
