"""Asking a Redis that may not answer: later each time, never in step, and saying so once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError

from router.feeds.backoff import FIRST_BACKOFF_S, MAX_BACKOFF_S, Backoff

pytestmark = pytest.mark.anyio


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How long each failed question was waited for, without waiting."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    yield waited


async def refuse() -> None:
    """A Redis that is away."""
    raise RedisConnectionError("away")


async def answer() -> None:
    """One that is there."""


async def test_it_waits_longer_each_time_up_to_a_bound(waits: list[float]) -> None:
    """Half to all of a doubling wait: replicas that lost it together do not come back together."""
    backoff = Backoff("it")
    for _ in range(12):
        assert not await backoff.attempt(refuse)
    bounds = [min(FIRST_BACKOFF_S * 2**count, MAX_BACKOFF_S) for count in range(1, 13)]
    assert all(bound / 2 <= waited <= bound for waited, bound in zip(waits, bounds, strict=True))
    assert len(set(waits)) == len(waits)


async def test_an_answer_makes_it_quick_again(waits: list[float]) -> None:
    """And costs no wait itself."""
    backoff = Backoff("it")
    for _ in range(8):
        await backoff.attempt(refuse)
    assert await backoff.attempt(answer)
    assert (backoff.failures, len(waits)) == (0, 8)
    await backoff.attempt(refuse)
    assert waits[-1] <= 2 * FIRST_BACKOFF_S


async def test_it_says_once_that_redis_is_away_and_once_that_it_is_back(waits: list[float]) -> None:
    """A night without Redis is two lines of the log."""
    backoff = Backoff("it")
    with structlog.testing.capture_logs() as lines:
        for question in (answer, refuse, refuse, refuse, answer, answer):
            await backoff.attempt(question)
    assert [line["event"] for line in lines] == ["Redis unavailable", "Redis available again"]


async def test_a_cancellation_that_was_swallowed_is_raised_again() -> None:
    """Client libraries sometimes turn one into an error of their own."""

    async def swallow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RedisConnectionError("connection lost") from None

    task = asyncio.create_task(Backoff("it").attempt(swallow))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_no_error_of_redis_is_not_waited_out(waits: list[float]) -> None:
    """A bug must be seen."""

    async def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Backoff("it").attempt(bug)
    assert not waits
