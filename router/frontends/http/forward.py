"""Serves one request over HTTP: carries out what `request/` asks for, and moves the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from router.errors import RouterError
from router.frontends.http.attempt import Attempts
from router.frontends.http.relay import Downstream
from router.frontends.http.websockets import WebSocketClient, WebSocketTunnels
from router.frontends.step_executor import StepExecutor
from router.request.context import RequestContext
from router.request.requests import Requests


class Forwarder:
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
            await send_answer(answer, context, client)

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


async def send_answer(answer: Iterator[bytes], context: RequestContext, client: Downstream) -> None:
    context.status, context.result = 200, "ok"
    client.start(200, [(b"content-type", b"application/json"), (b"x-request-id", context.request.id.encode())])
    for piece in answer:
        if not client.put(piece):
            await client.ready()
        await asyncio.sleep(0)
    client.finish()
