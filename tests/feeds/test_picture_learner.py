"""Pods are asked for the tokens of wanted pictures."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import httpx
import pytest

from router.feeds.self_test import MAX_PICTURE_BYTES, PictureLearner
from router.hashing import hash_array, token_array
from router.prompt.pictures.learnt import LearntPictures, Wanted
from router.prompt.pictures.picture_reader import PictureReader
from router.types import Endpoint, Generation, PrefixTrust, PromptPrefix
from tests.feeds.conftest import Network
from tests.policy.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
Running: TypeAlias = Callable[[Coroutine[Any, Any, None]], AbstractAsyncContextManager[None]]
Until: TypeAlias = Callable[[Callable[[], object]], Awaitable[None]]
WANTED = Wanted("id", "./weights", "AAAA")
MARK = 9
OURS = PromptPrefix(Generation(model="m"), token_array((1, MARK, 2)), hash_array())
TOKENIZE = "/tokenize"


class World:
    """One pod, and a picture that is wanted once."""

    def __init__(self, network: Network, weights: str = "./weights", engine: str = "vllm") -> None:
        self.engine = network["a"]
        self.fleet = fleet_of(make_pod("a", engine=engine, models=("m",), weights=weights))
        self.fleet.trust("a", PrefixTrust.TRUSTED, "tested")
        self.reader = PictureReader(LearntPictures(), MARK, "<image>")
        self.ours: PromptPrefix | None = OURS
        self.bodies: list[Any] = []
        self.answer = json.dumps({"tokens": [1, 7, 8, 2]}).encode()
        self.engine.answers[TOKENIZE] = self.tokenize
        self.left = [WANTED]
        self.rounds = 0
        self.feed = PictureLearner(self.fleet, network.post, self.read, self.wanted, interval_s=0.001)

    def wanted(self) -> Iterator[tuple[PictureReader, Wanted]]:
        self.rounds += 1
        while self.left:
            yield self.reader, self.left.pop()

    async def read(self, endpoint: Endpoint, body: Mapping[str, Any]) -> PromptPrefix | None:
        assert (endpoint, body["model"]) == (Endpoint.CHAT, "m")
        return self.ours

    def tokenize(self, request: httpx.Request) -> bytes:
        self.bodies.append(json.loads(request.content))
        return self.answer

    @property
    def learnt(self) -> list[int] | None:
        assert self.reader.learnt is not None
        found = self.reader.learnt.tokens(WANTED)
        return found.tolist() if found is not None else None


@pytest.fixture
def world(network: Network) -> World:
    return World(network)


async def test_a_pod_is_asked_for_a_prompt_with_the_picture_alone(world: World, running: Running, until: Until) -> None:
    """Once."""
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
    assert world.learnt == [7, 8]
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert world.bodies == [{"model": "m", "messages": [{"role": "user", "content": [shown]}]}]


LONG = json.dumps({"tokens": [1, *[7] * MAX_PICTURE_BYTES, 2]}).encode()


@pytest.mark.parametrize("answer", [b"", b'{"tokens": "x"}', b'{"tokens": [1, 2]}', LONG], ids=len)
async def test_a_strange_answer_teaches_nothing(world: World, running: Running, until: Until, answer: bytes) -> None:
    world.answer = answer
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
    assert (world.learnt, len(world.bodies)) == (None, 1)


async def test_the_learner_survives_a_pod_that_fails(world: World, running: Running, until: Until) -> None:
    world.engine.refuses = True
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
    assert (world.learnt, world.engine.asked[TOKENIZE]) == (None, 1)


async def test_pictures_are_learnt_after_pods_have_failed(world: World, running: Running, until: Until) -> None:
    """However often: that says nothing about pictures. They are wanted again with the next requests."""
    learnt = world.reader.learnt
    assert learnt is not None
    world.engine.refuses = True
    world.left = [Wanted(name, "./weights", "AAAA") for name in ("b", "c", "id")]
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
        assert not learnt.gave_up
        assert world.learnt is None
        wanted = learnt.next_wanted()
        assert wanted == WANTED
        world.engine.refuses, rounds = False, world.rounds
        world.left.append(wanted)
        await until(lambda: world.rounds > rounds + 2)
    assert world.learnt == [7, 8]


@pytest.mark.parametrize("status", [400, 404])
async def test_a_refused_picture_is_not_asked_for_again(
    world: World, running: Running, until: Until, status: int
) -> None:
    world.engine.statuses[TOKENIZE] = status
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
    assert world.learnt is None
    assert world.reader.learnt is not None
    assert world.reader.learnt.next_wanted() is None


@pytest.mark.parametrize("facts", [{"weights": "./others"}, {"engine": "llamacpp"}])
async def test_other_pods_are_not_asked(
    network: Network, running: Running, until: Until, facts: dict[str, str]
) -> None:
    """Neither those that name other weights, nor engines without the endpoint."""
    world = World(network, **facts)
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
    assert (world.learnt, world.engine.asked[TOKENIZE]) == (None, 0)


async def test_an_untrusted_pod_is_not_asked(world: World, running: Running, until: Until) -> None:
    """Nor any pod for a prompt that the router cannot read."""
    world.fleet.trust("a", PrefixTrust.MISMATCH, "tested")
    async with running(world.feed.run()):
        await until(lambda: world.rounds > 2)
        world.fleet.trust("a", PrefixTrust.TRUSTED, "tested")
        world.ours, rounds = None, world.rounds
        world.left.append(WANTED)
        await until(lambda: world.rounds > rounds + 2)
    assert (world.learnt, world.engine.asked[TOKENIZE]) == (None, 0)
