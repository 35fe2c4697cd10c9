"""Workers exchange frames over real Unix sockets."""

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


class RecordingWorker:
    """Records what it receives. `state` is its snapshot."""

    def __init__(self, folder: Path, number: int, workers: int, state: bytes = b"") -> None:
        self.state = state or b"snapshot of %d" % number
        self.received: list[tuple[int, bytes]] = []
        self.removed: list[int] = []
        self.dropped = 0
        self.bus = WorkerBus(folder, number, workers, self._count)

    def _count(self) -> None:
        self.dropped += 1

    def snapshot(self) -> bytes:
        return self.state

    def apply_remote(self, worker: int, update: bytes) -> None:
        if update == b"malformed":
            raise ValueError(update)
        self.received.append((worker, update))

    def remove_worker(self, worker: int) -> None:
        self.removed.append(worker)

    async def answer(self, query: bytes) -> bytes:
        return b"%d: %b" % (self.bus.number, query)


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    """A short path: the length of Unix socket paths is limited."""
    with TemporaryDirectory() as name:
        yield Path(name)


@asynccontextmanager
async def running(*workers: RecordingWorker) -> AsyncIterator[None]:
    """The buses run inside the block."""
    tasks = [asyncio.create_task(worker.bus.run(worker)) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def three_workers(folder: Path) -> list[RecordingWorker]:
    return [RecordingWorker(folder, number, 3) for number in range(3)]


async def test_each_worker_receives_a_snapshot_and_then_updates(folder: Path) -> None:
    """In the order in which they were sent."""
    one, two, three = workers = three_workers(folder)
    async with running(*workers):
        await until(lambda: all(worker.bus.connected_workers == len(worker.received) == 2 for worker in workers))
        for update in (b"first", b"second"):
            one.bus.publish(update)
        await until(lambda: len(two.received) == len(three.received) == 4)
        assert [update for number, update in two.received if number == 0] == [b"snapshot of 0", b"first", b"second"]
        assert [update for number, update in one.received if number == 0] == []


async def test_queries_are_answered_by_all_connected_workers(folder: Path) -> None:
    """With no other worker the result is empty."""
    one, two, three = three_workers(folder)
    async with running(one):
        await until(lambda: (folder / "0").exists())
        assert await one.bus.query(b"who?") == []
        async with running(two, three):
            await until(
                lambda: one.bus.connected_workers == two.bus.connected_workers == three.bus.connected_workers == 2
            )
            assert sorted(await one.bus.query(b"who?")) == [b"1: who?", b"2: who?"]
            assert sorted(await two.bus.query(b"who?")) == [b"0: who?", b"2: who?"]


async def test_a_dead_worker_is_removed_and_its_successor_receives_snapshots(folder: Path) -> None:
    """A query does not wait for the dead worker."""
    one, two = RecordingWorker(folder, 0, 2), RecordingWorker(folder, 1, 2)
    async with running(one):
        async with running(two):
            await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        await until(lambda: one.removed == [1])
        assert await one.bus.query(b"who?") == []
        new = RecordingWorker(folder, 1, 2)
        async with running(new):
            await until(lambda: new.received == [(0, b"snapshot of 0")])
            await until(lambda: one.bus.connected_workers == 1)


async def test_updates_for_a_worker_that_does_not_read_are_dropped_and_a_snapshot_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending does not wait."""
    monkeypatch.setattr(bus_module, "MAX_UNSENT_BYTES", 1000)
    one, two = RecordingWorker(folder, 0, 2), RecordingWorker(folder, 1, 2)
    async with running(one, two):
        await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        transport = two.bus._inbound[0]._transport
        assert transport
        transport.pause_reading()
        while not one.dropped:
            one.bus.publish(b"x" * 100_000)
        one.state = b"second snapshot"
        transport.resume_reading()
        await until(lambda: two.received[-1] == (0, b"second snapshot"))
        one.bus.publish(b"update")
        await until(lambda: two.received[-1] == (0, b"update"))


async def test_a_malformed_update_closes_the_link_and_a_snapshot_follows(folder: Path) -> None:
    """On a new connection."""
    one, two = RecordingWorker(folder, 0, 2), RecordingWorker(folder, 1, 2)
    async with running(one, two):
        await until(lambda: one.bus.connected_workers == two.bus.connected_workers == 1)
        one.bus.publish(b"malformed")
        await until(lambda: two.received == [(0, b"snapshot of 0"), (0, b"snapshot of 0")])
        assert two.removed == [0]
