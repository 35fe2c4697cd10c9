"""Exchanges over real connections: read, answered, broken off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from loadtest.mock_engine.http_exchange import EVENT_STREAM, EngineProtocol, HttpExchange

pytestmark = [pytest.mark.net, pytest.mark.anyio]
DEADLINE_S = 30.0


@asynccontextmanager
async def answering(story: Callable[[HttpExchange], Awaitable[None]]) -> AsyncIterator[httpx.AsyncClient]:
    """A server that runs `story` for each request, and a client."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await story(HttpExchange(scope, receive, send))

    config, state = uvicorn.Config(app, lifespan="off", proxy_headers=False, log_config=None), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: EngineProtocol(config, state, lambda: True), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(DEADLINE_S), server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
        for connection in list(state.connections):
            connection.transport.abort()
        while state.tasks:
            await asyncio.wait(state.tasks)


async def test_a_request_is_read_and_answered_completely() -> None:
    """Method, path, headers, a body of many packets; a response with its length."""

    async def story(exchange: HttpExchange) -> None:
        seen = (exchange.method, exchange.path, exchange.header(b"x-request-id"), exchange.header(b"x-none"))
        assert seen == ("POST", "/a/b", "seven", None)
        await exchange.respond(201, b"%d" % len(await exchange.body()))

    async with answering(story) as client:
        answer = await client.post("/a/b", content=b"x" * 500_000, headers={"X-Request-Id": "seven"})
        assert (answer.status_code, answer.text) == (201, "500000")
        assert (answer.headers["content-type"], answer.headers["content-length"]) == ("application/json", "6")


async def test_close_flushes_written_data_only() -> None:
    """The client gets the first part, then an error that the body is incomplete."""

    async def story(exchange: HttpExchange) -> None:
        await exchange.begin(200, EVENT_STREAM)
        await exchange.write(b"data: 1\n\n")
        await exchange.close()

    async with answering(story) as client:
        pieces: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("GET", "/") as answer:
                async for piece in answer.aiter_raw():
                    pieces.append(piece)
        assert b"".join(pieces) == b"data: 1\n\n"


async def test_a_reset_is_sent_before_any_header() -> None:
    """A TCP reset: the client's read fails."""

    async with answering(HttpExchange.reset) as client:
        with pytest.raises(httpx.ReadError):
            await client.get("/")


async def test_a_task_is_not_cancelled_while_its_client_is_connected() -> None:
    """Neither during the response nor after it."""
    completed: list[str] = []

    async def story(exchange: HttpExchange) -> None:
        with exchange.cancelled_on_disconnect():
            await exchange.body()
            await asyncio.sleep(0)
            await exchange.respond(200)
        await asyncio.sleep(0)
        completed.append(exchange.path)

    async with answering(story) as client:
        for path in ("/1", "/2"):
            assert (await client.post(path, content=b"x")).status_code == 200
    assert completed == ["/1", "/2"]


async def test_a_disconnect_cancels_the_task() -> None:
    """Only inside the block."""
    events: list[str] = []
    started, over = asyncio.Event(), asyncio.Event()

    async def story(exchange: HttpExchange) -> None:
        await exchange.body()
        try:
            with exchange.cancelled_on_disconnect():
                started.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
        await asyncio.sleep(0)
        events.append("not cancelled again")
        over.set()

    async with answering(story) as client:
        request = asyncio.ensure_future(client.post("/", content=b"hello"))
        await started.wait()
        assert not events
        request.cancel()
        await over.wait()
    assert events == ["cancelled", "not cancelled again"]
