"""The server of `warmroute publish`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request
from uvicorn.server import ServerState

from router.cli.publish import SERVER, _with_options, bounded
from router.config.pod_schema import PodAuth, PodConfig
from router.config.schema import Limits, RouterConfig
from tests.kit.deadlines import DEADLINE_S

pytestmark = [pytest.mark.net]
SMUGGLED = b"POST /kv-events HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n[]"


@asynccontextmanager
async def serving(app: FastAPI, limits: Limits) -> AsyncIterator[tuple[asyncio.Server, ServerState]]:
    """Serve the application as `warmroute publish` does."""
    config, state = uvicorn.Config(bounded(app, limits), **SERVER), ServerState()
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
    )
    async with asyncio.timeout(DEADLINE_S), server:
        yield server, state


@pytest.mark.anyio
async def test_the_body_of_a_request_to_upgrade_is_no_request() -> None:
    """In the same piece as its head and in another."""
    seen: list[tuple[str, bytes]] = []
    app = FastAPI(openapi_url=None)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def record(request: Request) -> str:
        seen.append((request.url.path, await request.body()))
        return "own"

    head = b"GET /livez HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\ncontent-length: %d\r\n\r\n"
    head %= len(SMUGGLED)
    async with serving(app, Limits()) as (server, _):
        for pieces in ((head + SMUGGLED,), (head, SMUGGLED)):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            answers = await reader.read()
            writer.close()
            assert answers.count(b"HTTP/1.1 200 OK") == 2
            assert seen == [("/livez", SMUGGLED), ("/readyz", b"")]
            seen.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/kv-events", "/livez"])
async def test_a_large_body_is_not_read_to_its_end(path: str) -> None:
    """By its declared length, or as soon as its chunks exceed the limit."""
    head = b"POST %b HTTP/1.1\r\nhost: h\r\n" % path.encode()
    chunk = b"40\r\n" + b"x" * 64 + b"\r\n"
    declared, chunked = b"content-length: 1000000\r\n\r\nx", b"transfer-encoding: chunked\r\n\r\n" + 2 * chunk
    async with serving(FastAPI(openapi_url=None), Limits(max_body_bytes=100)) as (server, _):
        for request in (head + declared, head + chunked):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(request)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
            writer.close()


def test_a_sidecar_has_the_credentials_of_its_pod_in_the_configuration() -> None:
    """By the URL that routers use, or its own."""
    auth = PodAuth(bearer_file="/key")
    config = RouterConfig(pods=(PodConfig(url="http://p:1", auth=auth), PodConfig(url="http://q:1")))
    for pod, expected in (
        ({"url": "http://127.0.0.1:1", "advertised_url": "http://p:1"}, auth),
        ({"url": "http://p:1", "advertised_url": None}, auth),
        ({"url": "http://127.0.0.1:1", "advertised_url": "http://q:1"}, None),
    ):
        (chosen,) = _with_options(config, pods=[pod], redis=None, publish={}).pods
        assert chosen.auth == expected
