"""How do the workers of one router talk to one another?

Over Unix sockets in a folder that only they can enter: each listens at its number and has one connection to every
other, over which it alone speaks. A connection begins with everything that the other must know, then come changes; when
it ends, its speaker is gone. Nobody waits for anybody: what a worker does not take is not kept, and once it listens
again, it is told everything anew. This file never reads what is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Protocol, cast

import structlog

HELLO, NEWS, ASK, ANSWER = range(4)
"""Kinds of frames: the speaker's number, what changed, and questions with their answers."""
HEAD_BYTES = 5
"""Length of what follows, and its kind."""
NUMBER_BYTES = 4

MOST_UNTAKEN_BYTES = 4 << 20
"""What waits for a worker that does not listen; then it is told nothing more."""
RETRY_S = 0.1
"""Between attempts to reach a worker that is not there. One that appears says so at once."""
ANSWER_S = 2.0
"""Longest wait for the others' answers."""

log = structlog.get_logger()


class Worker(Protocol):
    """Whose words the bus carries."""

    def whole(self) -> bytes:
        """Everything that a worker must know that knows nothing of this one."""

    def hear(self, worker: int, news: bytes) -> None:
        """Another worker said this, first of all its `whole`. Raises `ValueError` where that means nothing."""

    def lost(self, worker: int) -> None:
        """It is gone."""

    async def answer(self, question: bytes) -> bytes:
        """What the others are told who ask this."""


class Bus:
    """The connections of worker `number` out of `workers`, in `folder`."""

    def __init__(self, folder: Path, number: int, workers: int, untold: Callable[[], None]) -> None:
        self._folder = folder
        self.number = number
        self._others = [other for other in range(workers) if other != number]
        self._untold = untold
        self._worker: Worker
        self._speaking: dict[int, _Speaking] = {}
        self._heard: dict[int, _Hearing] = {}
        self._appeared = {other: asyncio.Event() for other in self._others}
        self._questions = count()
        self._asked: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def heard(self) -> int:
        """Other workers that speak to this one."""
        return len(self._heard)

    async def run(self, worker: Worker) -> None:
        """Until cancelled."""
        self._worker = worker
        loop, path = asyncio.get_running_loop(), self._path(self.number)
        path.unlink(missing_ok=True)
        server = await loop.create_unix_server(lambda: _Hearing(self), str(path))
        try:
            async with asyncio.TaskGroup() as group:
                for other in self._others:
                    group.create_task(self._keep_speaking(other))
        finally:
            server.close()
            for answering in tuple(self._answering):
                answering.cancel()
            for speaking in tuple(self._speaking.values()):
                speaking.close()
            for hearing in tuple(self._heard.values()):
                hearing.close()

    def say(self, news: bytes) -> None:
        """To every other worker that listens. Never waits."""
        frame = _frame(NEWS, news)
        for speaking in self._speaking.values():
            if not speaking.say(frame):
                self._untold()

    async def ask(self, question: bytes) -> list[bytes]:
        """The answers of all that give one in time."""
        number = next(self._questions)
        frame = _frame(ASK, number.to_bytes(NUMBER_BYTES, "little") + question)
        asked = {
            (other, number): asyncio.get_running_loop().create_future()
            for other, speaking in self._speaking.items()
            if other in self._heard and speaking.say(frame)
        }
        self._asked |= asked
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ANSWER_S)
            return [answer.result() for answer in asked.values() if answer.done() and not answer.cancelled()]
        finally:
            for key in asked:
                del self._asked[key]

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    async def _keep_speaking(self, other: int) -> None:
        appeared, loop, path = self._appeared[other], asyncio.get_running_loop(), str(self._path(other))
        while True:
            appeared.clear()
            with suppress(OSError):  # not there, or no longer
                _, speaking = await loop.create_unix_connection(lambda: _Speaking(self, other), path)
                await speaking.ended
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await appeared.wait()

    def greeting(self) -> bytes:
        """Who speaks, and everything that there is to know."""
        return _frame(HELLO, self.number.to_bytes(NUMBER_BYTES, "little")) + _frame(NEWS, self._worker.whole())

    def speaks(self, speaking: _Speaking) -> None:
        """From now on, what is said goes there: nothing is said between the greeting and this."""
        self._speaking[speaking.other] = speaking

    def speaks_no_more(self, speaking: _Speaking) -> None:
        """The connection is over."""
        if self._speaking.get(speaking.other) is speaking:
            del self._speaking[speaking.other]

    # --- what the others say ---

    def began(self, hearing: _Hearing, worker: int) -> None:
        """A worker has said who it is; one of that number that was there before is gone."""
        if worker in self._heard:
            self._heard[worker].close()
            self.over(self._heard[worker])
        self._heard[worker] = hearing
        self._appeared[worker].set()

    def over(self, hearing: _Hearing) -> None:
        """A connection is over."""
        worker = hearing.worker
        if worker is None or self._heard.get(worker) is not hearing:
            return
        del self._heard[worker]
        for (other, _), answer in self._asked.items():
            if other == worker:
                answer.cancel()
        self._worker.lost(worker)

    def take(self, worker: int, kind: int, content: bytes) -> None:
        """Raises `ValueError` where it means nothing."""
        if kind == NEWS:
            self._worker.hear(worker, content)
            return
        number, content = content[:NUMBER_BYTES], content[NUMBER_BYTES:]
        if kind == ASK and worker in self._speaking:
            answering = asyncio.ensure_future(self._answer(worker, number, content))
            self._answering.add(answering)  # the loop itself keeps no task alive
            answering.add_done_callback(self._answering.discard)
        elif kind == ANSWER:
            answer = self._asked.get((worker, int.from_bytes(number, "little")))
            if answer is not None and not answer.done():
                answer.set_result(content)

    async def _answer(self, worker: int, number: bytes, question: bytes) -> None:
        answer = await self._worker.answer(question)
        if worker in self._speaking:
            self._speaking[worker].say(_frame(ANSWER, number + answer))


class _Speaking(asyncio.Protocol):
    """The connection to one other worker. The greeting is said first, and again after nothing could be said."""

    def __init__(self, bus: Bus, other: int) -> None:
        self._bus = bus
        self.other = other
        self._listens = True
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MOST_UNTAKEN_BYTES)
        self._transport.write(self._bus.greeting())
        self._bus.speaks(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._bus.speaks_no_more(self)
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self._listens = False

    def resume_writing(self) -> None:
        self._listens = True
        if self._transport is not None:
            self._transport.write(self._bus.greeting())

    def say(self, frame: bytes) -> bool:
        """False where it is not told."""
        if not self._listens or self._transport is None:
            return False
        self._transport.write(frame)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Hearing(asyncio.Protocol):
    """A connection over which another worker speaks; `worker` is its number, once it has said it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.worker: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bus.over(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._read()
        except Exception:  # whatever it is, it is told anew on the next connection
            log.exception("another worker cannot be understood", worker=self.worker)
            self.close()

    def _read(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= HEAD_BYTES:
            end = at + HEAD_BYTES + int.from_bytes(buffer[at : at + 4], "little")
            if end > len(buffer):
                break
            self._take(buffer[at + 4], bytes(buffer[at + HEAD_BYTES : end]))
            at = end
        del buffer[:at]

    def _take(self, kind: int, content: bytes) -> None:
        if kind == HELLO:
            if self.worker is None:
                self.worker = int.from_bytes(content, "little")
                self._bus.began(self, self.worker)
        elif self.worker is not None:
            self._bus.take(self.worker, kind, content)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _frame(kind: int, content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + bytes((kind,)) + content
