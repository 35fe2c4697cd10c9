"""Does what `request/` asks for while a request is prepared: for any front on asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from router.frontends.body_edits import UuidRemoval
from router.frontends.prompt_readers import PromptReader
from router.frontends.response_locator import ResponseLocator
from router.request.preparation_steps import Locate, QuotaSync, Step, Ticket, Tokens
from router.request.queues import ModelQueue, RequestQueues


class QueueTasks:
    """One task for each model whose requests wait for a place in front of the fleet (`request/queues.py`). `on_change`
    is called with the number of requests that wait."""

    def __init__(self, queues: RequestQueues, on_change: Callable[[float], None]) -> None:
        self._queues = queues
        self._on_change = on_change
        self._changed: dict[ModelQueue, asyncio.Event] = {}
        """Events that wake the task of each queue."""
        self._tasks: set[asyncio.Task[None]] = set()
        queues.on_change = self._wake

    async def wait(self, ticket: Ticket) -> None:
        """Wait until the request may be sent. Raises the error that refuses it."""
        place = asyncio.get_running_loop().create_future()
        ticket.settle = partial(_settle, place)
        try:
            await place
        finally:  # its error refers to this frame: a cycle that would keep the body in memory
            ticket.settle = lambda _error: None
            del place, ticket

    def _wake(self, queue: ModelQueue) -> None:
        self._on_change(self._queues.waiting)
        if (changed := self._changed.get(queue)) is not None:
            changed.set()
        elif queue:
            changed = self._changed[queue] = asyncio.Event()
            task = asyncio.create_task(self._run(queue, changed), name="requests that wait in front of the fleet")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, queue: ModelQueue, changed: asyncio.Event) -> None:
        try:
            while queue:
                changed.clear()
                wait_ms = queue.send_next(time.monotonic())
                self._on_change(self._queues.waiting)
                if not wait_ms:
                    await asyncio.sleep(0)  # the request is booked before the next one is decided
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_ms / 1000):
                        await changed.wait()
        except Exception as error:
            queue.fail(error)
            raise
        finally:
            del self._changed[queue]
            self._on_change(self._queues.waiting)


def _settle(place: asyncio.Future[None], error: Exception | None) -> None:
    if place.done():
        return
    if error is None:
        place.set_result(None)
    else:
        place.set_exception(error)


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutor:
    """Does what a request needs before it can be sent. `next_exchange` waits until shares of quotas have been exchanged
    with other processes."""

    readers: Mapping[str, PromptReader]
    unlisted: PromptReader
    responses: ResponseLocator
    next_exchange: Callable[[], Awaitable[None]] | None = None
    queues: QueueTasks | None = None
    uuids: UuidRemoval

    async def run(self, steps: Generator[Step, Any, _Result]) -> _Result:
        resume: Callable[[Any], Step] = steps.send
        answer: Any = None
        step: Step | None = None
        try:
            while True:
                try:
                    step = resume(answer)
                except StopIteration as end:
                    result: _Result = end.value
                    return result
                try:
                    resume, answer = steps.send, await self._answer(step)
                except BaseException as error:
                    resume, answer = steps.throw, error
        finally:  # an error refers to this frame: a cycle that would keep the body in memory
            del resume, answer, step, steps

    def _answer(self, step: Step) -> Awaitable[Any]:
        if isinstance(step, Tokens):
            return self.readers.get(step.request.model, self.unlisted).read(step.request)
        if isinstance(step, Ticket):
            assert self.queues is not None
            return self.queues.wait(step)
        if isinstance(step, Locate):
            return self.responses.locate(step.response_id, step.param, step.owner)
        if isinstance(step, QuotaSync):
            assert self.next_exchange is not None
            return self.next_exchange()
        return self.uuids.removed(step.body, step.tenant)
