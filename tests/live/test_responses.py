"""Agent sessions over `/v1/responses` of real vLLM pods: predicted block for block; stored responses find their pod."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.router_process import await_conversions, router

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
SESSIONS = 20
TURNS = 10
DEADLINE_S = 120.0
BOOK = 150
"""Sentences of a prompt: its cache is then worth more than a pod that is less busy for a while."""
TEXT = "The harbour master writes down every boat that comes in, its name and its cargo. "
SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "description": f"read a page. {TEXT}", "parameters": SCHEMA, "strict": True},
    {"type": "custom", "name": "shell", "description": "Runs a command."},
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two vLLM pods that store responses, and a router in front."""

    pods: list[EngineProcess]
    url: str
    admin_url: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started once; takes about a minute on two cores."""
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}

    def start(n: int) -> EngineProcess:
        return start_vllm(f"responses-{n}", 18041 + n, MODEL, kv_port=15591 + n, extra_args=FLAGS, environment=stores)

    with ThreadPoolExecutor(2) as threads:
        pods = list(threads.map(start, range(2)))
    config = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
        "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
        "listen": {"workers": 2},
    }
    try:
        with router(tmp_path_factory.mktemp("responses"), config) as urls:
            await_conversions(urls.admin, "/v1/responses")
            yield Fleet(pods, urls.public, urls.admin)
    finally:
        for pod in pods:
            pod.kill()


@dataclass(slots=True)
class Answer:
    """Result of one turn."""

    id: str
    pod: str
    predicted: int
    reported: int
    prompt: int
    items: list[dict[str, Any]]


def sdk(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **asked: Any) -> Answer:
    """One turn through the SDK, with the router's headers."""
    asked = {"model": "tiny", "max_output_tokens": 12, "temperature": 0, **asked}
    if stream:
        async with client.responses.with_streaming_response.create(**asked, stream=True) as raw:
            headers = raw.headers
            *_, last = [event async for event in await raw.parse()]
            response = last.response
    else:
        whole = await client.responses.with_raw_response.create(**asked)
        response, headers = whole.parse(), whole.headers
    usage = response.usage
    return Answer(
        response.id,
        headers["x-warmroute-pod"],
        int(headers["x-warmroute-cached-tokens"]),
        usage.input_tokens_details.cached_tokens,
        usage.input_tokens,
        [item.model_dump(exclude_none=True) for item in response.output],
    )


class Session:
    """One agent: instructions, tools, reasoning, calls and their outputs, messages of the developer."""

    def __init__(self, name: str, effort: str | None) -> None:
        self.name = name
        self.fields: dict[str, Any] = {
            "tools": TOOLS,
            "instructions": f"You keep the book of {name}. " + TEXT * BOOK,
            "store": False,
        }
        if effort:
            self.fields["reasoning"] = {"effort": effort}
        self.input: list[dict[str, Any]] = [{"role": "user", "content": f"Begin with {name}."}]

    def asked(self) -> dict[str, Any]:
        return self.fields | {"input": self.input}

    def answered(self, turn: int, items: list[dict[str, Any]]) -> None:
        """The model's items, a call that it might have made, and the call's output."""
        kept = [item | {"status": "completed"} for item in items if item["type"] in ("message", "reasoning")]
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "read", "arguments": f'{{"page": {turn}}}'}
        output = {"type": "function_call_output", "call_id": f"c{turn}", "output": f"Page {turn}. {TEXT}"}
        self.input += [*kept, call, output, {"role": "user", "content": f"Go on with {turn}."}]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_agent_sessions_stay_on_their_pod_with_exact_predictions(fleet: Fleet, stream: bool) -> None:
    """Ten interleaved sessions of ten turns, with reasoning low, off, or not mentioned."""
    efforts = (None, "low", "none")
    sessions = [Session(f"{n}-{stream}", efforts[n % len(efforts)]) for n in range(SESSIONS // 2)]
    answers: dict[str, list[Answer]] = {session.name: [] for session in sessions}
    async with sdk(fleet) as client:
        for turn in range(TURNS):
            for session in sessions:
                answer = await ask(client, stream=stream, **session.asked())
                answers[session.name].append(answer)
                session.answered(turn, answer.items)
    wrong = [(n, t, a) for n, turns in answers.items() for t, a in enumerate(turns) if a.predicted != a.reported]
    cached = sum(answer.reported for turns in answers.values() for answer in turns)
    asked = sum(answer.prompt for turns in answers.values() for answer in turns)
    print(f"{len(sessions)} sessions of {TURNS} turns: {cached} of {asked} tokens cached")
    assert wrong == []
    moved = sum(one.pod != next_.pod for turns in answers.values() for one, next_ in pairwise(turns))
    assert moved <= 0.05 * len(sessions) * TURNS  # a pod that a busy machine slows down may lose some
    assert cached > 0.7 * asked


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_follow_ups_find_the_pod_that_stored_the_response(fleet: Fleet, stream: bool) -> None:
    """Chains of responses at once, each link over a new connection, which may reach the other worker."""

    async def chain(n: int) -> str:
        previous: dict[str, Any] = {}
        pods = set()
        for turn in range(3):
            async with sdk(fleet) as client:
                answer = await ask(client, stream=stream, input=f"Note {n} {turn} {stream}. {TEXT * BOOK}", **previous)
                found = await client.responses.with_raw_response.retrieve(answer.id)
            assert found.parse().id == answer.id
            assert found.headers["x-warmroute-pod"] == answer.pod
            pods.add(answer.pod)
            previous = {"previous_response_id": answer.id}
        (pod,) = pods
        return pod

    async with asyncio.timeout(DEADLINE_S):
        assert len(set(await asyncio.gather(*map(chain, range(12))))) == 2


async def test_background_responses_are_polled_and_cancelled_on_their_pod(fleet: Fleet) -> None:
    """Until they are complete."""
    async with sdk(fleet) as client, asyncio.timeout(DEADLINE_S):
        begun = [
            await client.responses.create(model="tiny", input=f"Sum {n}", max_output_tokens=8, background=True)
            for n in range(6)
        ]
        for each in begun:
            while (await client.responses.retrieve(each.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        long = await client.responses.create(model="tiny", input="Long", max_output_tokens=4000, background=True)
        assert (await client.responses.cancel(long.id)).status == "cancelled"


async def test_an_unknown_response_is_a_404_that_says_why(fleet: Fleet) -> None:
    """As a path and as a previous response."""
    async with sdk(fleet) as client:
        with pytest.raises(openai.NotFoundError, match="not known here"):
            await client.responses.retrieve("resp_never")
        with pytest.raises(openai.NotFoundError, match="whole conversation") as caught:
            await ask(client, stream=False, input="Hi", previous_response_id="resp_never")
    assert caught.value.param == "previous_response_id"


async def test_a_killed_pod_costs_no_unstreamed_response(fleet: Fleet) -> None:
    """One of two busy pods is killed: every stateless request is answered, and what the pod stored is lost."""
    async with sdk(fleet) as client:
        stored = await asyncio.gather(*(ask(client, stream=False, input=f"Keep {n}") for n in range(16)))
        killed = f"127.0.0.1:{httpx.URL(fleet.pods[0].url).port}"
        lost = next(answer.id for answer in stored if answer.pod == killed)
        bodies = [Session(f"storm {n}", None).asked() | {"max_output_tokens": 200} for n in range(16)]
        asked = [asyncio.create_task(ask(client, stream=False, **body)) for body in bodies]
        await _both_run(fleet)
        fleet.pods[0].kill()
        answers = await asyncio.gather(*asked)
        assert len(answers) == 16
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.retrieve(lost)
    assert caught.value.status_code in (404, 502, 503)


async def _both_run(fleet: Fleet) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            pods = (await client.get(f"{fleet.admin_url}/admin/pods")).json()
            if all(pod["in_flight"] for pod in pods):
                return
            await asyncio.sleep(0.02)
