"""What the official SDK sees of the usage of a stream: what it would see from an engine that nobody else has asked."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import httpx
import openai
import pytest

from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"model": "demo", "prompt": "Hello", "max_tokens": 6, "temperature": 0}
OPTIONS = [None, {"include_usage": False}, {"include_usage": True}, {"continuous_usage_stats": True}]


def masked(stream: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*"|"created":\d+|"\w*cached?_tokens":\d+|"system_fingerprint":"[^"]*"', b"x", stream)


async def test_a_client_that_reads_the_choice_of_each_chunk_goes_on_to_the_end(deploy: Deploy) -> None:
    """As examples do, and many programs. The router still has the counts of the engine."""
    async with deploy(1) as deployment:
        url = f"{deployment.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: Any = {**CHAT, "stream": True}
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert all(chunk.choices[0] is not None and chunk.usage is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].system_fingerprint
        page = (await deployment.admin.get("/metrics")).text
        assert re.search(r"^warmroute_reported_prompt_tokens_total\{.*\} [1-9]", page, re.MULTILINE)
        assert re.search(r"^warmroute_time_per_output_token_seconds_count\{.*\} 1\.0$", page, re.MULTILINE)


async def test_bytes_are_those_of_an_engine_without_a_router(deploy: Deploy) -> None:
    """Whether the engine is forced to send usage or not."""
    async with deploy(1) as plain, deploy(1, engine={"forces_usage": True}) as forced, httpx.AsyncClient() as client:
        for (path, body), options in product((("chat/completions", CHAT), ("completions", COMPLETION)), OPTIONS):
            asked = {**body, "stream": True} | ({"stream_options": options} if options else {})
            direct = await client.post(f"{plain.engines[0].url}/v1/{path}", json=asked)
            routed = [await each.client.post(f"/v1/{path}", json=asked) for each in (plain, forced)]
            assert direct.status_code == 200
            assert [masked(answer.content) for answer in routed] == [masked(direct.content)] * 2
