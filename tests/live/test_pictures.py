"""Chats with pictures on real vLLM pods with tiny models: every count of cached tokens is predicted exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.engines import BLOCK_TOKENS, HOME, start_vision
from tests.live.live_fleet import Answer, answer_of, live_fleet, take_turns
from tests.live.picture_bodies import KINDS, SIZES, TEXT, Body, base64_picture, image_url, opening, text
from tests.live.router_process import await_pictures

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

SESSIONS = 10
TURNS = 5
DEADLINE_S = 240.0


@pytest.fixture(scope="module", params=[("tiny-qwen2-vl", 2), ("tiny-qwen2.5-vl", 1), ("tiny-qwen3-vl", 1)], ids=str)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router that has proven how its pods identify pictures. Started once for each model; takes two minutes on two
    cores."""
    weights, pods = request.param
    endpoints, folder = ["/v1/messages", "/v1/responses"], tmp_path_factory.mktemp(weights)
    start = partial(start_vision, weights=Path(weights))
    with live_fleet(weights, folder, HOME / "model" / weights, start, pods=pods, endpoints=endpoints) as fleet:
        await_pictures(fleet.admin_url)
        yield fleet.url


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> Answer:
    """Send a body, and compare the router's headers with the engine's usage."""
    most = {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 4}
    raw = await client.post(path, json={"model": "tiny", "temperature": 0, **most, **fields})
    assert raw.status_code == 200, raw.text
    return answer_of(raw.headers, raw.json())


class PictureSession:
    """A chat in which every turn has a picture of its own."""

    def __init__(self, number: int) -> None:
        self.name = f"chat {number}"
        self.number = number
        self.chat: list[Body] = [{"role": "system", "content": f"Session {number}. {TEXT * 3}"}]

    def asked(self, turn: int) -> Body:
        kind, mode = KINDS[self.number % len(KINDS)]
        shown = image_url(base64_picture(100 * self.number + turn, *SIZES[turn % len(SIZES)], kind, mode))
        self.chat.append({"role": "user", "content": [text(f"Page {turn}: "), shown, text(TEXT * 2)]})
        return {"messages": self.chat}

    def answered(self, turn: int, body: Body) -> None:
        """With a fixed text: the model's own would be random."""
        self.chat.append({"role": "assistant", "content": f"A boat. {TEXT}"})


async def test_sessions_with_pictures_stay_and_are_predicted_exactly(url: str) -> None:
    """Interleaved chats with pictures of all formats: exact predictions on every turn."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        sessions = await take_turns(
            [PictureSession(number) for number in range(SESSIONS)],
            TURNS,
            lambda fields: ask(client, "/v1/chat/completions", **fields),
        )
    for turns in sessions.values():
        print([(turn.pod[-5:], turn.predicted, turn.reported, turn.prompt) for turn in turns])
        assert [turn.predicted for turn in turns] == [turn.reported for turn in turns]
        for before, after in pairwise(turns):
            assert after.reported > before.prompt - BLOCK_TOKENS or after.pod != before.pod


async def test_the_same_text_with_another_picture_is_matched_by_its_text_alone(url: str) -> None:
    """The same picture again is matched to the last whole block."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        first, again, other = [
            await ask(client, "/v1/chat/completions", messages=opening(base64_picture(number)))
            for number in (901, 901, 902)
        ]
    assert [answer.predicted for answer in (first, again, other)] == [a.reported for a in (first, again, other)]
    assert again.reported == (again.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert 0 < other.reported <= 96 < again.reported


async def test_a_uuid_of_a_client_changes_nothing(url: str) -> None:
    """Pods do not receive it."""
    named = opening(base64_picture(905))
    named[1]["content"][1]["uuid"] = "theirs"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        await ask(client, "/v1/chat/completions", messages=opening(base64_picture(905)))
        answer = await ask(client, "/v1/chat/completions", messages=named)
        named[1]["content"][1]["image_url"] = None
        refused = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": named})
    assert answer.predicted == answer.reported == (answer.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1].content[1].uuid")


async def test_messages_and_responses_with_pictures_are_predicted_exactly(url: str) -> None:
    """Pictures in questions and in results of tools."""
    source = {"type": "base64", "media_type": "image/png", "data": base64_picture(903)}
    asked = {"role": "user", "content": [{"type": "image", "source": source}, text(TEXT)]}
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    seen = [asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result, text(TEXT)]}]
    shown = [
        {"type": "input_image", "image_url": f"data:;base64,{base64_picture(904)}"},
        {"type": "input_text", "text": TEXT},
    ]
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        answers = [await ask(client, "/v1/messages", messages=chat) for chat in ([asked], [asked], seen, seen)]
        body = {"input": [{"role": "user", "content": shown}], "store": False}
        answers += [await ask(client, "/v1/responses", **body) for _ in range(2)]
    print([(answer.predicted, answer.reported, answer.prompt) for answer in answers])
    assert [answer.predicted for answer in answers] == [answer.reported for answer in answers]
    assert all(answer.reported > 128 for answer in (answers[1], answers[3], answers[5]))
