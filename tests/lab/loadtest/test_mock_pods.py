"""The benchmark's mock pods stream what a real engine would stream, so that its loads measure what they say."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from loadtest.bench.hotpath import CHUNKS, TOKEN
from loadtest.bench.rig import BENCH, Mocks, build, mocks
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.feeds.self_test import ContinuationTest, SelfTestTiming
from router.request.continuation.answer_words import answer_words
from router.types import Endpoint, Pod
from tests.kit.scenes import fleet_of, make_pod

pytestmark = [
    pytest.mark.net,
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("cc") is None, reason="the mocks are written in C"),
]
CHAT: dict[str, Any] = {"model": "mock-model", "messages": [], "stream": True}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mocks]:
    with mocks(build(BENCH, tmp_path_factory.mktemp("bench")).mock, pods=1) as running:
        yield running


async def post(pods: Mocks, path: str, body: Mapping[str, Any]) -> bytes:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        return (await client.post(f"http://127.0.0.1:{pods.ports[0]}{path}", json=body)).content


def events(sent: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n")[:-2]]


@pytest.mark.parametrize(
    ("counts", "asked", "shown"),
    [
        (True, {"stream_options": {"include_usage": True}}, True),
        (True, {"stream_options": {"include_usage": False}}, False),
        (True, {}, False),
        (False, {"stream_options": {"include_usage": True}}, False),
    ],
)
async def test_usage_ends_a_stream_only_if_its_body_asks_for_it(
    pods: Mocks, counts: bool, asked: dict[str, Any], shown: bool
) -> None:
    """As the last event, without choices."""
    pods.configure(chunks=3, usage=counts)
    *said, last = events(await post(pods, Endpoint.CHAT, CHAT | asked))
    assert ("usage" in last, last["choices"] == []) == (shown, shown)
    assert len(said) == (3 if shown else 2)
    assert not any("usage" in event for event in said)


async def test_the_mocks_of_continued_streams_pass_the_routers_test_of_continuation(pods: Mocks) -> None:
    """They send no token ids to clients that do not ask."""
    tokenizer = mock_tokenizer()
    pods.configure(chunks=CHUNKS, token_id=tokenizer.encode(TOKEN, add_special_tokens=False)[0])
    fleet = fleet_of(make_pod("a"))
    fleet.describe("a", models=("mock-model",), version="0.32.0")
    words = answer_words(tokenizer.text_of, tokenizer.id_of)

    async def ask(_: Pod, path: str, body: Mapping[str, Any], _timeout_s: float) -> bytes:
        return await post(pods, path, body)

    feed = ContinuationTest(fleet, ask, lambda _: words, SelfTestTiming(30.0))
    assert await feed.test(fleet.snapshot.pods[0].pod)
    assert fleet.snapshot.pods[0].pod.continues == {Endpoint.CHAT, Endpoint.COMPLETIONS}
    assert b"token_ids" not in await post(pods, Endpoint.CHAT, CHAT)
