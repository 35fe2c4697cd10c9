"""Workers that speak to one another over real Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import router.workers.bus as bus_module
from router.workers.bus import WorkerBus

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.001)


class Worker:
    """Remembers what it hears. `facts` is all that others must know."""

    def __init__(self, folder: Path, number: int, workers: int, facts: bytes = b"") -> None:
        self.facts = facts or b"whole of %d" % number
        self.heard: list[tuple[int, bytes]] = []
        self.lost_ones: list[int] = []
        self.dropped = 0
        self.bus = WorkerBus(folder, number, workers, self._count)

    def _count(self) -> None:
        self.dropped += 1

    def snapshot(self) -> bytes:
        return self.facts

    def apply_remote(self, worker: int, news: bytes) -> None:
        if news == b"nonsense":
            raise ValueError(news)
        self.heard.append((worker, news))

    def remove_worker(self, worker: int) -> None:
        self.lost_ones.append(worker)

    async def answer(self, query: bytes) -> bytes:
        return b"%d: %b" % (self.bus.number, query)


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    """A short path: those of Unix sockets have an end."""
    with TemporaryDirectory() as name:
        yield Path(name)


@asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    """Until the end of the block."""
    tasks = [asyncio.create_task(worker.bus.run(worker)) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def three(folder: Path) -> list[Worker]:
    return [Worker(folder, number, 3) for number in range(3)]


async def test_each_hears_the_whole_of_every_other_and_then_its_news(folder: Path) -> None:
    """In the order in which it was said."""
    one, two, three_ = workers = three(folder)
    async with running(*workers):
        await until(lambda: all(worker.bus.connected_workers == len(worker.heard) == 2 for worker in workers))
        for news in (b"first", b"second"):
            one.bus.publish(news)
        await until(lambda: len(two.heard) == len(three_.heard) == 4)
        assert [news for number, news in two.heard if number == 0] == [b"whole of 0", b"first", b"second"]
        assert [news for number, news in one.heard if number == 0] == []


async def test_querys_are_answered_by_all_who_are_there(folder: Path) -> None:
    """Alone, at once by nobody."""
    one, two, three_ = three(folder)
    async with running(one):
        await until(lambda: (folder / "0").exists())
        assert await one.bus.query(b"who?") == []
        async with running(two, three_):
            await until(
                lambda: one.bus.connected_workers == two.bus.connected_workers == three_.bus.connected_workers == 2
            )
            assert sorted(await one.bus.query(b"who?")) == [b"1: who?", b"2: who?"]
            assert sorted(await two.bus.query(b"who?")) == [b"0: who?", b"2: who?"]


async def test_a_worker_that_ends_is_missed_and_one_that_comes_in_its_place_is_told_everything(folder: Path) -> None:
    """Whoever waits for its answer waits no longer."""
    one, two = Worker(folder, 0, 2), Worker(folder, 1, 2)
    async with running(one):
        async with running(two):
            await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        await until(lambda: one.lost_ones == [1])
        assert await one.bus.query(b"who?") == []
        new = Worker(folder, 1, 2)
        async with running(new):
            await until(lambda: new.heard == [(0, b"whole of 0")])
            await until(lambda: one.bus.connected_workers == 1)


async def test_a_worker_that_does_not_listen_keeps_nobody_waiting_and_is_told_the_whole_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is not kept."""
    monkeypatch.setattr(bus_module, "MAX_UNSENT_BYTES", 1000)
    one, two = Worker(folder, 0, 2), Worker(folder, 1, 2)
    async with running(one, two):
        await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        deaf = two.bus._inbound[0]._transport
        assert deaf
        deaf.pause_reading()
        while not one.dropped:
            one.bus.publish(b"x" * 100_000)
        one.facts = b"whole again"
        deaf.resume_reading()
        await until(lambda: two.heard[-1] == (0, b"whole again"))
        one.bus.publish(b"news")
        await until(lambda: two.heard[-1] == (0, b"news"))


async def test_who_cannot_be_understood_is_heard_anew(folder: Path) -> None:
    """From the beginning, on another connection."""
    one, two = Worker(folder, 0, 2), Worker(folder, 1, 2)
    async with running(one, two):
        await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        one.bus.publish(b"nonsense")
        await until(lambda: two.heard == [(0, b"whole of 0"), (0, b"whole of 0")])
        assert two.lost_ones == [0]
