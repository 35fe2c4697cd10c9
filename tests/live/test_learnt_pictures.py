"""Chats with pictures on a real vLLM pod whose tokens for a picture the router does not compute, but learns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.live.engines import BLOCK_TOKENS, HOME, start_vision
from tests.live.live_fleet import live_fleet
from tests.live.picture_bodies import SIZES, TEXT, Body, base64_picture, image_url, opening, text
from tests.live.router_process import await_pictures
from tests.live.test_pictures import ask

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

CHAT = "/v1/chat/completions"
TURNS = 6
DEADLINE_S = 240.0


@pytest.fixture(scope="module", params=["tiny-idefics3"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router that has learnt the pictures of its self-test. Takes two minutes on two cores."""
    weights = request.param
    start, folder = partial(start_vision, weights=Path(weights)), tmp_path_factory.mktemp(weights)
    config = {"probes": {"self_test_interval_s": 1.0}}
    with live_fleet(weights, folder, HOME / "model" / weights, start, pods=1, config=config) as fleet:
        await_pictures(fleet.admin_url)
        yield fleet.url


async def test_a_growing_chat_is_soon_predicted_exactly(url: str) -> None:
    """Every turn has a picture of its own, of another size; the prediction never exceeds what the engine has cached."""
    chat: list[Body] = [{"role": "system", "content": TEXT * 3}]
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        for turn in range(TURNS):
            shown = image_url(base64_picture(950 + turn, *SIZES[turn % len(SIZES)]))
            chat.append({"role": "user", "content": [text(f"Page {turn}: "), shown, text(TEXT * 2)]})
            answers = [await ask(client, CHAT, messages=chat)]
            while answers[-1].predicted < (answers[-1].prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
                answers.append(await ask(client, CHAT, messages=chat))
            print([(answer.predicted, answer.reported, answer.prompt) for answer in answers])
            assert all(answer.predicted <= answer.reported for answer in answers)
            assert answers[-1].predicted == answers[-1].reported
            chat.append({"role": "assistant", "content": f"A boat. {TEXT}"})


async def test_the_same_text_with_another_picture_is_matched_by_its_text_alone(url: str) -> None:
    """Although it has the same size, and so the same tokens."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        again = await ask(client, CHAT, messages=opening(base64_picture(971)))
        while again.predicted < (again.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
            again = await ask(client, CHAT, messages=opening(base64_picture(971)))
        other = await ask(client, CHAT, messages=opening(base64_picture(972)))
    assert again.predicted == again.reported
    assert 0 < other.predicted == other.reported <= 96 < again.reported
