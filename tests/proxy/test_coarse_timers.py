"""Many calls by one timer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from router.frontends.http.attempt import RESOLUTION_S, CoarseTimers
from tests.virtual_time import run_virtually


def test_each_call_is_made_at_its_time_and_nothing_runs_after_the_last() -> None:
    """In any order; also those that come later. The loop of these tests fails when it has nothing to wait for,
    so the timer must have ended."""
    made: dict[float, float] = {}

    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), CoarseTimers()

        def note(due_s: float, _: float) -> None:
            made[due_s] = loop.time()

        for delay_s in (0.5, 0.05, 0.0, 0.2):
            timers.call_later(delay_s, partial(note, delay_s))
        await asyncio.sleep(1)
        timers.call_later(0.1, partial(note, 1.1))
        await loop.create_future()

    with pytest.raises(RuntimeError, match="nothing is left"):
        run_virtually(main())
    assert [*made] == [0.0, 0.05, 0.2, 0.5, 1.1]
    assert all(0 <= at_s - due_s <= 2 * RESOLUTION_S for due_s, at_s in made.items())


def test_a_call_that_fails_stops_no_other() -> None:
    made: list[str] = []

    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), CoarseTimers()
        loop.set_exception_handler(lambda _, context: made.append(type(context["exception"]).__name__))
        timers.call_later(0.0, lambda _: 1 / 0)
        timers.call_later(0.0, lambda _: made.append("called"))
        await asyncio.sleep(1)

    run_virtually(main())
    assert made == ["ZeroDivisionError", "called"]
