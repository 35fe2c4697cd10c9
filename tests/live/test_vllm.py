"""The router predicts the caches of real vLLM pods block for block, and loses no request when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.router_process import router

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-llama"
TEXT = "The harbour master writes down every boat that comes in, its name and its cargo. "
Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two vLLM pods and a router in front."""

    pods: list[EngineProcess]
    url: str
    admin_url: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started once; takes about a minute on two cores."""
    with ThreadPoolExecutor(2) as threads:
        pods = list(threads.map(lambda n: start_vllm(f"live-{n}", 18011 + n, MODEL, kv_port=15561 + n), range(2)))
    config = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
        "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
    }
    try:
        with router(tmp_path_factory.mktemp("vllm"), config) as urls:
            yield Fleet(pods, urls.public, urls.admin)
    finally:
        for pod in pods:
            pod.kill()


@dataclass(slots=True)
class Answer:
    """Result of one turn."""

    pod: str
    predicted: int
    reported: int
    text: str


def sdk(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


async def ask(client: openai.AsyncOpenAI, chat: Chat, *, stream: bool = False, max_tokens: int = 12) -> Answer:
    """One turn through the SDK, with the router's headers."""
    asked: dict[str, Any] = {"model": "tiny", "messages": chat, "max_tokens": max_tokens, "temperature": 0}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = await client.chat.completions.with_raw_response.create(**asked)
    parsed: Any = raw.parse()
    text, usage = "", None
    if stream:
        async for chunk in parsed:
            usage = chunk.usage or usage
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    else:
        text, usage = parsed.choices[0].message.content or "", parsed.usage
    assert usage is not None
    reported = usage.prompt_tokens_details.cached_tokens or 0
    return Answer(raw.headers["x-warmroute-pod"], int(raw.headers["x-warmroute-cached-tokens"]), reported, text)


def opening(topic: str) -> Chat:
    return [
        {"role": "system", "content": f"You keep the book of {topic}. " + TEXT * 12},
        {"role": "user", "content": f"Read out page {topic}."},
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_sessions_stay_on_their_pod_with_exact_predictions(fleet: Fleet, stream: bool) -> None:
    """Four interleaved conversations of five turns: one pod each, and exact predictions."""
    topics = [f"{topic}-{stream}" for topic in ("north", "south", "east", "west")]
    chats = {topic: opening(topic) for topic in topics}
    answers: dict[str, list[Answer]] = {topic: [] for topic in topics}
    async with sdk(fleet) as client:
        for turn in range(5):
            for topic, chat in chats.items():
                answer = await ask(client, chat, stream=stream)
                answers[topic].append(answer)
                chat += [
                    {"role": "assistant", "content": answer.text},
                    {"role": "user", "content": f"Go on with {turn}. {TEXT}"},
                ]
    for topic, turns in answers.items():
        print(topic, [(turn.pod[-5:], turn.predicted, turn.reported) for turn in turns])
        assert len({turn.pod for turn in turns}) == 1
        assert [turn.predicted for turn in turns] == [turn.reported for turn in turns]
        assert turns[-1].reported > turns[0].reported


async def test_a_repeated_prompt_is_predicted_to_its_last_whole_block(fleet: Fleet) -> None:
    """Engines recompute the last block of a prompt that is fully cached."""
    async with sdk(fleet) as client:
        answers = [await ask(client, opening("repeat")) for _ in range(3)]
    assert [answer.predicted for answer in answers] == [answer.reported for answer in answers]
    assert answers[2].reported > 0


async def test_a_killed_pod_costs_no_unstreamed_request(fleet: Fleet) -> None:
    """One of two busy pods is killed: every request is answered, and later ones go to the other."""
    async with sdk(fleet) as client:
        asked = [asyncio.create_task(ask(client, opening(f"storm {number}"), max_tokens=200)) for number in range(16)]
        await _both_run(fleet)
        fleet.pods[0].kill()
        answers = await asyncio.gather(*asked)
        assert len(answers) == 16
        assert any(answer.pod.endswith("18011") for answer in answers) or {a.pod for a in answers} == {
            "127.0.0.1:18012"
        }
        after = [await ask(client, opening(f"calm {number}")) for number in range(4)]
    assert {answer.pod for answer in after} == {"127.0.0.1:18012"}


async def _both_run(fleet: Fleet) -> None:
    import httpx

    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            pods = (await client.get(f"{fleet.admin_url}/admin/pods")).json()
            if all(pod["in_flight"] for pod in pods):
                return
            await asyncio.sleep(0.02)


def test_the_models_are_installed() -> None:
    """A message before half a minute of waiting."""
    assert Path(MODEL).is_dir(), "run tests/live/install.sh (or `make live`)"
