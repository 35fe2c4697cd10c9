"""`/v1/responses` of a mock engine, as OpenAI's SDK reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine
from router.types import PodSpeed
from tests.lab.conftest import MakeConfig

pytestmark = [pytest.mark.net, pytest.mark.anyio]
LONG = " ".join(f"word{i}" for i in range(60))
ASK: dict[str, Any] = {"model": "tiny", "input": LONG}
CALLING = {
    **ASK,
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": f'{LONG}\ntool_call: read {{"page": [1, 2]}}'}]}
    ],
}


@asynccontextmanager
async def sdk(config: MockEngineConfig) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a running engine, with a deadline."""
    async with (
        asyncio.timeout(30),
        MockEngine(config) as engine,
        openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_the_usage_has_cached_tokens(make_agent_config: MakeConfig) -> None:
    """Equal prompts get equal text, the second from the cache."""
    async with sdk(make_agent_config()) as client:
        first, second = [await client.responses.create(**ASK) for _ in range(2)]
        assert first.output_text == second.output_text and first.status == "completed"
        assert first.usage and second.usage
        assert first.usage.input_tokens_details.cached_tokens == 0
        assert 0 < second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens <= 16


def kept(item: Any) -> dict[str, Any]:
    """An item without what names its request."""
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


@pytest.mark.parametrize("asked", [ASK, CALLING], ids=["text", "call"])
async def test_a_stream_has_what_the_unary_response_has(make_agent_config: MakeConfig, asked: dict[str, Any]) -> None:
    """Numbered events, of which the last has the whole response; deltas add up to the text or the arguments."""
    async with sdk(make_agent_config()) as client:
        await client.responses.create(**asked)
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        last = events[-1]
        assert last.type == "response.completed"
        assert [kept(item) for item in last.response.output] == [kept(item) for item in whole.output]
        assert last.response.usage == whole.usage
        deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
        (item,) = whole.output
        assert deltas == (item.arguments if item.type == "function_call" else whole.output_text)


async def test_a_listed_call_is_made(make_agent_config: MakeConfig) -> None:
    """With its arguments as JSON; after its output comes text."""
    async with sdk(make_agent_config()) as client:
        answer = await client.responses.create(**CALLING)
        (item,) = answer.output
        assert item.type == "function_call" and (item.name, json.loads(item.arguments)) == ("read", {"page": [1, 2]})
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "both read"}
        turns = [*CALLING["input"], item.to_dict(), result]
        assert (await client.responses.create(**{**CALLING, "input": turns})).output_text


async def test_a_response_that_was_cut_says_so(make_agent_config: MakeConfig) -> None:
    """With its reason; the last event is the same as of a complete one."""
    async with sdk(make_agent_config()) as client:
        answer = await client.responses.create(**ASK, max_output_tokens=3)
        assert answer.status == "incomplete" and answer.incomplete_details
        assert answer.incomplete_details.reason == "max_output_tokens"


async def test_an_earlier_response_is_not_found(make_agent_config: MakeConfig) -> None:
    """As by vLLM, which stores none by default."""
    async with sdk(make_agent_config()) as client:
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_1' not found"):
            await client.responses.create(**ASK, previous_response_id="resp_1")


async def test_a_stream_begins_before_the_prefill(make_agent_config: MakeConfig) -> None:
    """Its first events arrive while the first token is hours away."""
    config = make_agent_config(speed=PodSpeed(1e7, 0.0, 0.0), time_scale=1.0)
    async with (
        asyncio.timeout(30),
        MockEngine(config) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
        client.stream("POST", "/v1/responses", json=ASK | {"stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line == "event: response.in_progress":
                break
