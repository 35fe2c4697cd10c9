"""Serves a `FakeKubernetes` over HTTP, for routers that run as processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn

from tests.feeds.discovery.fake_kubernetes import FakeKubernetes

Message = MutableMapping[str, Any]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay with the program."""
        yield


@asynccontextmanager
async def served(cluster: FakeKubernetes) -> AsyncIterator[str]:
    """Run an API server; yields its URL."""

    async def app(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path = scope["raw_path"].decode() + "?" + scope["query_string"].decode()
        request = httpx.Request(scope["method"], "http://kube" + path, headers=scope["headers"], content=body)
        response = await cluster.handle(request)
        head = {"status": response.status_code, "headers": [(b"content-type", b"application/json")]}
        await send({"type": "http.response.start", **head})
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for piece in response.stream:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = _Server(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            cluster.close_watches()
            server.should_exit = True
            await task
