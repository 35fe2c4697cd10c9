"""The lateness of a blocked event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from router.observe import loop_lag
from router.observe.loop_lag import IDLE_AFTER_SAMPLES, IDLE_INTERVAL_S, INTERVAL_S, LoopLag, call_later

pytestmark = pytest.mark.anyio

STALL_S = 0.03


def hold_up(seconds: float) -> None:
    """Block the loop for a time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


async def test_a_call_receives_its_lateness() -> None:
    """The loop was blocked when the call was due."""
    late: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    call_later(INTERVAL_S, late.set_result)
    hold_up(INTERVAL_S + STALL_S)
    assert await late >= STALL_S


async def test_a_stall_shows_in_the_next_sample() -> None:
    """The first sample is late by the stall, and sampling goes on."""
    seen: list[float] = []
    feed = asyncio.create_task(LoopLag(seen.append, lambda: True).run())
    await asyncio.sleep(0)
    hold_up(INTERVAL_S + STALL_S)
    while len(seen) < 3:
        await asyncio.sleep(INTERVAL_S)
    assert seen[0] >= STALL_S
    assert min(seen) >= 0.0
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    last = len(seen)
    await asyncio.sleep(3 * INTERVAL_S)
    assert len(seen) == last


async def test_an_idle_router_samples_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a short pause between requests; and at the full rate from the first sample with a request."""
    waits: list[float] = []
    calls: list[Callable[[float], None]] = []

    def later(delay_s: float, call: Callable[[float], None]) -> asyncio.TimerHandle:
        waits.append(delay_s)
        calls.append(call)
        return asyncio.get_running_loop().call_later(60.0, call, 0.0)

    monkeypatch.setattr(loop_lag, "call_later", later)
    served = iter([True, *[False] * (IDLE_AFTER_SAMPLES - 1), True, *[False] * (IDLE_AFTER_SAMPLES + 1), True])
    feed = asyncio.create_task(LoopLag(lambda _late_s: None, lambda: next(served)).run())
    await asyncio.sleep(0)
    for _ in range(2 * IDLE_AFTER_SAMPLES + 3):
        calls.pop()(0.0)
    assert waits == [INTERVAL_S] * (2 * IDLE_AFTER_SAMPLES + 1) + [IDLE_INTERVAL_S] * 2 + [INTERVAL_S]
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
