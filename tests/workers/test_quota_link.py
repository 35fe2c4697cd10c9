"""Workers keep quotas together over the book of worker 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from router.admission.quotas import Hold, Quota, Quotas, Short
from router.admission.shares import ShareReport
from router.admission.sharing import TOLERANCE, MeterSharing
from router.feeds.quota_feed import QuotaFeed
from router.workers.worker_sync import QuotaLink
from tests.workers.test_bus import RecordingWorker, running, until

pytestmark = [pytest.mark.net, pytest.mark.anyio]

LIMITS = (Quota(requests_per_minute=200),)


class SharingWorker(RecordingWorker):
    """A worker with quotas."""

    def __init__(self, folder: Path, number: int, workers: int) -> None:
        super().__init__(folder, number, workers)
        self.link = QuotaLink(self.bus, b"shares ")
        self.sharing = MeterSharing(workers)
        self.quotas = Quotas(self.sharing)
        self.feed = QuotaFeed(self.sharing, self.link.exchange, clock=lambda: 1000.0)

    async def answer(self, query: bytes) -> bytes:
        return self.link.answer(query)

    async def admitted(self, requests: int) -> int:
        """How many of the requests are admitted."""
        count = 0
        for _ in range(requests):
            found = self.quotas.begin("t", LIMITS, "m", "", 1000.0)
            if isinstance(found, Short) and found.may_fit:
                await self.feed.next_exchange()
                found = self.quotas.begin("t", LIMITS, "m", "", 1000.0)
            count += isinstance(found, Hold)
        return count


@asynccontextmanager
async def sharing_workers(count: int) -> AsyncIterator[list[SharingWorker]]:
    with TemporaryDirectory() as folder:
        workers = [SharingWorker(Path(folder), number, count) for number in range(count)]
        async with asyncio.timeout(30.0), AsyncExitStack() as stack:
            await stack.enter_async_context(running(*workers))
            await until(lambda: all(worker.bus.connected_workers == count - 1 for worker in workers))
            for worker in workers:
                task = asyncio.create_task(worker.feed.run())
                stack.push_async_callback(asyncio.wait, [task])
                stack.callback(task.cancel)
            await until(lambda: all(one.sharing.members == count and not one.sharing.is_away for one in workers))
            yield workers


async def test_workers_keep_a_quota_together() -> None:
    async with sharing_workers(3) as workers:
        counts = await asyncio.gather(*(worker.admitted(150) for worker in workers))
        assert 200 * 0.98 <= sum(counts) <= 200 * (1 + TOLERANCE)


async def test_one_worker_can_admit_nearly_all() -> None:
    async with sharing_workers(3) as workers:
        assert 200 * 0.98 <= await workers[2].admitted(400) <= 200 * (1 + TOLERANCE)


async def test_without_worker_0_the_others_have_their_local_shares() -> None:
    with TemporaryDirectory() as folder:
        alone = SharingWorker(Path(folder), 1, 4)
        with pytest.raises(ConnectionError):
            await alone.link.exchange([ShareReport("m", 10, 0, 5)])
        assert await alone.admitted(400) == 50
