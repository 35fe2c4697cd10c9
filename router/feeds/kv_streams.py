"""Whose KV events are being followed, and how well?

One supervised `KvFeed` for each pod that publishes; the sink through which all of them reach the index. Knows for each
pod whether its stream is complete. This file never looks into an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from router.engines.adapter import KvEventSource
from router.feeds.kv_zmq import KvFeed
from router.feeds.supervise import supervise
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.types import Generation, KvEvent, Pod, PodId


class EventStore(Protocol):
    """Who takes the events: a router's index, or whoever publishes them."""

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty."""

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Take over what `pod` announced, in order."""

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All was told that there was; `complete` False if some of it is lost for good."""


class KvStreams:
    """Streams by pod; itself the `StreamSink` of all of them."""

    def __init__(self, fleet: Fleet, store: EventStore, metrics: Metrics) -> None:
        self._fleet = fleet
        self._store = store
        self._metrics = metrics
        self._tasks: dict[PodId, asyncio.Task[None]] = {}
        self._followed: dict[PodId, tuple[Pod, Generation]] = {}
        self._complete: dict[PodId, bool] = {}

    def follow(self, pod: Pod, generation: Generation, source: KvEventSource | None) -> None:
        """Begin with an empty cache of `pod`, and follow its events where it publishes any."""
        self.leave(pod.id)
        self._followed[pod.id] = pod, generation
        self._store.add_holder(pod, generation)
        if source is not None:
            feed = KvFeed(pod.id, source, self)
            self._tasks[pod.id] = asyncio.create_task(supervise(f"kv events of {pod.id}", feed.run))

    def leave(self, pod: PodId) -> None:
        """Follow no longer."""
        self._followed.pop(pod, None)
        self._complete.pop(pod, None)
        task = self._tasks.pop(pod, None)
        if task is not None:
            task.cancel()

    def follows(self, pod: PodId) -> bool:
        """Are this pod's events being followed?"""
        return pod in self._tasks

    def state_of(self, pod: PodId) -> str:
        """For people: none, connecting, complete or incomplete."""
        if pod not in self._tasks:
            return "none"
        return {None: "connecting", True: "complete", False: "incomplete"}[self._complete.get(pod)]

    async def stop(self) -> None:
        """End all streams."""
        tasks = list(self._tasks.values())
        for pod in list(self._tasks):
            self.leave(pod)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- StreamSink ---

    def apply(self, pod: PodId, events: tuple[KvEvent, ...]) -> None:
        self._store.apply(pod, events)

    def applied(self, pod: PodId, events: int) -> None:
        self._metrics.kv_events.labels(pod).inc(events)

    def restarted(self, pod: PodId) -> None:
        """A new life of the engine: its cache is empty and must prove itself anew."""
        if pod in self._followed:
            self._store.add_holder(*self._followed[pod])
            self._fleet.restarted(pod)

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        self._complete[pod] = complete
        self._store.caught_up(pod, complete=complete)
        self._metrics.kv_stream.labels(pod).set(complete)
