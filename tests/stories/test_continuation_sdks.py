"""The official SDKs read whole streams although the pod that writes each one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy
from tests.stories.test_continuation import ON, PROMPT, SCHEMA, SLOW, continued, proven

pytestmark = [pytest.mark.net, pytest.mark.anyio]
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
FUNCTION: Any = {"name": "look", "parameters": SCHEMA}
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
_VARIES = {
    *(
        "created",
        "created_at",
        "completed_at",
        "id",
        "item_id",
        "call_id",
        "signature",
        "sequence_number",
        "system_fingerprint",
    ),
    *("input_tokens", "input_tokens_details", "prompt_tokens_details", "cache_read_input_tokens"),
    "cache_creation_input_tokens",
}


@dataclass(frozen=True)
class Clients:
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[Clients]:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as of_anthropic,
    ):
        yield Clients(of_openai, of_anthropic)


async def _chat(at: Clients) -> Any:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    options: Any = {"include_usage": True}
    async with at.openai.chat.completions.stream(
        **GREEDY, messages=MESSAGES, tools=tools, stream_options=options
    ) as one:
        return await one.get_final_completion()


async def _sampled_chat(at: Clients) -> Any:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "stream": True}
    chunks = [chunk async for chunk in await at.openai.chat.completions.create(**asked)]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(delta.content or "" for delta in deltas), len({chunk.id for chunk in chunks})


async def _completion(at: Clients) -> Any:
    asked = await at.openai.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40, stream=True)
    return [[choice.text for choice in chunk.choices] async for chunk in asked]


async def _response(at: Clients) -> Any:
    tools: Any = [{"type": "function", **FUNCTION}]
    async with at.openai.responses.stream(**GREEDY, input=PROMPT, tools=tools) as one:
        return await one.get_final_response()


async def _message(at: Clients) -> Any:
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    asked: Any = {"model": "demo", "messages": MESSAGES, "tools": tools, "max_tokens": 200}
    async with at.anthropic.messages.stream(**asked, extra_body={"temperature": 0}) as one:
        return await one.get_final_message()


CALLS = {
    "chat": _chat,
    "sampled chat": _sampled_chat,
    "completion": _completion,
    "response": _response,
    "message": _message,
}


def said(value: Any) -> Any:
    """What an SDK has made of a stream, without ids, times and what depends on a cache."""
    if isinstance(value, list):
        return [said(one) for one in value]
    if isinstance(value, dict):
        return {name: said(one) for name, one in value.items() if name not in _VARIES}
    return said(value.model_dump()) if hasattr(value, "model_dump") else value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_sdk_reads_a_whole_stream_whose_pod_is_killed(
    deploy: Deploy, call: Callable[[Clients], Awaitable[Any]]
) -> None:
    async with deploy(continuation=ON, engine=SLOW) as deployment, clients(deployment.url) as at:
        await proven(deployment)
        calling = asyncio.ensure_future(call(at))
        busy: set[int] = set()

        def has_ended() -> bool:
            busy.update(n for n, engine in enumerate(deployment.engines) if engine.load.running)
            return calling.done()

        await deployment.until(has_ended)
        expected, (number,) = said(await calling), busy
        engine = deployment.engines[number]
        engine.inject(Fault(kind=FaultKind.DIE, after_chunks=12))
        assert said(await call(at)) == expected
        assert not engine.faults.armed, "its pod was not killed"
        counted = await continued(deployment)
        assert 'method="none"' not in "".join(counted)
        assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 1
