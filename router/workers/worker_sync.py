"""Connects one worker to the other workers of its router.

`WorkerSync` joins the bus, the shared view and the owners of this process, and answers queries of other workers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass

import msgspec

from router.admission.shares import Grants, ShareBook, ShareReport
from router.feeds.load_feed import ScrapeShare
from router.feeds.supervise import Feeds, wait_until
from router.frontends.admin.views import explained_json
from router.observe.exposition import TextFormat
from router.observe.metrics import Metrics
from router.observe.receipts import RecordedDecision
from router.observe.worker_metrics import dump_metrics
from router.types import PodId
from router.workers.bus import WorkerBus
from router.workers.shared_view import SharedOwners, SharedView
from router.workers.supervisor import WorkerIdentity, watch_supervisor

METRICS, PAGE, EXPLAIN, SHARES = b"metrics", b"page", b"explain ", b"shares "
"""Queries between workers: all metrics; a worker's part of the operators' page; the decision for a request id; shares
of quotas."""
SNAPSHOT_WAIT_S = 0.3
"""How long a new worker waits for the snapshot of another one."""


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """What the router does for other workers."""

    apply_command: Callable[[str, str], None]
    """Carry out an admin command of another worker."""
    observe: Callable[[], Awaitable[None]]
    """Update the gauges before they are rendered."""
    page_part: Callable[[], Awaitable[bytes]]
    """This worker's part of the operators' page."""
    find: Callable[[str], RecordedDecision | None]
    """A decision of this worker by request id."""


class WorkerSync:
    """The connections of one worker to the others. Built outside the event loop; `feeds` must run inside it."""

    def __init__(self, identity: WorkerIdentity, owners: SharedOwners, hooks: WorkerHooks, metrics: Metrics) -> None:
        self._identity = identity
        self._hooks = hooks
        self._metrics = metrics
        self._bus = WorkerBus(
            identity.folder, identity.number, identity.workers, metrics.worker_updates_dropped.labels().inc
        )
        self.view = SharedView(
            owners,
            hooks.apply_command,
            self._bus.publish,
            lambda s, call: asyncio.get_running_loop().call_later(s, call),
        )
        self.quotas = QuotaLink(self._bus, SHARES)
        self.snapshot = self.view.snapshot
        self.apply_remote = self.view.apply_remote
        self.remove_worker = self.view.remove_worker

    @property
    def feeds(self) -> Feeds:
        return {
            "other workers": lambda: self._bus.run(self),
            "supervisor": lambda: watch_supervisor(self._identity.supervisor_fd),
        }

    @property
    def scrape_share(self) -> ScrapeShare:
        return ScrapeShare(self._identity.number, lambda: 1 + self._bus.connected_workers, self.view.add_load)

    async def remote_ready_pods(self) -> Set[PodId]:
        """Pods that are ready at other workers; empty if no snapshot arrives within `SNAPSHOT_WAIT_S`."""
        await wait_until(lambda: self.view.remote_ready_pods, SNAPSHOT_WAIT_S)
        return self.view.remote_ready_pods

    async def render(self, text_format: TextFormat) -> bytes:
        """The metrics of all workers, merged."""
        self._metrics.workers.set(1 + self._bus.connected_workers)
        others = await self._bus.query(METRICS)
        await self._hooks.observe()
        return await self._metrics.render_in_turns(others, text_format)

    async def page_parts(self) -> list[bytes]:
        """The other workers' parts of the operators' page."""
        return await self._bus.query(PAGE)

    async def find(self, request_id: str) -> bytes | None:
        """The explanation of a decision that another worker made, as JSON."""
        answers = await self._bus.query(EXPLAIN + request_id.encode("utf-8", "surrogatepass"))
        return next((answer for answer in answers if answer), None)

    async def answer(self, query: bytes) -> bytes:
        """The answer to another worker's query; empty if there is none."""
        if query == METRICS:
            await self._hooks.observe()
            return await dump_metrics(self._metrics.registry)
        if query == PAGE:
            return await self._hooks.page_part()
        if query.startswith(SHARES):
            return self.quotas.answer(query)
        kept = self._hooks.find(query.removeprefix(EXPLAIN).decode("utf-8", "surrogatepass"))
        return explained_json(kept) if kept is not None else b""


KEEPER = 0
"""Number of the worker that has the book."""
_encode = msgspec.msgpack.Encoder().encode


class _Reports(msgspec.Struct, frozen=True, array_like=True):
    member: str
    reports: list[ShareReport]


_decode_reports = msgspec.msgpack.Decoder(_Reports).decode
_decode_grants = msgspec.msgpack.Decoder(Grants).decode


class QuotaLink:
    """The book of shares of one router's workers, for quotas without Redis: worker 0 has it, the others ask it.
    `prefix`: of queries with reports."""

    def __init__(self, bus: WorkerBus, prefix: bytes) -> None:
        self._bus = bus
        self._prefix = prefix
        self._book = ShareBook()
        self._member = f"{bus.number}:{os.getpid()}"

    async def exchange(self, reports: Sequence[ShareReport]) -> Grants:
        """Record these reports. Raises `ConnectionError` if the worker that has the book does not answer."""
        if self._bus.number == KEEPER:
            return self._book.exchange(self._member, reports, time.monotonic())
        query = self._prefix + _encode(_Reports(self._member, list(reports)))
        answers = await self._bus.query(query, only=KEEPER)
        if not answers:
            raise ConnectionError(f"worker {KEEPER} does not answer")
        return _decode_grants(answers[0])

    def answer(self, query: bytes) -> bytes:
        """The answer to another worker's reports. Raises `ValueError` if they are malformed."""
        found = _decode_reports(query.removeprefix(self._prefix))
        return _encode(self._book.exchange(found.member, found.reports, time.monotonic()))
