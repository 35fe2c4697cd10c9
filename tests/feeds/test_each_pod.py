"""One task a pod, from found to gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from router.feeds.each_pod import each_pod, pause
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import Pod

pytestmark = pytest.mark.anyio
MakePod = Callable[..., Pod]
Running = Callable[[Any], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


class Watched:
    """Who is watched at the moment, and how often each had news."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.news: list[str] = []

    async def watch(self, pod_id: str, news: asyncio.Event) -> None:
        self.now.add(pod_id)
        try:
            while True:
                await news.wait()
                news.clear()
                self.news.append(pod_id)
        finally:
            self.now.discard(pod_id)


async def test_pods_are_watched_while_they_are_there(make_pod: MakePod, running: Running, until: Until) -> None:
    """Those that were there before, those that join later, and no longer those that go."""
    fleet, watched = Fleet(), Watched()
    fleet.sync([make_pod("a")])
    async with running(each_pod("x", fleet, watched.watch)):
        await until(lambda: watched.now == {"a"})
        fleet.sync([make_pod("a"), make_pod("b")])
        await until(lambda: watched.now == {"a", "b"})
        fleet.sync([make_pod("b")])
        await until(lambda: watched.now == {"b"})


async def test_a_watch_hears_of_its_own_pod(make_pod: MakePod, running: Running, until: Until) -> None:
    """Changes of state and of epoch; not of another pod."""
    fleet, watched = Fleet(), Watched()
    fleet.sync([make_pod("a"), make_pod("b")])
    async with running(each_pod("x", fleet, watched.watch)):
        await until(lambda: len(watched.now) == 2)
        fleet.event("a", PodEvent.PROBE_OK)
        await until(lambda: watched.news == ["a"])
        fleet.restarted("b")
        await until(lambda: watched.news == ["a", "b"])


async def test_a_pod_that_comes_back_is_watched_anew(make_pod: MakePod, running: Running, until: Until) -> None:
    """Gone and found again, with nothing left of the first watch."""
    fleet, watched = Fleet(), Watched()
    fleet.sync([make_pod("a")])
    async with running(each_pod("x", fleet, watched.watch)):
        await until(lambda: watched.now == {"a"})
        fleet.sync([])
        await until(lambda: watched.now == set())
        fleet.sync([make_pod("a")])
        await until(lambda: watched.now == {"a"})
        assert watched.news == []


async def test_the_end_leaves_nothing_behind(make_pod: MakePod, running: Running, until: Until) -> None:
    """Cancelled, every watch ends, and the fleet tells nobody any more."""
    fleet, watched = Fleet(), Watched()
    fleet.sync([make_pod("a"), make_pod("b")])
    before = asyncio.all_tasks()
    async with running(each_pod("x", fleet, watched.watch)):
        await until(lambda: len(watched.now) == 2)
    assert (watched.now, asyncio.all_tasks(), fleet._listeners) == (set(), before, [])


async def test_a_pause_ends_early_on_news_and_uses_it_up() -> None:
    """And otherwise by itself."""
    news = asyncio.Event()
    news.set()
    async with asyncio.timeout(5.0):
        await pause(news, 1e6)
        assert not news.is_set()
        await pause(news, 0.001)
