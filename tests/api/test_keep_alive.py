"""A stream that waits is kept open: its head, comments or pings, then the response or an error as an event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from router.config.schema import Edge
from router.errors import Overloaded, UpstreamBroken
from router.frontends.http.exchange import MAX_LATE_BYTES, Exchange
from router.request.context import RequestContext
from tests.api.test_openai_edge import make_edge
from tests.api.test_protocol import connected

pytestmark = [pytest.mark.anyio, pytest.mark.net]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
FIELDS: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 1}
COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'
EVENTS = [(b"content-type", b"text/event-stream"), (b"x-warmroute-pod", b"a")]
SHORT = Edge(keep_alive_s=0.005)
Answer = Callable[[Exchange], None]


@asynccontextmanager
async def waiting(
    answer: Answer, path: str = CHAT, edge: Edge = SHORT, version: str = "1.1", *, stream: bool = True
) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], None]]]:
    """What the client of a request reads, and what lets the request be answered."""
    may_answer = asyncio.Event()

    async def forward(_context: RequestContext, client: Exchange) -> None:
        await may_answer.wait()
        answer(client)

    own = cast(Any, make_edge(edge=edge, forward=forward))
    own.connections = set()
    body = json.dumps({"model": "m", "stream": stream, **FIELDS}).encode()
    async with asyncio.timeout(10), connected(own) as (reader, writer):
        head = f"POST {path} HTTP/{version}\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        yield reader, may_answer.set


async def rest(reader: asyncio.StreamReader) -> bytes:
    """The body to its end, without the frames of its chunks."""
    found = b""
    while size := int(await reader.readline(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    return found


def streamed(client: Exchange) -> None:
    client.start(200, EVENTS)
    client.put(b"data: 1\n\n")
    client.finish()


def refused(status: int, body: bytes) -> Answer:
    def answer(client: Exchange) -> None:
        client.start(status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        client.put(body)
        client.finish()

    return answer


@pytest.mark.parametrize(("path", "ping"), [(CHAT, COMMENT), (RESPONSES, COMMENT), (MESSAGES, PING)])
async def test_a_stream_that_waits_gets_its_head_and_signs_of_life(path: str, ping: bytes) -> None:
    """Then what the pod sends, unchanged; its headers come too late."""
    async with waiting(streamed, path) as (reader, may_answer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-type: text/event-stream" in head
        assert b"x-request-id: req-" in head and b"x-warmroute-pod" not in head
        await reader.readuntil(ping)
        await reader.readuntil(ping)
        may_answer()
        found = await rest_of(reader)
    assert found.replace(ping, b"") == b"data: 1\n\n"


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """The rest, from the end of a piece."""
    assert await reader.readline() == b"\r\n"
    return await rest(reader)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_refusal_after_that_is_an_error_event(path: str) -> None:
    """With the fields on which the SDKs of all APIs raise."""

    def refuse(_client: Exchange) -> None:
        raise Overloaded("The fleet is full.", retry_after_s=3)

    ping = PING if path == MESSAGES else COMMENT
    async with waiting(refuse, path) as (reader, may_answer):
        await reader.readuntil(ping)
        may_answer()
        event = (await rest_of(reader)).replace(ping, b"").strip()
    name, data = event.split(b"\n")
    error = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error" and error["type"] == "error"
    assert error["error"]["message"] == "The fleet is full." and error["code"] == "overloaded"


async def test_a_response_that_is_no_stream_and_breaks_is_one_error_event() -> None:
    """What has come of it is left out."""

    def broken(client: Exchange) -> None:
        client.start(200, [(b"content-type", b"application/json"), (b"content-length", b"100")])
        client.put(b'{"choices": [')
        raise UpstreamBroken("pod a: cut", pod="a")

    async with waiting(broken) as (reader, may_answer):
        await reader.readuntil(COMMENT)
        may_answer()
        event = (await rest_of(reader)).replace(COMMENT, b"").strip()
    name, data = event.split(b"\n")
    assert name == b"event: error" and json.loads(data.removeprefix(b"data: "))["code"] == "upstream_broken"


@pytest.mark.parametrize(("status", "name"), [(400, b"event: error\n"), (200, b"")])
async def test_a_response_that_is_no_stream_becomes_an_event(status: int, name: bytes) -> None:
    """In one line, and cut where it is too long."""
    for body, data in ((b'{"error":\n{"message": "no"}}', b'{"error": {"message": "no"}}'), (b"x" * 2**21, None)):
        async with waiting(refused(status, body)) as (reader, may_answer):
            await reader.readuntil(COMMENT)
            may_answer()
            event = (await rest_of(reader)).replace(COMMENT, b"")
        assert event == name + b"data: " + (data or b"x" * MAX_LATE_BYTES) + b"\n\n"


@pytest.mark.parametrize(
    ("path", "edge", "stream"),
    [(CHAT, Edge(), True), (CHAT, SHORT, False), (CHAT, Edge(keep_alive_s=9), True), (COUNT, SHORT, True)],
)
async def test_other_requests_wait_as_ever(path: str, edge: Edge, *, stream: bool) -> None:
    """Without the key, without a stream, before the time has passed, and at an endpoint that has no streams."""
    async with waiting(refused(429, b"{}"), path, edge=edge, stream=stream) as (reader, may_answer):
        asyncio.get_running_loop().call_later(0.02, may_answer)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429 ")


async def test_a_client_of_http_1_0_reads_until_the_end_of_the_connection() -> None:
    async with waiting(streamed, version="1.0") as (reader, may_answer):
        await reader.readuntil(COMMENT)
        may_answer()
        assert (await reader.read()).replace(COMMENT, b"") == b"data: 1\n\n"
