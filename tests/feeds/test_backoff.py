"""Backoff of calls to an unavailable Redis."""

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
    """The requested sleeps, without sleeping."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    yield waited


async def refuse() -> None:
    """Redis is unavailable."""
    raise RedisConnectionError("away")


async def answer() -> None:
    """Redis answers."""


async def test_waits_grow_up_to_a_limit(waits: list[float]) -> None:
    """With jitter of up to half, so that replicas do not return at the same time."""
    backoff = Backoff("it")
    for _ in range(12):
        assert not await backoff.attempt(refuse)
    bounds = [min(FIRST_BACKOFF_S * 2**count, MAX_BACKOFF_S) for count in range(12)]
    assert all(bound / 2 <= waited <= bound for waited, bound in zip(waits, bounds, strict=True))
    assert len(set(waits)) == len(waits)


async def test_a_success_resets_the_backoff(waits: list[float]) -> None:
    """It does not wait itself."""
    backoff = Backoff("it")
    for _ in range(8):
        await backoff.attempt(refuse)
    assert await backoff.attempt(answer)
    assert (backoff.failures, len(waits)) == (0, 8)
    await backoff.attempt(refuse)
    assert waits[-1] <= FIRST_BACKOFF_S


async def test_an_outage_is_two_log_lines(waits: list[float]) -> None:
    """One at its start and one at its end."""
    backoff = Backoff("it")
    with structlog.testing.capture_logs() as lines:
        for question in (answer, refuse, refuse, refuse, answer, answer):
            await backoff.attempt(question)
    assert [line["event"] for line in lines] == ["Redis unavailable", "Redis available again"]


async def test_a_swallowed_cancellation_is_raised_again() -> None:
    """Client libraries sometimes turn it into an error of their own."""

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


async def test_other_errors_are_raised(waits: list[float]) -> None:
    """A bug must stay visible."""

    async def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Backoff("it").attempt(bug)
    assert not waits
