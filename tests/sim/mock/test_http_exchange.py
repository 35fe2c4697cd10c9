"""An exchange over a real connection: read, answered, broken off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from router.sim.mock.http_exchange import EVENT_STREAM, ClientGone, EngineProtocol, HttpExchange

pytestmark = [pytest.mark.net, pytest.mark.anyio]
DEADLINE_S = 30.0


@asynccontextmanager
async def answering(story: Callable[[HttpExchange], Awaitable[None]]) -> AsyncIterator[httpx.AsyncClient]:
    """A server that plays `story` for each request, and a client of it."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await story(HttpExchange(scope, receive, send))

    config, state = uvicorn.Config(app, lifespan="off", proxy_headers=False, log_config=None), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: EngineProtocol(config, state, {}), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(DEADLINE_S), server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
        for connection in list(state.connections):
            connection.transport.abort()
        while state.tasks:
            await asyncio.wait(state.tasks)


async def test_a_request_is_read_whole_and_answered_whole() -> None:
    """Method, path, headers, a body of many packets; an answer with its length."""

    async def story(exchange: HttpExchange) -> None:
        seen = (exchange.method, exchange.path, exchange.header(b"x-request-id"), exchange.header(b"x-none"))
        assert seen == ("POST", "/a/b", "seven", None)
        await exchange.respond(201, b"%d" % len(await exchange.body()))

    async with answering(story) as client:
        answer = await client.post("/a/b", content=b"x" * 500_000, headers={"X-Request-Id": "seven"})
        assert (answer.status_code, answer.text) == (201, "500000")
        assert (answer.headers["content-type"], answer.headers["content-length"]) == ("application/json", "6")


async def test_a_cut_sends_what_was_written_and_no_end() -> None:
    """The client has the first piece, then learns that the body is incomplete."""

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


async def test_a_reset_comes_before_any_header() -> None:
    """A TCP reset, not an orderly end: the client's read fails."""

    async with answering(HttpExchange.reset) as client:
        with pytest.raises(httpx.ReadError):
            await client.get("/")


async def test_a_client_that_leaves_is_noticed_while_the_engine_works() -> None:
    """Once, and only if it leaves before the block ends."""
    left, reached = asyncio.Event(), asyncio.Event()

    async def story(exchange: HttpExchange) -> None:
        await exchange.body()
        with exchange.on_disconnect(left.set):
            reached.set()
            await left.wait()

    async with answering(story) as client:
        request = asyncio.ensure_future(client.post("/", content=b"hello"))
        await reached.wait()
        assert not left.is_set()
        request.cancel()
        await left.wait()


async def test_a_client_that_stays_is_not_taken_for_one_that_left() -> None:
    """Neither during the answer nor after it."""
    left: list[str] = []

    async def story(exchange: HttpExchange) -> None:
        with exchange.on_disconnect(lambda: left.append(exchange.path)):
            await exchange.body()
            await asyncio.sleep(0)
        await exchange.respond(200)

    async with answering(story) as client:
        for path in ("/1", "/2"):
            assert (await client.post(path, content=b"x")).status_code == 200
    assert left == []


async def test_work_is_given_up_when_the_client_leaves() -> None:
    """It is cancelled to its end before the story goes on; what is done in time counts."""
    told: list[str] = []
    started, over = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            told.append("cleaned up")

    async def story(exchange: HttpExchange) -> None:
        assert await exchange.unless_disconnected(asyncio.sleep(0, 7)) == 7
        try:
            await exchange.unless_disconnected(work())
        except ClientGone:
            told.append("gone")
        over.set()

    async with answering(story) as client:
        request = asyncio.ensure_future(client.get("/"))
        await started.wait()
        request.cancel()
        await over.wait()
    assert told == ["cleaned up", "gone"]
