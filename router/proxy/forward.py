"""Serves one request over HTTP: carries out what `request/` asks for, and moves the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from router.errors import RouterError
from router.proxy.attempt import Attempts
from router.proxy.large_edits import UuidRemoval
from router.proxy.prompt_readers import PromptReader
from router.proxy.queue_tasks import QueueTasks
from router.proxy.relay import Downstream
from router.proxy.response_locator import ResponseLocator
from router.proxy.websockets import WebSocketClient, WebSocketTunnels
from router.request.context import RequestContext
from router.request.preparation_steps import Locate, QuotaExchange, Step, Ticket, Tokens
from router.request.requests import Requests

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutor:
    """Does what a request needs before it can be sent. `next_exchange` waits until shares of quotas have been exchanged
    with other processes."""

    readers: Mapping[str, PromptReader]
    responses: ResponseLocator
    next_exchange: Callable[[], Awaitable[None]] | None = None
    queues: QueueTasks | None = None
    uuids: UuidRemoval

    async def run(self, steps: Generator[Step, Any, _Result]) -> _Result:
        """The result of `steps`. Raises what they raise."""
        resume: Callable[[Any], Step] = steps.send
        answer: Any = None
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

    def _answer(self, step: Step) -> Awaitable[Any]:
        if isinstance(step, Tokens):
            reader = self.readers.get(step.request.model)
            return reader.read(step.request) if reader is not None else _nothing()
        if isinstance(step, Ticket):
            assert self.queues is not None
            return self.queues.wait(step)
        if isinstance(step, Locate):
            return self.responses.locate(step.response_id, step.param, step.owner)
        if isinstance(step, QuotaExchange):
            assert self.next_exchange is not None
            return self.next_exchange()
        return self.uuids.removed(step.body)


async def _nothing() -> None:
    """The tokens of a prompt that nobody reads."""


class Forwarder:
    """Serves requests."""

    def __init__(
        self, requests: Requests, steps: StepExecutor, attempts: Attempts, websockets: WebSocketTunnels
    ) -> None:
        self._requests = requests
        self._steps = steps
        self._attempts = attempts
        self._websockets = websockets

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        """Serve one request. Raises `RouterError` where no response could be sent, or not to its end."""
        await self._settled(self._serve(context, client), context, client)

    async def forward_websocket(self, context: RequestContext, client: WebSocketClient) -> None:
        """Serve one websocket, until it is closed. Raises `RouterError` where none was begun."""
        await self._settled(self._serve_websocket(context, client), context, client)

    async def _serve(self, context: RequestContext, client: Downstream) -> None:
        answer = await self._steps.run(self._requests.prepare(context))
        if answer is None:
            await self._attempts.serve(self._requests.tracker(context), client)
        else:
            await _send(answer, context, client)

    async def _serve_websocket(self, context: RequestContext, client: WebSocketClient) -> None:
        await self._steps.run(self._requests.prepare_tunnel(context))
        await self._websockets.serve(self._requests.tracker(context), client)

    async def _settled(
        self, serving: Coroutine[Any, Any, None], context: RequestContext, client: Downstream | WebSocketClient
    ) -> None:
        """Settle the request however it ends. Raises what `serving` does."""
        self._requests.endings.begin()
        try:
            await serving
        except asyncio.CancelledError:
            self._requests.endings.interrupted(context, by_client=client.disconnected)
            raise
        except RouterError as error:
            self._requests.endings.failed(context, error, has_answered=client.started)
            raise
        finally:
            self._requests.endings.end(context, was_slow=client.was_slow)


async def _send(answer: Iterator[bytes], context: RequestContext, client: Downstream) -> None:
    """Send the router's own answer."""
    context.status, context.result = 200, "ok"
    client.start(200, [(b"content-type", b"application/json"), (b"x-request-id", context.request.id.encode())])
    for piece in answer:
        if not client.put(piece):
            await client.ready()
        await asyncio.sleep(0)
    client.finish()
