"""Requests of real clients that are not plain JSON with a model: compressed, marked, without a model or a type."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
from codecs import BOM_UTF8
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from router.config.schema import Limits
from tests.api.test_encoded_bodies import zstd
from tests.stories.conftest import Chat, Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
ASKED: Chat = [{"role": "user", "content": "Hi"}]
BODY = json.dumps({"model": "demo", "messages": ASKED, "max_tokens": 4}).encode()
NAMELESS = json.dumps({"messages": ASKED, "max_tokens": 4}).encode()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (BODY, {}),
        (gzip.compress(BODY), {"content-encoding": "gzip"}),
        (zstd.compress(BODY), {"content-encoding": "zstd", "accept-encoding": "zstd"}),
        (BOM_UTF8 + BODY, {"content-type": "application/json; charset=utf-8"}),
        (NAMELESS, {"content-type": "application/json"}),
        (gzip.compress(BOM_UTF8 + NAMELESS), {"content-encoding": "gzip"}),
    ],
    ids=["no type", "gzip", "zstd", "marked", "no model", "all of it"],
)
async def test_a_chat_is_answered_however_it_is_sent(deploy: Deploy, body: bytes, headers: dict[str, str]) -> None:
    """With the model that served it, also in the log."""
    async with deploy(pods=1) as deployment:
        answer = await deployment.client.post("/v1/chat/completions", content=body, headers=headers)
        assert (answer.status_code, answer.json().get("model")) == (200, "demo"), answer.text
        assert "date" in answer.headers and "content-encoding" not in answer.headers


async def test_openais_sdk_may_leave_out_the_model(deploy: Deploy) -> None:
    nameless: Any = {"model": openai.omit, "messages": ASKED}
    async with deploy(pods=1) as deployment:
        client = openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        async with client:
            found = await client.chat.completions.create(**nameless, max_tokens=4)
            assert found.model == "demo"


def upload(url: str, size_bytes: int) -> tuple[int, str | None]:
    """The status of an upload with Python's own client, which reads it when everything is sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("POST", "/v1/chat/completions", b"x" * size_bytes, {"connection": "close"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


async def test_a_client_that_reads_at_the_end_of_its_upload_gets_the_413(deploy: Deploy) -> None:
    """The router reads and drops what is sent after its answer."""
    async with deploy(pods=1, limits=Limits(max_body_bytes=1000)) as deployment:
        assert await asyncio.to_thread(upload, deployment.url, 16 * 1024 * 1024) == (413, "close")


async def test_a_client_that_asks_for_a_websocket_is_told_where_to_connect(deploy: Deploy) -> None:
    """Its Upgrade is ignored, so the error is of the API, and its connection serves the next request."""
    sent = ("GET /v1/realtime?model=demo HTTP/1.1", "Host: h", "Connection: Upgrade", "Upgrade: websocket")
    async with deploy(pods=1) as deployment:
        url = urlsplit(deployment.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write("\r\n".join([*sent, "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: x", "", ""]).encode())
        writer.write(b"GET /livez HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        first, _, rest = (await reader.read()).partition(b"\r\n")
        writer.close()
        assert first == b"HTTP/1.1 404 Not Found"
        assert b'"code":"unknown_url"' in rest and b"which are not routed: connect to a pod" in rest
        assert rest.endswith(b'{"status":"alive"}')
