"""Requests of real clients that are not plain JSON with a model: compressed, marked, without a model or a type."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
from codecs import BOM_UTF8
from urllib.parse import urlsplit

import pytest

from router.config.schema import Limits
from tests.api.test_encoded_bodies import zstd
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Chat, Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
ASKED: Chat = [{"role": "user", "content": "Hi"}]
BODY = json.dumps({"model": "demo", "messages": ASKED, "max_tokens": 4}).encode()
NAMELESS = json.dumps({"messages": ASKED, "max_tokens": 4}).encode()


WAYS: dict[str, tuple[bytes, dict[str, str]]] = {
    "no type": (BODY, {}),
    "gzip": (gzip.compress(BODY), {"content-encoding": "gzip"}),
    "zstd": (zstd.compress(BODY), {"content-encoding": "zstd", "accept-encoding": "zstd"}),
    "marked": (BOM_UTF8 + BODY, {"content-type": "application/json; charset=utf-8"}),
    "no model": (NAMELESS, {"content-type": "application/json"}),
    "all of it": (gzip.compress(BOM_UTF8 + NAMELESS), {"content-encoding": "gzip"}),
}


async def test_a_chat_is_answered_however_it_is_sent(deploy: Deploy) -> None:
    """With the model that served it."""
    async with deploy(pods=1) as deployment:
        for way, (body, headers) in WAYS.items():
            answer = await deployment.client.post("/v1/chat/completions", content=body, headers=headers)
            assert (answer.status_code, answer.json().get("model")) == (200, "demo"), (way, answer.text)
            assert "date" in answer.headers and "content-encoding" not in answer.headers


def upload(url: str, size_bytes: int) -> tuple[int, str | None]:
    """The status of an upload with Python's own client, which reads it when everything is sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", b"x" * size_bytes, {"connection": "close"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


async def test_a_client_that_reads_at_the_end_of_its_upload_gets_the_413(deploy: Deploy) -> None:
    """The router reads and drops what is sent after its answer."""
    async with deploy(pods=1, limits=Limits(max_body_bytes=1000)) as deployment:
        assert await asyncio.to_thread(upload, deployment.url, 16 * 1024 * 1024) == (413, "close")
