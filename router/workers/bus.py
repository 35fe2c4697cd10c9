"""Sends frames between the workers of one router over Unix sockets.

Each worker listens on a socket in a private folder, named by its number, and connects to every other worker. Only the
worker that opened a connection sends on it: first a snapshot of its state, then updates. The end of the connection
means that the sender is gone. Sending never waits: updates for a worker that does not read are dropped, and it receives
a new snapshot once it reads again. This module does not interpret the messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Protocol, cast

import structlog

HELLO, UPDATE, QUERY, ANSWER = range(4)
"""Kinds of frames: the sender's number, a snapshot or an update, a query, its answer."""
HEAD_BYTES = 5
"""Length of the content (4 bytes) and kind (1 byte)."""
NUMBER_BYTES = 4

MAX_UNSENT_BYTES = 4 << 20
"""Write buffer of one connection; while it is full, updates are dropped."""
RETRY_S = 0.1
"""Interval of attempts to connect to another worker. A connection from that worker triggers one at once."""
ANSWER_TIMEOUT_S = 2.0

log = structlog.get_logger()


class BusClient(Protocol):
    """Produces and consumes the messages of the bus."""

    def snapshot(self) -> bytes:
        """The state of this worker that the others need."""

    def apply_remote(self, worker: int, update: bytes) -> None:
        """Apply a snapshot or an update of another worker. Raises `ValueError` if it is malformed."""

    def remove_worker(self, worker: int) -> None:
        """Drop the state of a worker that is gone."""

    async def answer(self, query: bytes) -> bytes:
        """Answer another worker's query."""


class WorkerBus:
    """The connections of worker `number` out of `workers`. `on_drop` is called for each update that is not sent."""

    def __init__(self, folder: Path, number: int, workers: int, on_drop: Callable[[], None]) -> None:
        self._folder = folder
        self.number = number
        self._others = [other for other in range(workers) if other != number]
        self._on_drop = on_drop
        self._client: BusClient
        self._outbound: dict[int, OutboundLink] = {}
        self._inbound: dict[int, InboundLink] = {}
        self._connected = {other: asyncio.Event() for other in self._others}
        self._query_ids = count()
        self._pending: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def connected_workers(self) -> int:
        """Number of other workers with a connection to this one."""
        return len(self._inbound)

    async def run(self, client: BusClient) -> None:
        """Listen and keep connections to all other workers until cancelled."""
        self._client = client
        loop, path = asyncio.get_running_loop(), self._path(self.number)
        path.unlink(missing_ok=True)
        server = await loop.create_unix_server(lambda: InboundLink(self), str(path))
        try:
            async with asyncio.TaskGroup() as group:
                for other in self._others:
                    group.create_task(self._keep_connected(other))
        finally:
            server.close()
            for answering in tuple(self._answering):
                answering.cancel()
            for outbound in tuple(self._outbound.values()):
                outbound.close()
            for inbound in tuple(self._inbound.values()):
                inbound.close()

    def publish(self, update: bytes) -> None:
        """Send an update to every connected worker without waiting."""
        frame = encode_frame(UPDATE, update)
        for link in self._outbound.values():
            if not link.send(frame):
                self._on_drop()

    async def query(self, query: bytes, only: int | None = None) -> list[bytes]:
        """The answers of all connected workers that answer within `ANSWER_TIMEOUT_S`; or of one worker alone."""
        query_id = next(self._query_ids)
        frame = encode_frame(QUERY, query_id.to_bytes(NUMBER_BYTES, "little") + query)
        pending = {
            (other, query_id): asyncio.get_running_loop().create_future()
            for other, link in self._outbound.items()
            if other in self._inbound and only in (None, other) and link.send(frame)
        }
        self._pending |= pending
        try:
            if pending:
                await asyncio.wait(pending.values(), timeout=ANSWER_TIMEOUT_S)
            return [answer.result() for answer in pending.values() if answer.done() and not answer.cancelled()]
        finally:
            for key in pending:
                del self._pending[key]

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    async def _keep_connected(self, other: int) -> None:
        connected, loop, path = self._connected[other], asyncio.get_running_loop(), str(self._path(other))
        while True:
            connected.clear()
            with suppress(OSError):  # the other worker does not listen
                _, link = await loop.create_unix_connection(lambda: OutboundLink(self, other), path)
                await link.closed
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await connected.wait()

    # --- called by links ---

    def greeting(self) -> bytes:
        """The first frames of a connection: this worker's number and its snapshot."""
        hello = encode_frame(HELLO, self.number.to_bytes(NUMBER_BYTES, "little"))
        return hello + encode_frame(UPDATE, self._client.snapshot())

    def outbound_opened(self, link: OutboundLink) -> None:
        """Send updates over this link. Called right after its greeting, so that no update is lost in between."""
        self._outbound[link.worker] = link

    def outbound_closed(self, link: OutboundLink) -> None:
        if self._outbound.get(link.worker) is link:
            del self._outbound[link.worker]

    def inbound_opened(self, link: InboundLink, worker: int) -> None:
        """Register a link whose sender is known. It replaces an older link of the same worker number."""
        if worker in self._inbound:
            self._inbound[worker].close()
            self.inbound_closed(self._inbound[worker])
        self._inbound[worker] = link
        self._connected[worker].set()

    def inbound_closed(self, link: InboundLink) -> None:
        """Drop the sender's state and the queries that it has not answered."""
        worker = link.worker
        if worker is None or self._inbound.get(worker) is not link:
            return
        del self._inbound[worker]
        for (other, _), answer in self._pending.items():
            if other == worker:
                answer.cancel()
        self._client.remove_worker(worker)

    def receive(self, worker: int, kind: int, content: bytes) -> None:
        """Dispatch one frame. Raises `ValueError` if its content is malformed."""
        if kind == UPDATE:
            self._client.apply_remote(worker, content)
            return
        query_id, content = content[:NUMBER_BYTES], content[NUMBER_BYTES:]
        if kind == QUERY and worker in self._outbound:
            answering = asyncio.ensure_future(self._answer(worker, query_id, content))
            self._answering.add(answering)  # the event loop holds tasks only weakly
            answering.add_done_callback(self._answering.discard)
        elif kind == ANSWER:
            answer = self._pending.get((worker, int.from_bytes(query_id, "little")))
            if answer is not None and not answer.done():
                answer.set_result(content)

    async def _answer(self, worker: int, query_id: bytes, query: bytes) -> None:
        answer = await self._client.answer(query)
        if worker in self._outbound:
            self._outbound[worker].send(encode_frame(ANSWER, query_id + answer))


class OutboundLink(asyncio.Protocol):
    """The connection to worker `worker`. Sends the greeting first, and again after updates were dropped."""

    def __init__(self, bus: WorkerBus, worker: int) -> None:
        self._bus = bus
        self.worker = worker
        self._writable = True
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._transport.write(self._bus.greeting())
        self._bus.outbound_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._bus.outbound_closed(self)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._transport is not None:
            self._transport.write(self._bus.greeting())

    def send(self, frame: bytes) -> bool:
        """False if the frame was dropped."""
        if not self._writable or self._transport is None:
            return False
        self._transport.write(frame)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class InboundLink(asyncio.Protocol):
    """A connection on which another worker sends; `worker` is its number once the HELLO frame has arrived."""

    def __init__(self, bus: WorkerBus) -> None:
        self._bus = bus
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.worker: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bus.inbound_closed(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._read_frames()
        except Exception:  # the next connection starts with a snapshot, so closing loses nothing
            log.exception("malformed worker message; closing link", worker=self.worker)
            self.close()

    def _read_frames(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= HEAD_BYTES:
            end = at + HEAD_BYTES + int.from_bytes(buffer[at : at + 4], "little")
            if end > len(buffer):
                break
            self._receive(buffer[at + 4], bytes(buffer[at + HEAD_BYTES : end]))
            at = end
        del buffer[:at]

    def _receive(self, kind: int, content: bytes) -> None:
        if kind == HELLO:
            if self.worker is None:
                self.worker = int.from_bytes(content, "little")
                self._bus.inbound_opened(self, self.worker)
        elif self.worker is not None:
            self._bus.receive(self.worker, kind, content)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def encode_frame(kind: int, content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + bytes((kind,)) + content
