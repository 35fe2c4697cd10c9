"""A client reads its stream to the end although its pod does not write it to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import anthropic
import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.load import shipped
from router.config.schema import ContinuationConfig
from router.types import Endpoint
from tests.stories.conftest import SLOW, Deploy, Deployment, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- streams of any kind ---


ON = ContinuationConfig(enabled=True, silence_s=1.0)
BOTH = {Endpoint.CHAT, Endpoint.COMPLETIONS}


async def proven(deployment: Deployment) -> None:
    await deployment.until(lambda: all(one.pod.continues == BOTH for one in deployment.program.fleet.snapshot.pods))


async def text_of(deployment: Deployment, **fields: Any) -> str:
    """What a client reads of a sampled stream. Fails where it is not whole."""
    body = {"model": "demo", "messages": opening("tides"), "max_tokens": 30, "stream": True, **fields}
    answer = await deployment.client.post("/v1/chat/completions", json=body)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), answer.text[-500:]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def continued(deployment: Deployment) -> list[str]:
    """The continuations that the router has counted."""
    page = (await deployment.admin.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("warmroute_continuations_total{")]
    return [line for line in lines if not line.endswith(" 0.0")]


async def test_pods_show_at_join_that_they_continue_streams(deploy: Deploy) -> None:
    async with deploy(continuation=ON) as deployment:
        await proven(deployment)
        assert [set(pod["continues"]) for pod in await deployment.pods()] == [BOTH, BOTH]
    async with deploy(continuation=ContinuationConfig(enabled=False)) as deployment:
        assert [pod["continues"] for pod in await deployment.pods()] == [[], []]


@pytest.mark.parametrize("kind", [FaultKind.DIE, FaultKind.TERMINATE])
async def test_stream_of_a_pod_that_fails_is_read_to_its_end(deploy: Deploy, kind: FaultKind) -> None:
    """All other ways to fail: `tests/request/continuation/test_any_fault.py`."""
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await proven(deployment)
        expected = await text_of(deployment)
        for engine in deployment.engines:
            engine.inject(Fault(kind=kind, after_chunks=20))
        assert await text_of(deployment) == expected
        counted = "".join(await continued(deployment))
        assert 'method="ids"' in counted and 'method="none"' not in counted


async def test_drained_pod_hands_its_streams_over_and_is_idle(deploy: Deploy) -> None:
    """It is well: the client reads one answer, and no failure is counted."""
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await proven(deployment)
        expected = await text_of(deployment, max_tokens=150)
        reading = asyncio.create_task(text_of(deployment, max_tokens=150))
        await deployment.until(lambda: any(engine.load.running for engine in deployment.engines))
        (engine,) = [one for one in deployment.engines if one.load.running]
        pod = engine.url.removeprefix("http://")
        assert (await deployment.admin.post(f"/admin/pods/{pod}/drain", json={})).status_code == 200
        await deployment.until(lambda: not engine.load.running)
        assert not reading.done()
        assert await reading == expected
        (counted,) = await continued(deployment)
        assert 'method="ids"' in counted and 'cause="moved"' in counted and 'outcome="joined"' in counted


async def events_of(deployment: Deployment, path: str, fault: Fault | None, **fields: Any) -> list[dict[str, Any]]:
    """The events that a client reads of a stream of named ones. `fault`: of the pod that has
    just served the same request."""
    body = {"model": "demo", "stream": True, "temperature": 0, **fields}
    answer = await deployment.client.post(path, json=body)
    if fault is not None:
        (engine,) = [one for one in deployment.engines if one.url.endswith(answer.headers["x-warmroute-pod"])]
        engine.inject(fault)
        answer = await deployment.client.post(path, json=body)
    return [json.loads(event.partition("data: ")[2]) for event in answer.text.split("\n\n") if "data: " in event]


def said(events: list[dict[str, Any]]) -> list[Any]:
    """What events say, without ids: their kinds, one text for deltas behind each other, and the usage."""
    steps: list[Any] = []
    for event in events:
        delta = event.get("delta")
        if isinstance(delta, dict):
            delta = next((delta[name] for name in ("text", "thinking", "partial_json") if name in delta), None)
        if isinstance(delta, str) and steps and steps[-1][0] == event["type"]:
            steps[-1][1] += delta
        else:
            steps.append([event["type"], delta])
    usage = events[-2].get("usage") or events[-1]["response"]["usage"]
    return [*steps, usage["output_tokens"]]


async def test_pod_that_never_begins_its_response_is_replaced_once_it_is_not_ready(deploy: Deploy) -> None:
    """It accepts the request and sends nothing, and health checks fail."""
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await proven(deployment)
        expected = await text_of(deployment)
        for engine in deployment.engines:
            engine.inject(Fault(kind=FaultKind.HANG))
        reading = asyncio.create_task(text_of(deployment))
        await deployment.until(lambda: any(not engine.faults.armed for engine in deployment.engines))
        (hanging,) = [engine for engine in deployment.engines if not engine.faults.armed]
        for engine in deployment.engines:
            engine.faults.clear()
        hanging.inject(Fault(kind=FaultKind.UNHEALTHY, count=None))
        assert await reading == expected


PROMPT = f"{' '.join(map(str, range(300)))}\nthink: It is the tide 🌊 of the sea.\nsay: I look up the tides.\n"
PROMPT += 'tool_call: look {"place": "Köln 😀", "days": [1, 2]}'
SCHEMA = {"type": "object", "properties": {}}
AGENTS: list[Any] = [
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": PROMPT}], "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
    ("/v1/responses", {"input": PROMPT, "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}),
    ("/v1/messages", {"messages": opening("tides"), "thinking": {"type": "disabled"}}),
    ("/v1/responses", {"input": " ".join(map(str, range(300)))}),
]


@pytest.mark.parametrize(("path", "fields"), AGENTS[:2], ids=["messages", "responses"])
async def test_greedy_stream_of_an_agent_is_read_to_its_end(deploy: Deploy, path: str, fields: dict[str, Any]) -> None:
    if path == "/v1/messages":
        fields = {"max_tokens": 100, **fields}
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await proven(deployment)
        expected = said(await events_of(deployment, path, None, **fields))
        events = await events_of(deployment, path, Fault(kind=FaultKind.CORE_DIES, after_chunks=12), **fields)
        assert said(events) == expected
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            begun, ended = events[0]["response"], events[-1]["response"]
            assert (begun["id"], begun["created_at"]) == (ended["id"], ended["created_at"])
            items = {event["item_id"] for event in events if "item_id" in event}
            assert items == {item["id"] for item in ended["output"]}
        counted = "".join(await continued(deployment))
        assert 'method="replay"' in counted and 'method="none"' not in counted


def policies_that_hold(folder: Path, *, holds: bool) -> Path:
    policy = "name: agents\nabout: Agents\nextends: cost_aware\nmatch: {}\n"
    policy += f"continuation: {{hold_tool_calls: {str(holds).lower()}}}\n"
    copytree(shipped("policies"), folder, dirs_exist_ok=True)
    (folder / "agents.yaml").write_text(policy)
    return folder


@pytest.mark.parametrize("holds", [True, False])
async def test_sampled_call_that_a_policy_holds_until_it_is_whole_is_not_lost(
    deploy: Deploy, tmp_path: Path, holds: bool
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "tools": [tool], "stream": True}
    async with deploy(continuation=ON, engine=SLOW, policies=policies_that_hold(tmp_path, holds=holds)) as deployment:
        await proven(deployment)
        first = await deployment.client.post("/v1/chat/completions", json=body)
        announced = "yes" if holds else "until=tool-call"
        assert first.headers["x-warmroute-continuable"] == announced
        (engine,) = [one for one in deployment.engines if one.url.endswith(first.headers["x-warmroute-pod"])]
        place = len(chunks_of(first.text)) - 8
        engine.inject(Fault(kind=FaultKind.DIE, after_chunks=place))
        second = await deployment.client.post("/v1/chat/completions", json=body)
        assert (calls_of(second.text) == calls_of(first.text)) == holds
        counted = "".join(await continued(deployment))
        assert ('method="ids"' if holds else 'outcome="tool call"') in counted


def chunks_of(answer: str) -> list[Any]:
    events = [event.removeprefix("data: ") for event in answer.split("\n\n") if event.startswith("data: {")]
    return [json.loads(event)["choices"] for event in events]


def calls_of(answer: str) -> list[str]:
    """Names and arguments, and the reason to stop."""
    said = []
    for choices in chunks_of(answer):
        for call in choices[0]["delta"].get("tool_calls") or ():
            said += [call["function"].get("name", ""), call["function"].get("arguments", "")]
        said.append(choices[0]["finish_reason"] or "")
    return ["".join(said)]


async def as_chats(deployment: Deployment) -> None:
    """Wait until pods are known to continue chats, and to read messages as the router does."""
    await proven(deployment)
    fleet = deployment.program.fleet
    await deployment.until(lambda: all(one.pod.reads_alike(Endpoint.MESSAGES) for one in fleet.snapshot.pods))


MESSAGE = {"model": "demo", "max_tokens": 100, "stream": True, **AGENTS[0][1]}
"""Sampled: with reasoning, text and a call."""


async def test_sampled_message_is_read_to_its_end(deploy: Deploy) -> None:
    """The pod is asked for a chat. The client reads the message that the pod would have written itself."""
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await as_chats(deployment)
        expected = said(await events_of(deployment, "/v1/messages", None, **MESSAGE, temperature=0))
        uncut = await deployment.client.post("/v1/messages?beta=true", json=MESSAGE)
        assert uncut.headers["x-warmroute-continuable"] == "until=tool-call"
        events = await events_of(
            deployment, "/v1/messages", Fault(kind=FaultKind.DIE, after_chunks=12), **MESSAGE, temperature=1
        )
        assert said(events) == expected
        assert len({event["message"]["id"] for event in events if "message" in event}) == 1
        counted = "".join(await continued(deployment))
        assert 'method="ids"' in counted and 'method="none"' not in counted


async def test_error_of_a_message_that_is_asked_for_as_a_chat_is_that_of_a_message(deploy: Deploy) -> None:
    async with deploy(continuation=ON) as deployment:
        await as_chats(deployment)
        too_long = {**MESSAGE, "max_tokens": 1_000_000}
        answer = await deployment.client.post("/v1/messages", json=too_long)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        greedy = await deployment.client.post(
            "/v1/messages", json={**MESSAGE, "max_tokens": 1_000_000, "temperature": 0}
        )
        assert answer.json() == greedy.json()
        assert answer.json()["error"]["type"] == "BadRequestError"


# --- the official SDKs ---


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


def read_by_sdk(value: Any) -> Any:
    """What an SDK has made of a stream, without ids, times and what depends on a cache."""
    if isinstance(value, list):
        return [read_by_sdk(one) for one in value]
    if isinstance(value, dict):
        return {name: read_by_sdk(one) for name, one in value.items() if name not in _VARIES}
    return read_by_sdk(value.model_dump()) if hasattr(value, "model_dump") else value


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
        expected, (number,) = read_by_sdk(await calling), busy
        engine = deployment.engines[number]
        engine.inject(Fault(kind=FaultKind.DIE, after_chunks=12))
        assert read_by_sdk(await call(at)) == expected
        assert not engine.faults.armed, "its pod was not killed"
        counted = await continued(deployment)
        assert 'method="none"' not in "".join(counted)
        assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 1
