"""The self-test on pods that pass, fail, and say little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.feeds.selftest import ParityFeed, SelfTestTiming
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.hashing import generation_seed, hash_blocks, token_array
from router.stores.prefix_store import LocalStore
from router.types import BlocksStored, Endpoint, Generation, Pod, PodState, PrefixTrust, PromptPrefix

pytestmark = pytest.mark.anyio
MakePod = Callable[..., Pod]
Network = Any
Running = Callable[[Any], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]
GENERATION = Generation(model="m", block_size_tokens=16)
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


def tokens_of(body: Mapping[str, Any]) -> list[int]:
    """A tokenizer of characters, and a template that joins messages."""
    text = body.get("prompt") or "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return [ord(character) for character in text]


class World:
    """Pod `a`, an engine behind it that computes what it is told to, and the feed that tests it."""

    def __init__(self, network: Network, pod: Pod, events_timeout_s: float = 0.05) -> None:
        self.fleet, self.store, self.engine = Fleet(), LocalStore(), network["a"]
        self.fleet.sync([pod])
        self.fleet.describe("a", models=("m",), block_size_tokens=32)
        self.fleet.event("a", PodEvent.PROBE_OK)
        self.store.add_holder(pod, GENERATION)
        self.engine.answers |= {CHAT: self.generate, COMPLETIONS: self.generate}
        self.engine_block = 32
        self.publishes = True
        self.tells_ids = True
        self.counts = True
        self.announced_blocks: int | None = None
        """How many engine blocks of a prompt are announced; None: all full ones."""
        self.engine_tokens = tokens_of
        self.unreadable: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.feed = ParityFeed(
            self.fleet,
            self.store,
            network.client,
            self.fingerprint,
            lambda pod_id: self.publishes,
            SelfTestTiming(0.001, 0.05, events_timeout_s),
        )

    def generate(self, request: httpx.Request) -> bytes:
        body = json.loads(request.content)
        self.bodies.append(body)
        tokens = self.engine_tokens(body)
        self.announce(tokens)
        answer: dict[str, Any] = {"choices": [{}]}
        if self.tells_ids and body.get("return_token_ids"):
            answer["prompt_token_ids"] = tokens
        if self.counts:
            answer["usage"] = {"prompt_tokens": len(tokens)}
        return json.dumps(answer).encode()

    def announce(self, tokens: list[int]) -> None:
        block = self.engine_block
        count = len(tokens) // block if self.announced_blocks is None else self.announced_blocks
        if self.publishes and count:
            hashes = tuple(1000 * len(self.bodies) + i for i in range(count))
            stored = BlocksStored(
                block_hashes=hashes, parent_hash=None, tokens=tuple(tokens[: count * block]), block_size_tokens=block
            )
            self.store.apply("a", [stored])

    async def fingerprint(self, endpoint: Endpoint, body: Mapping[str, Any]) -> PromptPrefix | None:
        roles = "".join(message["role"] for message in body.get("messages", ()))
        if body["model"] != "m" or any(word in f"{endpoint} {roles}" for word in self.unreadable):
            return None
        tokens = token_array(tokens_of(body))
        return PromptPrefix(GENERATION, tokens, hash_blocks(tokens, 16, generation_seed(GENERATION)))

    @property
    def now(self) -> Pod:
        return self.fleet.snapshot.pods[0].pod

    async def outcome(self) -> tuple[str, str, PrefixTrust]:
        report = await self.feed.test(self.now)
        return report.tokens.value, report.hashes.value, report.trust


@pytest.fixture
def world(network: Network, make_pod: MakePod) -> World:
    """An engine that agrees with the router in everything, with blocks twice as large."""
    return World(network, make_pod("a"))


async def test_a_pod_that_agrees_is_trusted(world: World) -> None:
    """One request of one token, on the endpoint that serves clients."""
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    (body,) = world.bodies
    assert (body["max_tokens"], body["return_token_ids"]) == (1, True)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]


async def test_two_tests_never_share_a_prefix(world: World) -> None:
    """A warm probe would find nothing announced."""
    await world.outcome()
    await world.outcome()
    first, second = (body["messages"][0]["content"] for body in world.bodies)
    assert first[:8] != second[:8]


async def test_another_template_is_noticed(world: World) -> None:
    """Without waiting for events that cannot match."""
    world.engine_tokens = lambda body: [1, *tokens_of(body)]
    assert await world.outcome() == ("mismatch", "unknown", PrefixTrust.MISMATCH)


async def test_an_engine_that_tells_no_ids_is_asked_to_tokenize(world: World) -> None:
    """A different opinion there is a mismatch, too."""
    world.tells_ids = False
    world.engine.answers[TOKENIZE] = lambda request: json.dumps(
        {"tokens": tokens_of(json.loads(request.content))}
    ).encode()
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    world.engine.answers[TOKENIZE] = b'{"tokens": [1, 2, 3]}'
    assert await world.outcome() == ("mismatch", "unknown", PrefixTrust.MISMATCH)


async def test_an_engine_that_tells_no_tokens_at_all_is_trusted_by_their_number(
    network: Network, make_pod: MakePod
) -> None:
    """Nothing is sent that TensorRT-LLM would refuse; without events and without a number nothing is proven."""
    world = World(network, make_pod("a", engine="trtllm"))
    world.publishes = False
    assert await world.outcome() == ("ok", "no_events", PrefixTrust.TRUSTED)
    assert "return_token_ids" not in world.bodies[0]
    world.counts = False
    assert await world.outcome() == ("unknown", "no_events", PrefixTrust.UNTESTED)


async def test_events_alone_are_proof(network: Network, make_pod: MakePod) -> None:
    """They carry the engine's own tokens."""
    world = World(network, make_pod("a", engine="trtllm"))
    world.counts = False
    assert await world.outcome() == ("unknown", "ok", PrefixTrust.TRUSTED)


@pytest.mark.parametrize("announced", [0, 3])
async def test_events_that_do_not_come_are_a_mismatch(world: World, announced: int) -> None:
    """None, or too few, within the time that they are given."""
    world.announced_blocks = announced
    assert await world.outcome() == ("ok", "mismatch", PrefixTrust.MISMATCH)


async def test_blocks_that_cannot_be_indexed_are_a_mismatch_at_once(network: Network, make_pod: MakePod) -> None:
    """However long there would be to wait; the report repeats what the index says of them."""
    world = World(network, make_pod("a"), events_timeout_s=3600.0)
    world.engine_block = 24
    async with asyncio.timeout(5.0):
        report = await world.feed.test(world.now)
    assert report.trust is PrefixTrust.MISMATCH
    assert report.reason == world.store.rejected_reason("a") != ""


async def test_the_probe_is_the_best_that_the_router_can_read(world: World) -> None:
    """Without a system message where the template refuses it, a completion where there is no template."""
    world.unreadable = {"system"}
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    world.unreadable = {"chat"}
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    assert world.bodies[0]["messages"][0]["role"] == "user"
    assert "prompt" in world.bodies[1]


async def test_what_cannot_be_read_or_is_not_served_proves_nothing(world: World) -> None:
    """No tokenizer for the model; an engine that is too busy."""
    world.unreadable = {"/v1/"}
    assert await world.outcome() == ("unknown", "unknown", PrefixTrust.UNTESTED)
    assert world.bodies == []
    world.unreadable = set()
    world.engine.hangs.add(CHAT)
    report = await world.feed.test(world.now)
    assert report.trust is PrefixTrust.UNTESTED
    assert "no response within" in report.reason


async def test_a_failing_pod_is_tested_until_it_passes_and_then_no_more(
    world: World, running: Running, until: Until
) -> None:
    """It serves meanwhile; the log says what differs."""
    world.engine_tokens = lambda body: [1, *tokens_of(body)]
    with capture_logs() as logs:
        async with running(world.feed.run()):
            await until(lambda: len(world.bodies) > 2)
            assert world.now.trust is PrefixTrust.MISMATCH
            assert world.fleet.snapshot.pods[0].state is PodState.READY
            assert "token 0 differs" in world.fleet.trust_reason("a")
            world.engine_tokens = tokens_of
            await until(lambda: world.now.trust is PrefixTrust.TRUSTED)
            tested = len(world.bodies)
            world.fleet.event("a", PodEvent.DRAIN)
            world.fleet.event("a", PodEvent.UNDRAIN)
            world.fleet.event("a", PodEvent.PROBE_OK)
            turns = iter(range(20))
            await until(lambda: next(turns) == 19)
            assert len(world.bodies) == tested
    levels = [(log["log_level"], log["tokens"]) for log in logs]
    assert levels[0] == ("warning", "mismatch")
    assert levels[-1] == ("info", "ok")


async def test_only_ready_pods_are_tested_and_a_restarted_one_again(
    world: World, running: Running, until: Until
) -> None:
    """A new life must prove itself."""
    world.fleet.event("a", PodEvent.EJECT)
    async with running(world.feed.run()):
        turns = iter(range(20))
        await until(lambda: next(turns) == 19)
        assert world.bodies == []
        world.fleet.event("a", PodEvent.PROBE_OK)
        await until(lambda: world.now.trust is PrefixTrust.TRUSTED)
        world.fleet.restarted("a")
        assert world.now.trust is PrefixTrust.UNTESTED
        await until(lambda: world.now.trust is PrefixTrust.TRUSTED)
    assert len(world.bodies) == 2


async def test_a_verdict_on_a_former_life_is_dropped(world: World, running: Running, until: Until) -> None:
    """The pod restarts between the probe's answer and its judgement, and then refuses to be tested."""

    def generate(request: httpx.Request) -> bytes:
        answer = world.generate(request)
        world.fleet.restarted("a")
        world.engine.hangs.add(CHAT)
        return answer

    world.engine.answers[CHAT] = generate
    async with running(world.feed.run()):
        await until(lambda: world.fleet.trust_reason("a"))
    assert world.now.trust is PrefixTrust.UNTESTED
    assert "probe request failed" in world.fleet.trust_reason("a")
