"""A pod is trusted with broken streams once it has continued an answer of its own exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.feeds.self_test import ContinuationTest, SelfTestTiming
from router.fleet.fleet import PodEvent
from router.request.continuation.answer_words import AnswerWords, answer_words
from router.types import Endpoint, Pod
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import watched
from tests.kit.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
ANSWER = "one, two, three, four, five"
BOTH = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})


def text_of(ids: Sequence[int], _special: bool) -> str:
    return "".join(map(chr, ids))


class World:
    """A vLLM pod with a tokenizer of characters, and the feed that tests it."""

    def __init__(self, network: Any, pod: Pod) -> None:
        self.fleet, self.bodies = fleet_of(pod), list[dict[str, Any]]()
        self.fleet.describe("a", models=("m",), version="0.32.0")
        network["a"].answers |= dict.fromkeys([one.value for one in BOTH], self.answer)
        self.takes_ids = self.writes_the_same = self.sends_ids = True
        self.stalls = 0
        """The next answers of this number are sent as one event each."""
        self.words: AnswerWords | None = answer_words(text_of, lambda _: None)
        timing = SelfTestTiming(0.001, 0.05, 0.05)
        self.feed = ContinuationTest(self.fleet, network.post, lambda _model: self.words, timing)

    @property
    def now(self) -> Pod:
        return self.fleet.snapshot.pods[0].pod

    def answer(self, request: httpx.Request) -> bytes:
        body = json.loads(request.content)
        self.bodies.append(body)
        is_chat = "messages" in body
        given = body.get("kv_transfer_params", {}).get("prompt_token_ids") if is_chat else body["prompt"]
        if not isinstance(given, list) or not self.takes_ids:
            given = [7, 8, 9]
        elif not self.writes_the_same:
            return self.stream(given, "0" * body["max_tokens"], is_chat=is_chat)
        begin = len(given) - 3
        return self.stream(given, ANSWER[begin : begin + body["max_tokens"]], is_chat=is_chat)

    def stream(self, given: list[int], text: str, *, is_chat: bool) -> bytes:
        parts = [text] if self.stalls > 0 else list(text)
        self.stalls -= 1
        events: list[dict[str, Any]] = [{"choices": [self.choice(one, is_chat=is_chat)]} for one in parts]
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        first: dict[str, Any] = {"choices": [role]} if is_chat else events[0]
        (first if is_chat else first["choices"][0])["prompt_token_ids"] = given
        events[-1]["choices"][0]["finish_reason"] = "length"
        sent = [first, *events] if is_chat else events
        return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in sent) + b"data: [DONE]\n\n"

    def choice(self, said: str, *, is_chat: bool) -> dict[str, Any]:
        text: dict[str, Any] = {"delta": {"content": said}} if is_chat else {"text": said}
        return {
            "index": 0,
            **text,
            "finish_reason": None,
            "token_ids": list(map(ord, said)) if self.sends_ids else None,
        }


@pytest.fixture
def world(network: Any) -> World:
    return World(network, make_pod("a"))


async def test_a_pod_that_continues_its_own_answer_is_trusted(world: World) -> None:
    """Two requests at each endpoint; the second begins with the ids of a part of the first answer."""
    assert await world.feed.test(world.now)
    assert world.now.continues == BOTH
    asked = world.bodies[1]["kv_transfer_params"]["prompt_token_ids"]
    assert asked[:3] == [7, 8, 9] and ANSWER.startswith(text_of(asked[3:], False)) and len(asked) > 5
    assert [body["max_tokens"] for body in world.bodies[:2]] == [16, 16 - len(asked) + 3]


@pytest.mark.parametrize("stalls", [1, 2])
async def test_an_answer_in_a_single_event_proves_nothing_and_is_asked_for_again(world: World, stalls: int) -> None:
    """A server that stands still while its engine goes on sends all tokens at once."""
    world.stalls = stalls
    assert await world.feed.test(world.now)
    assert (world.now.continues, len(world.bodies)) == (BOTH, 4 + stalls)


@pytest.mark.parametrize("fault", ["takes_ids", "writes_the_same", "sends_ids"])
async def test_a_pod_that_does_not_is_named_once_and_tested_again(world: World, fault: str) -> None:
    setattr(world, fault, False)
    with capture_logs() as logs:
        async with running(watched(world.fleet, world.feed.check)):
            await until(lambda: len(world.bodies) > 12)
            assert world.now.continues == frozenset()
            setattr(world, fault, True)
            await until(lambda: world.now.continues == BOTH)
    (named,) = [log for log in logs if log["event"] == "pod does not continue streams"]
    assert all(named["reasons"].values())


async def test_a_restarted_pod_has_to_show_it_again(world: World) -> None:
    async with running(watched(world.fleet, world.feed.check)):
        await until(lambda: world.now.continues == BOTH)
        world.takes_ids = False
        world.fleet.restarted("a")
        assert world.now.continues == frozenset()
        asked = len(world.bodies)
        await until(lambda: len(world.bodies) > asked + 1)
        assert world.now.continues == frozenset()


async def test_a_chat_that_fails_leaves_completions(world: World, network: Any) -> None:
    del network["a"].answers[Endpoint.CHAT.value]
    assert not await world.feed.test(world.now)
    assert world.now.continues == {Endpoint.COMPLETIONS}


@pytest.mark.parametrize("why", ["an old release", "no tokenizer", "not ready"])
async def test_other_pods_are_not_asked(world: World, why: str) -> None:
    if why == "an old release":
        world.fleet.describe("a", models=("m",), version="0.26.1")
    elif why == "no tokenizer":
        world.words = None
    else:
        world.fleet.event("a", PodEvent.EJECT)
    turns = count()
    async with running(watched(world.fleet, world.feed.check)):
        await until(lambda: next(turns) > 5)
    assert not world.bodies


@pytest.mark.parametrize("more", [b"\n\n" * 200, b": " + b"a" * 40_000 + b"\n\n"], ids=["events", "bytes"])
async def test_an_answer_that_is_too_long_is_not_read(world: World, network: Any, more: bytes) -> None:
    """It has 16 tokens; more would hold the event loop."""
    network["a"].answers |= dict.fromkeys([one.value for one in BOTH], lambda request: more + world.answer(request))
    with capture_logs() as logs:
        assert not await world.feed.test(world.now)
    assert world.now.continues == frozenset()
    assert all("at most" in reason for reason in logs[0]["reasons"].values())
