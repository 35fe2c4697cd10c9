"""How does one of several workers take part in their router?

Connects the shared view of `feeds/beside` to the owners of this process, and answers what other workers ask. A router
of one process has none of it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from router.api.explain_routes import explained_json
from router.feeds.beside.bus import Bus
from router.feeds.beside.view import Owners, SharedView
from router.feeds.load import Turns
from router.fleet.lifecycle import PodEvent
from router.observe.metrics import Metrics
from router.observe.metrics_merge import dump_metrics, merge_metrics
from router.observe.receipts import RecordedDecision
from router.types import PodId
from router.wiring.orders import DRAIN, Orders

METRICS, EXPLAIN = b"metrics", b"explain "
"""What workers ask one another: their metrics, and a decision by the id of its request."""
BEGIN_S = 0.3
"""How long a worker that starts waits for others to say whom they use."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many workers this one is, and where they meet."""

    folder: Path
    number: int
    workers: int


class Beside:
    """One worker's part. `find` is its own journal's; `observe` brings its gauges up to date."""

    def __init__(
        self,
        place: Place,
        owners: Owners,
        orders: Orders,
        metrics: Metrics,
        observe: Callable[[], None],
        find: Callable[[str], RecordedDecision | None],
    ) -> None:
        self._place = place
        self._metrics = metrics
        self._observe = observe
        self._find = find
        self._orders = orders
        self._bus = Bus(place.folder, place.number, place.workers, metrics.worker_updates_dropped.labels().inc)
        self._view = SharedView(
            owners, self, self._bus.say, lambda s, call: asyncio.get_running_loop().call_later(s, call)
        )
        orders.told = self._view.order
        self.obey = orders.obey

    @property
    def feeds(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What must run."""
        return {"other workers": lambda: self._bus.run(self._view), "the parent": self._heed_parent}

    @property
    def turns(self) -> Turns:
        """When this worker scrapes loads."""
        return Turns(self._place.number, lambda: 1 + self._bus.heard, self._view.loaded)

    def is_drained(self, pod: PodId) -> bool:
        """Did somebody order so at any worker?"""
        return self._view.ordered(DRAIN + pod) == PodEvent.DRAIN.value

    async def used(self) -> Set[PodId]:
        """Pods that other workers sent requests to when this one began; none where it is the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                while not self._view.used_elsewhere:  # noqa: ASYNC110  # whoever speaks first
                    await asyncio.sleep(POLL_S)
        return self._view.used_elsewhere

    def begin(self) -> None:
        """The pods are known: take in what others have sent there."""
        self._view.begin()

    async def render(self) -> bytes:
        """The metrics of all workers."""
        self._metrics.workers.set(1 + self._bus.heard)
        others = await self._bus.ask(METRICS)
        self._observe()
        return await self._metrics.render_in_turns(merge_metrics(self._metrics.registry, others))

    async def find(self, request_id: str) -> bytes | None:
        """A decision that another worker made, as it is shown."""
        answers = await self._bus.ask(EXPLAIN + request_id.encode("utf-8", "surrogatepass"))
        return next((answer for answer in answers if answer), None)

    async def answer(self, question: bytes) -> bytes:
        """What another worker asked; empty for what is not known here."""
        if question == METRICS:
            self._observe()
            return await dump_metrics(self._metrics.registry)
        kept = self._find(question.removeprefix(EXPLAIN).decode("utf-8", "surrogatepass"))
        return explained_json(kept) if kept is not None else b""

    async def _heed_parent(self) -> None:
        """Every byte from it stands for a SIGHUP that it got; when it is gone, this worker ends as on SIGTERM."""
        words = asyncio.StreamReader()
        loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(words)
        pipe, _ = await loop.connect_read_pipe(lambda: protocol, sys.stdin.buffer)
        with closing(pipe):
            while await words.read(1):
                await self._orders.reload_here()
        signal.raise_signal(signal.SIGTERM)
