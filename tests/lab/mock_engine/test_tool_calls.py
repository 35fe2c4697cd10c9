"""Calls of tools that a user's message lists."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.mock_engine import MockEngine
from loadtest.mock_engine.tool_calls import ListedAnswer, next_answer
from tests.lab.conftest import MakeConfig

SCRIPT = 'Do this:\ntool_call: read {"page": 1}\ntool_call: write {"page": 2}\nThen stop.'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "done"}


def chat(*messages: dict[str, Any], tools: list[dict[str, Any]] = TOOLS) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SCRIPT}, *messages], "tools": tools}


def test_the_calls_are_made_in_order_and_then_no_more() -> None:
    """One for each response, counted by the calls behind the message."""
    turns = [chat(), chat(CALL, RESULT), chat(CALL, RESULT, CALL, RESULT)]
    assert [next_answer(turn) for turn in turns] == [
        ListedAnswer(calls=[("read", '{"page": 1}')]),
        ListedAnswer(calls=[("write", '{"page": 2}')]),
        None,
    ]


def test_a_reminder_behind_the_message_changes_nothing() -> None:
    """Only a message that lists calls replaces the list."""
    reminder = {"role": "user", "content": [{"type": "text", "text": "900 tokens left"}]}
    assert next_answer(chat(CALL, RESULT, reminder)) == ListedAnswer(calls=[("write", '{"page": 2}')])
    again = {"role": "user", "content": [{"type": "text", "text": 'tool_call: read {"page": 9}'}]}
    assert next_answer(chat(CALL, RESULT, again)) == ListedAnswer(calls=[("read", '{"page": 9}')])


def test_a_chat_without_the_tool_gets_text() -> None:
    """As when a client asks for a title of the conversation."""
    assert next_answer(chat(tools=[])) is None
    assert next_answer({"messages": [{"role": "user", "content": "tool_call: read {}"}]}) is None


@pytest.mark.net
@pytest.mark.anyio
async def test_the_next_turn_finds_the_call_in_the_cache(make_agent_config: MakeConfig) -> None:
    """The call's tokens are those that the template writes for it."""
    async with (
        asyncio.timeout(30),
        MockEngine(make_agent_config(block_size_tokens=1, num_blocks=4096)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        first = (await client.post("/v1/chat/completions", json=chat())).json()
        message, usage = first["choices"][0]["message"], first["usage"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"page": 1}
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        second = (await client.post("/v1/chat/completions", json=chat(message, RESULT))).json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["total_tokens"] - 1
