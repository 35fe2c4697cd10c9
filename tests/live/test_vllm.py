"""The router predicts the caches of real vLLM pods block for block, and loses no request when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import (
    AGENT_FLAGS,
    BOOK,
    TEXT,
    Answer,
    LiveFleet,
    answer_of,
    check_sessions,
    live_fleet,
    take_turns,
)

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
SESSIONS = 10
TURNS = 10
SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a page. {TEXT}", "parameters": SCHEMA}}
    for name in ("read", "write")
]
Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    """Started once."""
    assert Path(MODEL).is_dir(), "run tests/live/install.sh (or `make live`)"
    start = partial(start_vllm, model_dir=MODEL, extra_args=AGENT_FLAGS)
    with live_fleet("live", tmp_path_factory.mktemp("vllm"), MODEL, start) as running:
        yield running


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any], *, stream: bool = False) -> Answer:
    """One turn through the SDK, with the router's headers."""
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, **fields}
    if not stream:
        raw = await client.chat.completions.with_raw_response.create(**fields)
        return answer_of(raw.headers, raw.parse().model_dump(exclude_none=True))
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = await client.chat.completions.with_raw_response.create(**fields)
    parsed: Any = raw.parse()
    chunks = [chunk async for chunk in parsed]
    content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usage = chunks[-1].usage.model_dump(exclude_none=True)
    return answer_of(raw.headers, {"choices": [{"message": {"content": content}}], "usage": usage})


def opening(topic: str, text: str = TEXT * 12) -> Chat:
    """A system prompt and a question."""
    return [
        {"role": "system", "content": f"You keep the book of {topic}. {text}"},
        {"role": "user", "content": f"Read out page {topic}."},
    ]


class ChatSession:
    """One agent: a book as its system prompt, tools, calls and their results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.chat = opening(name, BOOK)

    def asked(self, turn: int) -> dict[str, Any]:
        return {"tools": TOOLS, "messages": self.chat}

    def answered(self, turn: int, body: dict[str, Any]) -> None:
        """The model's words, a call that it might have made, and the call's result."""
        said = body["choices"][0]["message"].get("content") or ""
        function = {"name": "read", "arguments": f'{{"page": {turn}}}'}
        self.chat += [
            {
                "role": "assistant",
                "content": said,
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"Page {turn}. {TEXT}"},
            {"role": "user", "content": f"Go on with {turn}."},
        ]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_agent_sessions_stay_on_their_pod_with_exact_predictions(fleet: LiveFleet, stream: bool) -> None:
    """Ten interleaved sessions of ten turns."""
    sessions = [ChatSession(f"{n}-{stream}") for n in range(SESSIONS)]
    async with fleet.openai_sdk() as client:
        check_sessions(await take_turns(sessions, TURNS, partial(ask, client, stream=stream)))


async def test_a_repeated_prompt_is_predicted_to_its_last_whole_block(fleet: LiveFleet) -> None:
    """Engines recompute the last block of a prompt that is fully cached."""
    async with fleet.openai_sdk() as client:
        answers = [await ask(client, {"messages": opening("repeat")}) for _ in range(3)]
    assert [answer.predicted for answer in answers] == [answer.reported for answer in answers]
    assert answers[2].reported > 0


async def test_a_killed_pod_costs_no_unstreamed_request(fleet: LiveFleet) -> None:
    """One of two pods is killed at work: every request is answered, and later ones go to the other."""
    async with fleet.openai_sdk() as client:
        storm = [{"messages": opening(f"storm {number}"), "max_tokens": 200} for number in range(16)]
        asked = [asyncio.create_task(ask(client, fields)) for fields in storm]
        _, other = await fleet.kill_a_busy_pod()
        answers = await asyncio.gather(*asked)
        after = [await ask(client, {"messages": opening(f"calm {number}")}) for number in range(4)]
    assert other in {answer.pod for answer in answers}
    assert {answer.pod for answer in after} == {other}
