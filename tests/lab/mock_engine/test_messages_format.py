"""`/v1/messages` of a mock engine, as Anthropic's SDK reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine
from tests.lab.conftest import MakeConfig

pytestmark = [pytest.mark.net, pytest.mark.anyio]
LONG = " ".join(f"word{i}" for i in range(60))
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": LONG}]}
CALLING = {
    **ASK,
    "tools": [{"name": "read", "description": "Reads", "input_schema": {"type": "object", "properties": {}}}],
    "messages": [{"role": "user", "content": f'{LONG}\ntool_call: read {{"page": [1, 2]}}'}],
}


@asynccontextmanager
async def sdk(config: MockEngineConfig) -> AsyncIterator[tuple[MockEngine, anthropic.AsyncAnthropic]]:
    """A running engine and a client of it, with a deadline."""
    async with (
        asyncio.timeout(30),
        MockEngine(config) as engine,
        anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0) as client,
    ):
        yield engine, client


async def test_the_cached_part_of_a_prompt_is_counted_apart(make_agent_config: MakeConfig) -> None:
    """The three counts of input tokens add up to the prompt, and to what `count_tokens` counts."""
    async with sdk(make_agent_config()) as (_, client):
        first, second = [await client.messages.create(**ASK) for _ in range(2)]
        counted = await client.messages.count_tokens(model="tiny", messages=ASK["messages"])
        usage, read = second.usage, second.usage.cache_read_input_tokens or 0
        assert first.usage.cache_read_input_tokens == 0 and 0 < counted.input_tokens - read <= 16
        assert usage.input_tokens + (usage.cache_creation_input_tokens or 0) + read == counted.input_tokens
        assert first.content == second.content and first.stop_reason == "end_turn"


async def test_a_stop_sequence_ends_a_message_and_is_named(make_agent_config: MakeConfig) -> None:
    """Whole and streamed."""
    async with sdk(make_agent_config()) as (_, client):
        said = (await client.messages.create(**ASK)).content[0].text
        asked = {**ASK, "stop_sequences": [said.split()[3]]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for one in (whole, streamed):
            assert (one.stop_reason, one.stop_sequence) == ("stop_sequence", said.split()[3])
            assert one.content[0].text.split() == said.split()[:3]  # type: ignore[union-attr]


@pytest.mark.parametrize("asked", [ASK, CALLING], ids=["text", "call"])
async def test_a_stream_has_what_the_unary_response_has(make_agent_config: MakeConfig, asked: dict[str, Any]) -> None:
    """Text or the call of a tool, the reason to stop, and the usage."""
    async with sdk(make_agent_config()) as (_, client):
        await client.messages.create(**asked)
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        (one,), (other,) = streamed.content, whole.content
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
        assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


async def test_a_listed_call_is_made(make_agent_config: MakeConfig) -> None:
    """With its arguments decoded; after its result comes text."""
    async with sdk(make_agent_config()) as (_, client):
        answer = await client.messages.create(**CALLING)
        (block,) = answer.content
        assert block.type == "tool_use" and answer.stop_reason == "tool_use"
        assert (block.name, block.input) == ("read", {"page": [1, 2]})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "both read"}
        turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        after = await client.messages.create(**{**CALLING, "messages": [*CALLING["messages"], *turns]})
        assert after.content[0].type == "text"


async def test_an_output_is_as_long_as_the_client_limits_it(make_agent_config: MakeConfig) -> None:
    """`max_tokens` is a limit here, because clients must send one; `min_tokens` makes a response longer."""
    async with sdk(make_agent_config()) as (_, client):
        short = await client.messages.create(**{**ASK, "max_tokens": 3})
        assert (short.usage.output_tokens, short.stop_reason) == (3, "max_tokens")
        long = await client.messages.create(**ASK, extra_body={"min_tokens": 90})
        assert (long.usage.output_tokens, long.stop_reason) == (90, "end_turn")


async def test_errors_have_the_shape_that_the_sdk_reads(make_agent_config: MakeConfig) -> None:
    """The error's type and message, by status."""
    async with sdk(make_agent_config()) as (_, client):
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**{**ASK, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="BadRequestError"):
            await client.messages.create(**{**ASK, "max_tokens": 2000})


async def test_a_cut_stream_has_no_last_message(make_agent_config: MakeConfig) -> None:
    """The connection closes behind the tokens of the fault."""
    async with sdk(make_agent_config()) as (engine, _), httpx.AsyncClient(base_url=engine.url) as client:
        engine.inject(Fault(kind=FaultKind.CUT, after_chunks=3))
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/messages", json=ASK | {"stream": True}) as answer:
                async for piece in answer.aiter_raw():
                    got += piece
        assert got.count(b"event: content_block_delta") == 3 and b"message_stop" not in got
