"""The KV event streams of all pods: one supervised `KvFeed` per pod, which writes to the index.

Tracks whether each stream is complete. This module does not inspect events.
"""

from __future__ import annotations

import asyncio

from router.engines.adapter import KvEventSource
from router.feeds.kv_zmq import KvFeed
from router.feeds.supervise import cancel_all, supervise
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.stores.prefix_store import EventStore
from router.types import Generation, KvEvent, Pod, PodId


class KvStreams:
    """Streams by pod, and the `StreamSink` of each."""

    def __init__(self, fleet: Fleet, store: EventStore, metrics: Metrics) -> None:
        self._fleet = fleet
        self._store = store
        self._metrics = metrics
        self._tasks: dict[PodId, asyncio.Task[None]] = {}
        self._followed: dict[PodId, tuple[Pod, Generation]] = {}
        self._complete: dict[PodId, bool] = {}

    def follow(self, pod: Pod, generation: Generation, source: KvEventSource | None) -> None:
        """Add `pod` with an empty cache and, with a source, follow its events."""
        self.leave(pod.id)
        self._followed[pod.id] = pod, generation
        self._store.add_holder(pod, generation)
        if source is not None:
            feed = KvFeed(pod.id, source, self)
            self._tasks[pod.id] = asyncio.create_task(supervise(f"kv events of {pod.id}", feed.run))

    def leave(self, pod: PodId) -> None:
        self._followed.pop(pod, None)
        self._complete.pop(pod, None)
        task = self._tasks.pop(pod, None)
        if task is not None:
            task.cancel()

    def follows(self, pod: PodId) -> bool:
        return pod in self._tasks

    def state_of(self, pod: PodId) -> str:
        """State for display: none, connecting, complete or incomplete."""
        if pod not in self._tasks:
            return "none"
        return {None: "connecting", True: "complete", False: "incomplete"}[self._complete.get(pod)]

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for pod in list(self._tasks):
            self.leave(pod)
        await cancel_all(tasks)

    # --- StreamSink ---

    def apply(self, pod: PodId, events: tuple[KvEvent, ...]) -> None:
        self._store.apply(pod, events)

    def applied(self, pod: PodId, events: int) -> None:
        self._metrics.kv_events.labels(pod).inc(events)

    def restarted(self, pod: PodId) -> None:
        """The engine restarted: its cache is empty and its self-test must run again."""
        if pod in self._followed:
            self._store.add_holder(*self._followed[pod])
            self._fleet.restarted(pod)

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        self._complete[pod] = complete
        self._store.caught_up(pod, complete=complete)
        self._metrics.kv_stream.labels(pod).set(complete)
