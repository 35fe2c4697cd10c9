"""Does what a request waits for while it is prepared: for any front on asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_order import Waiting
from router.admission.tenant import Tenant
from router.frontends.body_edits import UuidRemoval
from router.frontends.prompt_readers import PromptReader
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponse
from router.request.effects import Downstream, Effects
from router.request.life import Core
from router.types import InferenceRequest, PromptPrefix

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Waits(Effects):
    """All effects but the attempt. `unlisted`: reads the prompts of models without a reader. `next_exchange` waits
    until shares of quotas have been exchanged with other processes."""

    core: Core
    readers: Mapping[str, PromptReader]
    unlisted: PromptReader
    responses: ResponseLocator
    next_exchange: Callable[[], Awaitable[None]] | None = None
    _uuids: UuidRemoval = field(default_factory=UuidRemoval)
    _places: dict[Waiting, asyncio.Future[None]] = field(default_factory=dict)
    """Set when a waiting request may go on."""
    _changed: dict[AdmissionQueue, asyncio.Event] = field(default_factory=dict)
    """Events that wake the task of each queue in which requests wait."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def located(self, response_id: str, param: str, owner: str | None) -> Awaitable[StoredResponse]:
        return self.responses.locate(response_id, param, owner)

    def tokens(self, request: InferenceRequest) -> Awaitable[PromptPrefix | str | None]:
        return self.readers.get(request.model, self.unlisted).read(request)

    def without_uuids(self, body: bytes, tenant: Tenant) -> Awaitable[bytes]:
        return self._uuids.removed(body, tenant)

    def quota_sync(self) -> Awaitable[None]:
        assert self.next_exchange is not None
        return self.next_exchange()

    def later(self, delay_s: float, call: Callable[[float], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, _tell_time, call)

    def in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.to_thread(work)

    async def answer(self, pieces: Iterator[bytes], request_id: str, client: Downstream) -> None:
        client.start(200, [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())])
        for piece in pieces:
            if not client.put(piece):
                await client.ready()
            await asyncio.sleep(0)
        client.finish()

    # --- waiting for a place in front of the fleet ---

    async def turn(self, queue: AdmissionQueue, one: Waiting) -> None:
        place = self._places[one] = asyncio.get_running_loop().create_future()
        self._wake(queue)
        try:
            await place
        finally:
            if one.is_queued:
                self._wake(queue)  # the next one may have been skipped for it
            del self._places[one], place, one  # its error refers to this frame: a cycle that would keep the body

    def go(self, one: Waiting, error: Exception | None) -> None:
        place = self._places.get(one)
        if place is None or place.done():
            return
        if error is None:
            place.set_result(None)
        else:
            place.set_exception(error)

    def _wake(self, queue: AdmissionQueue) -> None:
        if (changed := self._changed.get(queue)) is not None:
            changed.set()
        elif queue:
            changed = self._changed[queue] = asyncio.Event()
            task = asyncio.create_task(self._run(queue, changed), name="requests that wait in front of the fleet")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, queue: AdmissionQueue, changed: asyncio.Event) -> None:
        assert self.core.queues is not None
        try:
            while queue:
                changed.clear()
                wait_ms = self.core.queues.send_next(queue, time.monotonic(), self)
                if not wait_ms:
                    await asyncio.sleep(0)  # the request is booked before the next one is decided
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_ms / 1000):
                        await changed.wait()
        except Exception as error:
            for one in list(queue):
                queue.leave(one)
                self.go(one, error)
            raise
        finally:
            del self._changed[queue]


def _tell_time(call: Callable[[float], None]) -> None:
    call(time.monotonic())
