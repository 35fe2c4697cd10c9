"""One task for each model whose requests wait for a place in front of the fleet; see `request/queues.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from router.request.preparation_steps import Ticket
from router.request.queues import ModelQueue, RequestQueues


class QueueTasks:
    """`on_change` is called with the number of requests that wait."""

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
            ticket.settle = _nothing
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
        """Send those who wait, until none does."""
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


def _nothing(_error: Exception | None) -> None:
    """The ticket is settled."""


def _settle(place: asyncio.Future[None], error: Exception | None) -> None:
    if place.done():
        return
    if error is None:
        place.set_result(None)
    else:
        place.set_exception(error)
