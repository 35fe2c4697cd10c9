"""The admin listener: bounded in size, time and number, open until the end, with a page for operators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Limits
from router.wiring.router import MAX_ADMIN_CONNECTIONS
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- connections ---


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


# --- the page ---


CHAT = [{"role": "user", "content": "Which pod holds my prefix? This question is long enough to fill a block or two."}]
WORDS = ("id", "model", "pod", "policy", "workload", "result", "prompt_tokens")


async def snapshots(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    """The snapshots of one viewer, until the router ends the stream."""
    async with asyncio.timeout(DEADLINE_S), client.stream("GET", "/ui/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                yield msgspec.json.decode(line.removeprefix("data: "))


async def test_the_page_and_its_data_are_served(deploy: Deploy) -> None:
    """The first snapshots have the pods, later ones the request, its decision and its tokens."""
    async with deploy() as deployment:
        page = await deployment.admin.get("/ui")
        assert page.status_code == 200 and "sha256-" in page.headers["content-security-policy"]
        assert page.text.startswith("<!doctype html>")
        root = await deployment.admin.get("/")
        assert (root.status_code, root.headers["location"]) == (307, "/ui")
        answer = await deployment.chat(CHAT)
        async for found in snapshots(deployment.admin):
            if found["decisions"] and "result" in found["decisions"][0]:
                break
        assert len(found["pods"]) == 2
        assert found["models"] == ["demo"]
        assert found["decisions"][0]["id"] == answer.headers["x-request-id"]
        assert found["since_start"]["requests"] == 1 and found["since_start"]["token_shares"]["available"] == 0


async def test_the_page_has_the_words_of_the_log(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    """They describe a request, and the state of a pod with its reason."""
    with capture_logs() as lines:
        async with deploy(pods=1) as deployment:
            await deployment.chat(CHAT)
            deployment.engines[0].inject(Fault(kind=FaultKind.REFUSE))
            await deployment.until(lambda: any(line.get("new") == "ejected" for line in lines))
            found = await anext(snapshots(deployment.admin))
    request = next(json.loads(line) for line in capsys.readouterr().err.splitlines() if '"request"' in line)
    decision, pod = found["decisions"][0], found["pods"][0]
    assert {name: decision[name] for name in WORDS} == {name: request[name] for name in WORDS}
    assert pod["state"] == next(line["new"] for line in lines if line.get("new") == "ejected")
    assert pod["state_reason"] in {line.get("reason") for line in lines if line.get("pod") == pod["id"]}


async def test_a_viewer_does_not_delay_the_end_of_the_router(deploy: Deploy) -> None:
    """Its stream is completed, not cut off."""
    async with (
        deploy(pods=1, wait=False) as deployment,
        httpx.AsyncClient(base_url=deployment.admin.base_url, timeout=DEADLINE_S) as client,
    ):
        seen: list[dict[str, Any]] = []
        watching = asyncio.create_task(_collect(snapshots(client), seen))
        await deployment.until(lambda: bool(seen))
        assert deployment.server is not None
        deployment.server.should_exit = True
        await asyncio.wait_for(watching, DEADLINE_S)


async def _collect(events: AsyncIterator[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    async for event in events:
        seen.append(event)
