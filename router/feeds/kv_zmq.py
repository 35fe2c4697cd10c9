"""Follows the KV events of pods over ZMQ and writes them to the index.

Each publisher (a pod, or one of its data-parallel ranks) has one supervised feed. It catches up by replay, follows live
messages and fills gaps by replay. It detects a restart of the engine by message numbers, and after a reconnect by
comparing the last message. Messages that are lost for good mark the stream incomplete; known blocks stay. A pod that
sends more than is read of one loses its blocks, is reported, and is followed again after a pause. This module does not
inspect events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Protocol

import structlog

from router.engines.adapter import KvEventSource
from router.feeds.supervise import cancel_all, loop_time_s, supervise
from router.feeds.watch import Check, Turn, check_of_missing
from router.feeds.zmtp import LOST, Report, ZmqLink, connected, subscribe
from router.fleet.fleet import Fleet
from router.guards import Bound, OutOfBounds
from router.index.events import MESSAGE, UndecodableBatch, decode_events, parse_frames, split_events
from router.observe.metrics import KvStreamMetrics
from router.stores.prefix_store import EventStore, LocalStore
from router.types import Generation, KvEvent, Pod, PodId

REPLAY_IDLE_MS = 2000
"""A replay without messages for this time has ended, with or without its terminator."""

REPLAY = Bound("replay of KV events", 64 * 1024 * 1024, 100_000)
"""What is read of it before it is applied; it is asked for the rest then."""
REPLAY_S, MAX_REPLAYS = 30.0, 32
"""How long one replay may take, and how many follow each other."""
MIN_BLOCKS, MAX_BLOCKS, TIERS_FACTOR = 1 << 16, 1 << 20, 16
"""Blocks of one pod in memory: as many times its own capacity, because it has other tiers."""
EXCESS_PAUSE_S = 60.0
CACHE_LOOK_S = 5.0

CHECK_ENDPOINT = "check that the engine publishes there, and that no firewall or network policy blocks the port"
END_OF_REPLAY = b"\xff" * 8
"""Sequence number -1, which terminates a replay."""

log = structlog.get_logger()


class KvSink(Protocol):
    """Receives the events of a stream."""

    def apply(self, pod: PodId, events: tuple[KvEvent, ...]) -> None:
        """Events of one message in order; a long message in several calls."""

    def restarted(self, pod: PodId) -> None:
        """The engine restarted: its blocks are gone."""

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        """Whether all messages of this epoch were received."""


class StreamSink(KvSink, Protocol):
    """A `KvSink` that also counts messages."""

    def applied(self, pod: PodId, events: int) -> None:
        """A message with this number of events was applied."""


class KvFeed:
    """The stream of one publisher."""

    def __init__(
        self, pod: PodId, source: KvEventSource, sink: StreamSink, *, replay_idle_ms: int = REPLAY_IDLE_MS
    ) -> None:
        self._pod = pod
        self._source = source
        self._sink = sink
        self._replay_idle_ms = replay_idle_ms
        self._sequence = StreamPosition()
        self._last_payload = b""
        self._apply_lock = asyncio.Lock()
        self._events = 0
        """Events of the last message, so far."""
        self.undecodable = 0

    async def run(self, report: Report = lambda _: None) -> None:
        """Follow the stream until cancelled. Raises `OutOfBounds`, alone or in a group."""
        await subscribe(self._source.endpoint, MESSAGE, self._follow, report)

    async def _follow(self, link: ZmqLink) -> None:
        """Replay after each connection, because messages may have been missed before, then receive."""
        async with self._apply_lock:
            await self._replay()
            self._report_state()
        while True:
            await self.receive(await link.receive())

    async def receive(self, frames: Sequence[bytes]) -> None:
        parsed = self._parse(frames)
        if parsed is not None:
            async with self._apply_lock:
                await self._receive(*parsed)

    async def _receive(self, number: int, payload: bytes) -> None:
        verdict = self._sequence.observe(number)
        if verdict is Verdict.RESTART:
            self._restart()
            verdict = self._sequence.observe(number)
        if verdict is Verdict.GAP:
            await self._fill_gap(number)
            verdict = self._sequence.observe(number, replayed=True)
        if verdict is Verdict.APPLY:
            await self._apply(payload)

    def _restart(self) -> None:
        self._sequence.restart()
        self._sink.restarted(self._pod)
        self._report_state()

    async def _fill_gap(self, number: int) -> None:
        """Replay the messages before `number`, or skip those that are lost."""
        missing = self._sequence.expected
        await self._replay()
        if number > self._sequence.expected:
            log.warning("KV events lost", pod=self._pod, first=missing, last=number - 1)
            self._sequence.skip_to(number)
        self._report_state()

    async def _replay(self) -> None:
        """Replay from the last message on, again while replies are lost. Raises `OutOfBounds`."""
        endpoint, replays = self._source.replay_endpoint, 0
        while endpoint is not None:
            replays += 1
            if replays > MAX_REPLAYS:
                raise OutOfBounds(f"{REPLAY.what}: {MAX_REPLAYS} of them have not come to an end")
            known = self._sequence.expected
            messages, ended = await fetch_replay(endpoint, max(known - 1, 0), self._replay_idle_ms)
            if known and self._has_restarted(messages, ended):
                self._restart()
                continue
            applied_all = await self._apply_replay(messages)
            if (applied_all and ended) or self._sequence.expected == known:
                return

    def _has_restarted(self, messages: list[list[bytes]], ended: bool) -> bool:
        """Whether the engine lacks the last received message or has another one with its number.

        After a restart, the numbers may already exceed the previous ones."""
        first = self._parse(messages[0]) if messages else None
        if first is None:
            return ended
        return first[0] == self._sequence.expected - 1 and first[1] != self._last_payload

    async def _apply_replay(self, messages: list[list[bytes]]) -> bool:
        """Apply a replay up to the first gap. False if there is one.

        A gap before the first new message is final: the engine keeps only its latest messages."""
        known = self._sequence.expected
        for frames in messages:
            parsed = self._parse(frames)
            if parsed is None:
                continue
            number, payload = parsed
            verdict = self._sequence.observe(number, replayed=True)
            if verdict is Verdict.GAP and self._sequence.expected == known:
                self._sequence.skip_to(number)
                verdict = self._sequence.observe(number, replayed=True)
            if verdict is Verdict.GAP:
                return False
            if verdict is Verdict.APPLY:
                await self._apply(payload)
            await asyncio.sleep(0)  # yield to requests between messages
        return True

    async def _apply(self, payload: bytes) -> None:
        self._last_payload, self._events = payload, 0
        try:
            for number, batch in enumerate(split_events(self._decoded(payload))):
                if number:
                    await asyncio.sleep(0)  # yield to requests
                self._sink.apply(self._pod, batch)
        except UndecodableBatch as error:
            self._record_undecodable(error)
        self._sink.applied(self._pod, self._events)

    def _decoded(self, payload: bytes) -> Iterator[KvEvent | None]:
        for event in decode_events(payload):
            self._events += event is not None
            yield event

    def _parse(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        try:
            return parse_frames(frames)
        except UndecodableBatch as error:
            self._record_undecodable(error)
            return None

    def _record_undecodable(self, error: UndecodableBatch) -> None:
        """Count the message and mark the stream incomplete; log the first one of each epoch."""
        self.undecodable += 1
        if self._sequence.complete:
            log.warning("undecodable KV event message", pod=self._pod, error=str(error), total=self.undecodable)
            self._sequence.complete = False
            self._report_state()

    def _report_state(self) -> None:
        self._sink.stream_state(self._pod, complete=self._sequence.complete)


async def fetch_replay(endpoint: str, start: int, idle_ms: int) -> tuple[list[list[bytes]], bool]:
    """The buffered messages from number `start` on, oldest first, and whether the terminator arrived.

    All messages are received before any is applied, because engines drop replies to a slow reader; those beyond
    `REPLAY` count as lost. Raises `OutOfBounds`.
    """
    messages: list[list[bytes]] = []
    size_bytes = 0
    with suppress(*LOST):
        async with connected(endpoint, b"DEALER", MESSAGE) as link, asyncio.timeout(None) as idle:
            link.send(b"", start.to_bytes(8, "big"))
            end_s = loop_time_s() + REPLAY_S
            while size_bytes <= REPLAY.max_bytes and len(messages) < REPLAY.max_items:
                idle.reschedule(min(loop_time_s() + idle_ms / 1000, end_s))
                frames = await link.receive()
                if frames[-2:-1] == [END_OF_REPLAY]:
                    return messages, True
                messages.append(frames)
                size_bytes += sum(map(len, frames))
    return messages, False


# --- all pods ---


@lru_cache
def _blocks_of(pod: Pod) -> Bound:
    capacity_blocks = (pod.capacity_tokens or MAX_BLOCKS) // (pod.block_size_tokens or 1)
    most = min(max(TIERS_FACTOR * capacity_blocks, MIN_BLOCKS), MAX_BLOCKS)
    return Bound("KV blocks that the pod says it has", 0, most)


@dataclass(slots=True, eq=False)
class KvStreams:
    """The streams of all pods, whether each is complete, and the `StreamSink` of each. `on_excess` is called with a pod
    that sends more than is read of one, the reason and the time."""

    fleet: Fleet
    store: EventStore
    metrics: KvStreamMetrics
    on_excess: Callable[[PodId, str, float], None] = lambda _pod, _reason, _now_s: None
    _tasks: dict[PodId, asyncio.Task[None]] = field(default_factory=dict)
    _followed: dict[PodId, tuple[Pod, Generation]] = field(default_factory=dict)
    _complete: dict[PodId, bool] = field(default_factory=dict)
    problems: dict[PodId, str] = field(default_factory=dict)
    """Why the KV events of a pod do not arrive, and what to do; empty unless that is known."""

    def follow(self, pod: Pod, generation: Generation, source: KvEventSource | None, without: str = "") -> None:
        """Add `pod` with an empty cache and, with a source, follow its events. `without`: why there is none."""
        self.leave(pod.id)
        self._followed[pod.id] = pod, generation
        self.problems[pod.id] = "" if source else without
        self.store.add_holder(pod, generation)
        if source is not None:
            stream = partial(self._stream, pod.id, source)
            self._tasks[pod.id] = asyncio.create_task(supervise(f"kv events of {pod.id}", stream))

    async def _stream(self, pod: PodId, source: KvEventSource) -> None:
        while True:
            try:
                await KvFeed(pod, source, self).run(partial(self._report, pod, source.endpoint))
            except* OutOfBounds as errors:
                self._refuse(pod, str(errors.exceptions[0]))
            await asyncio.sleep(EXCESS_PAUSE_S)

    def _refuse(self, pod: PodId, reason: str) -> None:
        """Forget the blocks of a pod that sends too much."""
        log.warning("KV events of this pod are not followed", pod=pod, reason=reason, for_s=EXCESS_PAUSE_S)
        self.store.add_holder(*self._followed[pod])
        self.stream_state(pod, complete=False)
        self.on_excess(pod, reason, time.monotonic())

    def _report(self, pod: PodId, endpoint: str, error: str) -> None:
        self.problems[pod] = error and f"{endpoint}: {error}; {CHECK_ENDPOINT}"

    def leave(self, pod: PodId) -> None:
        self._followed.pop(pod, None)
        self.problems.pop(pod, None)
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
        state = None if self.problems.get(pod) else self._complete.get(pod)
        return {None: "connecting", True: "complete", False: "incomplete"}[state]

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for pod in list(self._tasks):
            self.leave(pod)
        await cancel_all(tasks)

    # --- StreamSink ---

    def apply(self, pod: PodId, events: tuple[KvEvent, ...]) -> None:
        """Raises `OutOfBounds` if the pod has announced more blocks than it can have."""
        self.store.apply(pod, events)
        if pod in self._followed:
            _blocks_of(self._followed[pod][0]).check_items(self.store.size_blocks(pod))

    def applied(self, pod: PodId, events: int) -> None:
        self.metrics.events.labels(pod).inc(events)
        self.fleet.received(pod, time.monotonic())

    def restarted(self, pod: PodId) -> None:
        """The engine restarted: its cache is empty and its self-test must run again."""
        if pod in self._followed:
            self.store.add_holder(*self._followed[pod])
            self.fleet.restarted(pod)

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        if self._complete.get(pod) and not complete:
            self.metrics.gaps.labels(pod).inc()
        self._complete[pod] = complete
        self.store.caught_up(pod, complete=complete)
        self.metrics.complete.labels(pod).set(complete)


# --- what events say of a cache ---


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Learns what an engine does not report of its cache: the size of its blocks, and its capacity. A pod that evicts
    blocks is full: what it holds then is its capacity, but for blocks that are not complete."""

    fleet: Fleet
    store: LocalStore

    @property
    def check(self) -> Check:
        return check_of_missing("cache facts", self._learn, self._found, CACHE_LOOK_S)

    def _found(self, pod: Pod) -> dict[str, Any]:
        """What its events say and the pod does not."""
        found = dict[str, Any]()
        if None not in (pod.block_size_tokens, pod.capacity_tokens):
            return found
        blocks = self.store.cache_of(pod.id).blocks
        if (rule := blocks.announced_rule) is None:
            return found
        if pod.block_size_tokens is None:
            found["block_size_tokens"] = rule.unit_tokens
        if pod.capacity_tokens is None and rule.is_single and self.store.fills_gpu(pod.id):
            found["capacity_tokens"] = blocks.size_blocks * rule.unit_tokens
        return found

    async def _learn(self, pod: Pod, _turn: Turn) -> None:
        found = self._found(pod)
        self.fleet.learn(pod.id, **found)
        log.info("learnt from KV events", pod=pod.id, **found)


# --- the numbers of a stream ---


class Verdict(Enum):
    """What to do with a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    """Earlier messages are missing: request a replay from `StreamPosition.expected`."""
    RESTART = "restart"
    """The engine restarted: its previous blocks are gone."""


@dataclass(slots=True)
class StreamPosition:
    """Position in one stream. `complete` is False once messages are lost for good."""

    expected: int = 0
    complete: bool = True
    _last_live: int = -1
    """Number of the last live message."""

    def observe(self, number: int, *, replayed: bool = False) -> Verdict:
        """Classify a message by its number. Only APPLY advances the position.

        Live messages arrive in order, so a lower number than the last live one means a restart. A number that is only
        below `expected` is a duplicate: a replay delivered it while it waited in the socket.
        """
        if not replayed:
            last_live, self._last_live = self._last_live, number
            if number < last_live or number == last_live == 0:
                return Verdict.RESTART
        if number < self.expected:
            return Verdict.DUPLICATE
        if number > self.expected:
            return Verdict.GAP
        self.expected += 1
        return Verdict.APPLY

    def skip_to(self, number: int) -> None:
        """Give up on the messages before `number` and continue there, incomplete."""
        self.complete = False
        self.expected = number

    def restart(self) -> None:
        """Start a new epoch of the publisher."""
        self.expected, self.complete, self._last_live = 0, True, -1
