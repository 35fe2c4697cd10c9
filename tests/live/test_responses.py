"""Agent sessions over `/v1/responses` of real vLLM pods: predicted block for block; stored responses find their pod."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import (
    AGENT_FLAGS,
    BOOK,
    DEADLINE_S,
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
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "description": f"read a page. {TEXT}", "parameters": SCHEMA, "strict": True},
    {"type": "custom", "name": "shell", "description": "Runs a command."},
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    """Pods that store responses."""
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    start = partial(start_vllm, model_dir=MODEL, extra_args=AGENT_FLAGS, environment=stores)
    folder = tmp_path_factory.mktemp("responses")
    with live_fleet("responses", folder, MODEL, start, endpoints=["/v1/responses"]) as running:
        yield running


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any], *, stream: bool) -> Answer:
    """One turn through the SDK, with the router's headers."""
    fields = {"model": "tiny", "max_output_tokens": 12, "temperature": 0, **fields}
    if stream:
        async with client.responses.with_streaming_response.create(**fields, stream=True) as raw:
            headers = raw.headers
            *_, last = [event async for event in await raw.parse()]
            response = last.response
    else:
        whole = await client.responses.with_raw_response.create(**fields)
        response, headers = whole.parse(), whole.headers
    return answer_of(headers, response.model_dump(exclude_none=True))


class ResponsesSession:
    """One agent: instructions, tools, reasoning, calls and their outputs, messages of the developer."""

    def __init__(self, name: str, effort: str | None) -> None:
        self.name = name
        self.fields: dict[str, Any] = {
            "tools": TOOLS,
            "instructions": f"You keep the book of {name}. " + BOOK,
            "store": False,
        }
        if effort:
            self.fields["reasoning"] = {"effort": effort}
        self.input: list[dict[str, Any]] = [{"role": "user", "content": f"Begin with {name}."}]

    def asked(self, turn: int) -> dict[str, Any]:
        return self.fields | {"input": self.input}

    def answered(self, turn: int, body: dict[str, Any]) -> None:
        """The model's items, a call that it might have made, and the call's output."""
        kept = [item | {"status": "completed"} for item in body["output"] if item["type"] in ("message", "reasoning")]
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "read", "arguments": f'{{"page": {turn}}}'}
        output = {"type": "function_call_output", "call_id": f"c{turn}", "output": f"Page {turn}. {TEXT}"}
        self.input += [*kept, call, output, {"role": "user", "content": f"Go on with {turn}."}]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_agent_sessions_stay_on_their_pod_with_exact_predictions(fleet: LiveFleet, stream: bool) -> None:
    """Ten interleaved sessions of ten turns, with reasoning low, off, or not mentioned."""
    efforts = (None, "low", "none")
    sessions = [ResponsesSession(f"{n}-{stream}", efforts[n % len(efforts)]) for n in range(SESSIONS)]
    async with fleet.openai_sdk() as client:
        check_sessions(await take_turns(sessions, TURNS, partial(ask, client, stream=stream)))


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_follow_ups_find_the_pod_that_stored_the_response(fleet: LiveFleet, stream: bool) -> None:
    """Chains of responses at once, each link over a new connection."""

    async def chain(n: int) -> str:
        previous: dict[str, Any] = {}
        pods = set()
        for turn in range(3):
            async with fleet.openai_sdk() as client:
                fields = {"input": f"Note {n} {turn} {stream}. {BOOK}", **previous}
                answer = await ask(client, fields, stream=stream)
                found = await client.responses.with_raw_response.retrieve(answer.body["id"])
            assert found.parse().id == answer.body["id"]
            assert found.headers["x-warmroute-pod"] == answer.pod
            pods.add(answer.pod)
            previous = {"previous_response_id": answer.body["id"]}
        (pod,) = pods
        return pod

    async with asyncio.timeout(DEADLINE_S):
        assert len(set(await asyncio.gather(*map(chain, range(12))))) == 2


async def test_background_responses_are_polled_and_cancelled_on_their_pod(fleet: LiveFleet) -> None:
    """Until they are complete."""
    async with fleet.openai_sdk() as client, asyncio.timeout(DEADLINE_S):
        begun = [
            await client.responses.create(model="tiny", input=f"Sum {n}", max_output_tokens=8, background=True)
            for n in range(6)
        ]
        for each in begun:
            while (await client.responses.retrieve(each.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        long = await client.responses.create(model="tiny", input="Long", max_output_tokens=4000, background=True)
        assert (await client.responses.cancel(long.id)).status == "cancelled"


async def test_an_unknown_response_is_a_404_that_says_why(fleet: LiveFleet) -> None:
    """As a path and as a previous response."""
    async with fleet.openai_sdk() as client:
        with pytest.raises(openai.NotFoundError, match="not known here"):
            await client.responses.retrieve("resp_never")
        with pytest.raises(openai.NotFoundError, match="whole conversation") as caught:
            await ask(client, {"input": "Hi", "previous_response_id": "resp_never"}, stream=False)
    assert caught.value.param == "previous_response_id"


async def test_a_killed_pod_costs_no_unstreamed_response(fleet: LiveFleet) -> None:
    """One of two pods is killed at work: every stateless request is answered, and what the pod stored is lost."""
    async with fleet.openai_sdk() as client:
        stored = await asyncio.gather(*(ask(client, {"input": f"Keep {n}"}, stream=False) for n in range(16)))
        storm = [ResponsesSession(f"storm {n}", None).asked(0) | {"max_output_tokens": 200} for n in range(16)]
        asked = [asyncio.create_task(ask(client, fields, stream=False)) for fields in storm]
        killed, other = await fleet.kill_a_busy_pod()
        answers = await asyncio.gather(*asked)
        assert other in {answer.pod for answer in answers}
        lost = next(answer.body["id"] for answer in stored if answer.pod == killed)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.retrieve(lost)
    assert caught.value.status_code in (404, 502, 503)
