"""Agent sessions over `/v1/messages` of real vLLM pods: predicted block for block; no request lost when a pod dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import anthropic
import httpx
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
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name} a page. {TEXT}",
        "input_schema": {"properties": {"page": {"type": "integer"}}, "required": ["page"]},
    }
    for name in ("read", "write")
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    """Started once."""
    start = partial(start_vllm, model_dir=MODEL, extra_args=AGENT_FLAGS)
    folder = tmp_path_factory.mktemp("messages")
    with live_fleet("messages", folder, MODEL, start, endpoints=["/v1/messages"]) as running:
        yield running


async def ask(client: anthropic.AsyncAnthropic, fields: dict[str, Any], *, stream: bool) -> Answer:
    """One turn through the SDK, as Claude Code sends it, with the router's headers."""
    extra = {"extra_body": {"temperature": 0}, "extra_query": {"beta": "true"}}
    fields = {"model": "tiny", "max_tokens": 12, **extra, **fields}
    if stream:
        async with client.messages.stream(**fields) as events:
            message, headers = await events.get_final_message(), events.response.headers
    else:
        raw = await client.messages.with_raw_response.create(**fields)
        message, headers = await raw.parse(), raw.headers
    return answer_of(headers, message.model_dump(exclude_none=True))


class MessagesSession:
    """One agent: tools, system blocks, thinking, calls and their results, late system messages."""

    def __init__(self, name: str, thinking: str | None) -> None:
        self.name = name
        self.fields: dict[str, Any] = {"tools": TOOLS}
        if thinking:
            self.fields["thinking"] = {"type": thinking}
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"Begin with {name}."}]

    def asked(self, turn: int) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={self.name}{turn};"
        system = [billing, "You are an agent. ", f"You keep the book of {self.name}. " + BOOK]
        return self.fields | {
            "system": [{"type": "text", "text": text} for text in system],
            "messages": self.messages,
        }

    def answered(self, turn: int, body: dict[str, Any]) -> None:
        """The model's words, a call that it might have made, and the call's result."""
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "read", "input": {"page": turn}}
        page = [{"type": "text", "text": f"Page {turn}. {TEXT}"}, {"type": "text", "text": "End."}]
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": page}
        kept = [block for block in body["content"] if block["type"] in ("text", "thinking")]
        self.messages += [
            {"role": "assistant", "content": [*kept, call]},
            {"role": "user", "content": [result, {"type": "text", "text": f"Go on with {turn}."}]},
        ]
        if turn % 3 == 2:
            self.messages.append({"role": "system", "content": f"{1000 - turn} tokens left"})


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_agent_sessions_stay_on_their_pod_with_exact_predictions(fleet: LiveFleet, stream: bool) -> None:
    """Ten interleaved sessions of ten turns, with thinking enabled, disabled, adaptive or not mentioned."""
    modes = (None, "disabled", "adaptive")
    sessions = [MessagesSession(f"{n}-{stream}", modes[n % len(modes)]) for n in range(SESSIONS)]
    async with fleet.anthropic_sdk() as client:
        check_sessions(await take_turns(sessions, TURNS, partial(ask, client, stream=stream)))


async def test_tokens_are_counted_without_a_pod(fleet: LiveFleet) -> None:
    """The number that the pod uses, and no request reaches a pod."""
    session = MessagesSession("count", "disabled")
    body = {**session.asked(0), "model": "tiny"}
    async with fleet.anthropic_sdk() as client, httpx.AsyncClient() as plain:
        used = await ask(client, session.asked(0), stream=False)
        before = [(await plain.get(f"{pod.url}/metrics")).text.count("count_tokens") for pod in fleet.pods]
        counted = await client.messages.count_tokens(**body)
        after = [(await plain.get(f"{pod.url}/metrics")).text.count("count_tokens") for pod in fleet.pods]
    assert counted.input_tokens == used.prompt
    assert before == after


async def test_a_killed_pod_costs_no_unstreamed_message(fleet: LiveFleet) -> None:
    """One of two pods is killed at work: every request is answered."""
    async with fleet.anthropic_sdk() as client:
        storm = [MessagesSession(f"storm {n}", None).asked(0) | {"max_tokens": 200} for n in range(16)]
        asked = [asyncio.create_task(ask(client, fields, stream=False)) for fields in storm]
        _, other = await fleet.kill_a_busy_pod()
        answers = await asyncio.gather(*asked)
    assert other in {answer.pod for answer in answers}
