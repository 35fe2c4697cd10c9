"""The admin listener on real connections: bounded in size, time and number, and open until the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from router.config.schema import Limits
from router.wiring.router import MAX_ADMIN_CONNECTIONS
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

POST = b"POST /admin/pods HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HUGE_BYTES = 400_000_000


@asynccontextmanager
async def connection(
    deployment: Deployment, *, public: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a listener."""
    url = deployment.client.base_url if public else deployment.admin.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def pour(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Send pieces until the server closes the connection; returns the number of bytes."""
    sent = 0
    try:
        while sent < HUGE_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + b"origin: http://evil.example\r\n", b" 403 "),
        (POST, b" 413 "),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_refused_body_is_not_read(deploy: Deploy, head: bytes, status: bytes, chunked: bool) -> None:
    """Answered at once, and the connection is closed while the client goes on sending."""
    body = b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % HUGE_BYTES
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n" if chunked else b"x" * 65536
    async with deploy(pods=1, wait=False) as deployment, connection(deployment) as (reader, writer):
        writer.write(head + body)
        if status == b" 413 " and chunked:
            for _ in range(Limits().max_body_bytes // 65536 + 1):
                writer.write(piece)
        assert status in await reader.readuntil(b"\r\n")
        assert await pour(writer, piece) < HUGE_BYTES / 2
        assert len(await deployment.pods()) == 1


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (b"GET /metrics HT", b"HTTP/1.1 408 "),
        (POST + b"content-length: 10\r\n\r\n{", b"HTTP/1.1 408 "),
    ],
)
async def test_a_slow_request_is_ended(deploy: Deploy, begun: bytes, answer: bytes) -> None:
    """After `limits.request_timeout_s`."""
    async with (
        deploy(pods=1, wait=False, limits=Limits(request_timeout_s=0.2)) as deployment,
        connection(deployment) as (reader, writer),
    ):
        writer.write(begun)
        assert (await reader.read())[:13] == answer


async def test_idle_connections_lock_no_operator_out(deploy: Deploy) -> None:
    """The one that is idle for longest is closed for a new one."""
    async with deploy(pods=1, wait=False) as deployment:
        url = deployment.admin.base_url
        opened = [await asyncio.open_connection(url.host, url.port) for _ in range(2 * MAX_ADMIN_CONNECTIONS)]
        assert (await deployment.admin.get("/admin/pods")).status_code == 200
        assert (await deployment.client.get("/livez")).status_code == 200
        for _, writer in opened:
            writer.close()


async def test_probes_are_answered_while_the_public_listener_is_full(deploy: Deploy) -> None:
    """Requests whose bodies do not arrive take all connections there."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n{"
    async with deploy(pods=1, limits=Limits(max_connections=4)) as deployment, AsyncExitStack() as stack:
        for _ in range(4):
            _, writer = await stack.enter_async_context(connection(deployment, public=True))
            writer.write(head)
        async with asyncio.timeout(DEADLINE_S):
            while not deployment.server or len(receiving(deployment.server)) < 4:
                await asyncio.sleep(0)
            reader, writer = await stack.enter_async_context(connection(deployment, public=True))
            writer.write(b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\n")
            assert b" 503 " in await reader.readuntil(b"\r\n")
        alive, ready = [await deployment.admin.get(path) for path in ("/livez", "/readyz")]
        assert (alive.status_code, alive.json()) == (200, {"status": "alive"})
        assert ready.status_code == 200


def receiving(server: Any) -> list[Any]:
    """Connections of which a request is incomplete."""
    return [one for one in server.server_state.connections if one.last is not None]
