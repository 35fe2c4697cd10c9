"""What does one engine announce of its cache?

Follows one publisher (a pod, or one data-parallel rank of it) over ZMQ: catches up by replay, then follows live
messages, heals gaps by replay. Notices a new life of the engine by its numbers, and after a reconnect by whether the
last message still is the one that was seen. What is lost for good makes the stream incomplete, visibly; what is known
stays. This file never looks into an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from router.engines.adapter import KvEventSource
from router.index.events import UndecodableBatch, decode_batch, parse_frames, split_events
from router.index.sequence import StreamPosition, Verdict
from router.types import KvEvent, PodId

REPLAY_IDLE_MS = 2000
"""A replay that is silent for this long has ended, with or without its terminator."""

END_OF_REPLAY = b"\xff" * 8
"""The sequence number, -1, of the message after the last one of a replay."""

log = structlog.get_logger()


class KvSink(Protocol):
    """Who is told."""

    def apply(self, pod: PodId, events: tuple[KvEvent, ...]) -> None:
        """Events of one message, in order; a long one in pieces."""

    def restarted(self, pod: PodId) -> None:
        """The engine began a new life: what it had is gone."""

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        """Whether every message of this life was seen."""


class StreamSink(KvSink, Protocol):
    """Who is also told what the pieces were of."""

    def applied(self, pod: PodId, events: int) -> None:
        """A message of so many events has been taken in."""


class KvFeed:
    """One publisher's stream. `run` never returns by itself."""

    def __init__(
        self, pod: PodId, source: KvEventSource, sink: StreamSink, *, replay_idle_ms: int = REPLAY_IDLE_MS
    ) -> None:
        self._pod = pod
        self._source = source
        self._sink = sink
        self._replay_idle_ms = replay_idle_ms
        self._sequence = StreamPosition()
        self._last_payload = b""
        self._one_at_a_time = asyncio.Lock()
        self.undecodable = 0

    async def run(self) -> None:
        """Follow the stream until cancelled. ZMQ itself reconnects."""
        subscriber = _socket(zmq.SUB)
        connections = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            subscriber.subscribe(b"")
            if binds(self._source.endpoint):
                subscriber.bind(self._source.endpoint)
            else:
                subscriber.connect(self._source.endpoint)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._catch_up_at_each(connections))
                while True:
                    await self.take(await subscriber.recv_multipart())
                    await asyncio.sleep(0)  # a backlog of messages is received without ever giving way
        finally:
            subscriber.disable_monitor()
            connections.close(linger=0)
            subscriber.close(linger=0)

    async def _catch_up_at_each(self, connections: zmq.asyncio.Socket) -> None:
        """Whatever happened before we were connected, the first time or again, is in the replay."""
        while True:
            await connections.recv_multipart()
            async with self._one_at_a_time:
                await self._replay()
                self._tell()

    async def take(self, frames: Sequence[bytes]) -> None:
        """One live message."""
        parsed = self._parse(frames)
        if parsed is not None:
            async with self._one_at_a_time:
                await self._take(*parsed)

    async def _take(self, number: int, payload: bytes) -> None:
        verdict = self._sequence.observe(number)
        if verdict is Verdict.RESTART:
            self._restart()
            verdict = self._sequence.observe(number)
        if verdict is Verdict.GAP:
            await self._heal(number)
            verdict = self._sequence.observe(number, replayed=True)
        if verdict is Verdict.APPLY:
            await self._apply(payload)

    def _restart(self) -> None:
        log.info("engine restarted: its cache is empty", pod=self._pod)
        self._sequence.restart()
        self._sink.restarted(self._pod)
        self._tell()

    async def _heal(self, number: int) -> None:
        """Fetch what is missing before message `number`, or go on without it."""
        missing = self._sequence.expected
        await self._replay()
        if number > self._sequence.expected:
            log.warning("KV events lost", pod=self._pod, first=missing, until=number - 1)
            self._sequence.skip_to(number)
        self._tell()

    async def _replay(self) -> None:
        """Ask for everything from the latest message on; again, as long as replies were lost but some came."""
        endpoint = self._source.replay_endpoint
        while endpoint is not None:
            known = self._sequence.expected
            messages, ended = await fetch_replay(endpoint, max(known - 1, 0), self._replay_idle_ms)
            if known and self._of_another_life(messages, ended):
                self._restart()
                continue
            whole = await self._take_over(messages)
            if (whole and ended) or self._sequence.expected == known:
                return

    def _of_another_life(self, messages: list[list[bytes]], ended: bool) -> bool:
        """Has the engine not even the latest message, or does that say something else by now?

        A new life may have counted past where the old one ended before it was heard."""
        first = self._parse(messages[0]) if messages else None
        if first is None:
            return ended
        return first[0] == self._sequence.expected - 1 and first[1] != self._last_payload

    async def _take_over(self, messages: list[list[bytes]]) -> bool:
        """Apply a replay up to a gap in it; False if there was one.

        Where nothing new comes before the gap, the engine has no more of it: it keeps only its latest messages."""
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
            await asyncio.sleep(0)  # thousands of messages, and requests are waiting
        return True

    async def _apply(self, payload: bytes) -> None:
        self._last_payload = payload
        try:
            events = decode_batch(payload).events
        except UndecodableBatch as error:
            self._not_understood(error)
            return
        for number, some in enumerate(split_events(events)):
            if number:
                await asyncio.sleep(0)  # requests are waiting
            self._sink.apply(self._pod, some)
        self._sink.applied(self._pod, len(events))

    def _parse(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        try:
            return parse_frames(frames)
        except UndecodableBatch as error:
            self._not_understood(error)
            return None

    def _not_understood(self, error: UndecodableBatch) -> None:
        """Counted, and said once a life: what the message told is lost."""
        self.undecodable += 1
        if self._sequence.complete:
            log.warning("KV event message not understood", pod=self._pod, why=str(error), so_far=self.undecodable)
            self._sequence.complete = False
            self._tell()

    def _tell(self) -> None:
        self._sink.stream_state(self._pod, complete=self._sequence.complete)


def binds(endpoint: str) -> bool:
    """A wildcard address is bound here and engines connect to it; any other is connected to."""
    return "*" in endpoint or endpoint.startswith("tcp://[::]")


async def fetch_replay(endpoint: str, start: int, idle_ms: int) -> tuple[list[list[bytes]], bool]:
    """Every buffered message from number `start` on, oldest first, and whether the terminator came or only silence.

    Drained into memory before anything is applied: engines drop replies to a slow reader without a word.
    """
    dealer = _socket(zmq.DEALER)
    messages: list[list[bytes]] = []
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while await dealer.poll(idle_ms):
            frames = await dealer.recv_multipart()
            if frames[-2:-1] == [END_OF_REPLAY]:
                return messages, True
            messages.append(frames)
        return messages, False
    finally:
        dealer.close(linger=0)


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
