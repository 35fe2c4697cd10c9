"""The parity self-test: its evaluation, and pods that pass, fail or report little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from router.apis.anthropic_messages import messages_probes
from router.apis.api import PROBE_BLOCKS
from router.apis.chat_rules import ALL_IN_ONE, RULES
from router.feeds.self_test import (
    Parity,
    ParityReport,
    SelfTest,
    SelfTestTiming,
    compare_hashes,
    compare_tokens,
    expected_blocks,
    probes,
)
from router.fleet.fleet import PodEvent
from router.hashing import generation_seed, hash_blocks, token_array
from router.stores.prefix_store import LocalStore
from router.types import BlocksStored, Endpoint, Generation, Pod, PodState, PrefixTrust, PromptPicture, PromptPrefix
from tests.kit.deadlines import DEADLINE_S, running, until
from tests.kit.fake_pods import watched
from tests.kit.scenes import fleet_of, make_pod

TOKENS = list(range(100, 200))
AGREED = ParityReport(Parity.OK, Parity.UNKNOWN, "tokens agree")


def prompt(tokens: int, block_size_tokens: int = 16) -> PromptPrefix:
    return PromptPrefix(Generation(model="m", block_size_tokens=block_size_tokens), range(tokens), ())


@pytest.mark.parametrize("block_tokens", [16, 256, None])
def test_probes_are_unique_long_and_of_several_kinds(block_tokens: int | None) -> None:
    """A chat with a system message, one without, a completion; each starts with the nonce and is longer than three
    engine blocks."""
    tried = list(probes("m", "NONCE", block_tokens))
    assert [endpoint for endpoint, _ in tried] == [Endpoint.CHAT, Endpoint.CHAT, Endpoint.COMPLETIONS]
    assert [message["role"] for message in tried[0][1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [message["role"] for message in tried[1][1]["messages"]] == ["user", "assistant", "user"]
    for _, body in tried:
        text = body["prompt"] if "prompt" in body else " ".join(m["content"] for m in body["messages"])
        assert text.startswith("NONCE")
        assert len(text.split()) > (PROBE_BLOCKS - 1) * (block_tokens or 16)
        assert any(ord(character) > 0xFFFF for character in text)
        assert (body["model"], body["max_tokens"]) == ("m", 1)


def test_equal_tokens_pass() -> None:
    """For any kind of sequence."""
    assert compare_tokens(TOKENS, tuple(TOKENS), None).tokens is Parity.OK


def test_a_mismatch_names_the_first_different_token() -> None:
    """With its index, both lengths and what to do, where the texts are not known."""
    engine = [*TOKENS[:50], 7, *TOKENS[50:]]
    report = compare_tokens(TOKENS, engine, 101)
    assert report.trust is PrefixTrust.MISMATCH
    assert "token 50 differs, of 100 in the router and 101 in the engine" in report.reason
    assert "chat template" in report.reason


@pytest.mark.parametrize("engine", [TOKENS[:-1], [*TOKENS, 5], []])
def test_a_prefix_of_the_tokens_is_a_mismatch(engine: list[int]) -> None:
    """The lengths differ."""
    report = compare_tokens(TOKENS, engine, None)
    assert report.tokens is Parity.MISMATCH
    assert f"token {min(len(engine), len(TOKENS))} differs" in report.reason


@given(ours=st.lists(st.integers(0, 9), max_size=12), engine=st.lists(st.integers(0, 9), max_size=12))
def test_tokens_pass_exactly_if_they_are_equal(ours: list[int], engine: list[int]) -> None:
    """For all pairs of sequences."""
    assert (compare_tokens(ours, engine, None).tokens is Parity.OK) == (ours == engine)


def test_the_number_of_tokens_is_compared_if_tokens_are_unknown() -> None:
    """Equal, different, or unknown as well."""
    assert compare_tokens(TOKENS, None, 100).tokens is Parity.OK
    assert compare_tokens(TOKENS, None, 99).tokens is Parity.MISMATCH
    assert compare_tokens(TOKENS, None, None).tokens is Parity.UNKNOWN


@pytest.mark.parametrize(
    ("tokens", "engine_block", "blocks"),
    [(100, 16, 6), (100, 32, 6), (95, 32, 4), (96, 32, 6), (31, 32, 0), (100, None, 6), (112, 24, 6)],
)
def test_an_engine_announces_its_full_blocks(tokens: int, engine_block: int | None, blocks: int) -> None:
    """Counted in router blocks of 16."""
    assert expected_blocks(prompt(tokens), engine_block) == blocks


def test_equal_hashes_prove_equal_tokens() -> None:
    """Even of an engine that does not report its tokens."""
    silent = compare_tokens(TOKENS, None, None)
    report = compare_hashes(silent, 6, 6, "")
    assert (report.tokens, report.hashes, report.trust) == (Parity.UNKNOWN, Parity.OK, PrefixTrust.TRUSTED)


@pytest.mark.parametrize(
    ("known", "new", "rejected", "trust", "why"),
    [
        (0, 0, "", PrefixTrust.UNTESTED, "none came: check that the engine's prefix caching is on"),
        (0, -3, "", PrefixTrust.UNTESTED, "none came"),
        (5, 40, "", PrefixTrust.UNTESTED, "5 of 6 blocks of the probe came by KV events in time; the pod is busy"),
        (5, 6, "", PrefixTrust.MISMATCH, "KV events came, but only 5 of 6 blocks of the probe have equal hashes"),
        (0, 6, "", PrefixTrust.MISMATCH, "KV events came, but only 0 of 6"),
        (6, 6, "no multiple", PrefixTrust.MISMATCH, "no multiple"),
    ],
)
def test_missing_blocks_are_explained(known: int, new: int, rejected: str, trust: PrefixTrust, why: str) -> None:
    """Only events of the probe that differ are a mismatch: others prove that the pod is busy, none that none arrive."""
    report = compare_hashes(AGREED, known, 6, rejected, new)
    assert report.trust is trust
    assert why in report.reason


@pytest.mark.parametrize(
    ("tokens", "hashes", "trust"),
    [
        (Parity.OK, Parity.OK, PrefixTrust.TRUSTED),
        (Parity.OK, Parity.NO_EVENTS, PrefixTrust.TRUSTED),
        (Parity.OK, Parity.UNKNOWN, PrefixTrust.UNTESTED),
        (Parity.UNKNOWN, Parity.NO_EVENTS, PrefixTrust.UNTESTED),
        (Parity.UNKNOWN, Parity.UNKNOWN, PrefixTrust.UNTESTED),
        (Parity.MISMATCH, Parity.UNKNOWN, PrefixTrust.MISMATCH),
        (Parity.OK, Parity.MISMATCH, PrefixTrust.MISMATCH),
    ],
)
def test_trust_requires_proof(tokens: Parity, hashes: Parity, trust: PrefixTrust) -> None:
    """Any mismatch is a mismatch; without proof a pod stays untested."""
    assert ParityReport(tokens, hashes, "").trust is trust


pytestmark = pytest.mark.anyio
Network = Any
GENERATION = Generation(model="m", block_size_tokens=16)
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"


def tokens_of(body: Mapping[str, Any]) -> list[int]:
    """A tokenizer of characters, and a template that joins messages."""
    text = body.get("prompt") or "".join(map(str, body.get("messages") or body["input"]))
    return [ord(character) for character in text]


class SelfTestWorld:
    """Pod `a`, a configurable engine, and the feed that tests it."""

    def __init__(self, network: Network, pod: Pod, events_timeout_s: float = 0.05) -> None:
        self.fleet, self.store, self.engine = fleet_of(pod), LocalStore(), network["a"]
        self.fleet.describe("a", models=("m",), block_size_tokens=32)
        self.store.add_holder(pod, GENERATION)
        self.engine.answers |= {CHAT: self.generate, COMPLETIONS: self.generate}
        self.engine.answers |= dict.fromkeys((MESSAGES, RESPONSES), self.generate_message)
        self.engine_block = 32
        self.publishes = True
        self.tells_ids = True
        self.counts = True
        self.announced_blocks: int | None = None
        """How many engine blocks of a prompt are announced; None: all full ones."""
        self.engine_tokens = tokens_of
        self.message_tokens = tokens_of
        self.unreadable: set[str] = set()
        self.reads_pictures = False
        self.bodies: list[dict[str, Any]] = []
        self.reads: list[Endpoint] = []
        self.messages: list[dict[str, Any]] = []
        self.feed = SelfTest(
            self.fleet,
            self.store,
            network.post,
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

    def generate_message(self, request: httpx.Request) -> bytes:
        body = json.loads(request.content)
        self.messages.append(body)
        tokens = self.message_tokens(body)
        self.announce(tokens)
        return json.dumps(
            {"content": [], "usage": {"input_tokens": len(tokens) - 9, "cache_read_input_tokens": 9}}
        ).encode()

    def announce(self, tokens: list[int]) -> None:
        block = self.engine_block
        count = len(tokens) // block if self.announced_blocks is None else self.announced_blocks
        if self.publishes and count:
            hashes = tuple(1000 * len(self.bodies + self.messages) + i for i in range(count))
            stored = BlocksStored(
                block_hashes=hashes, parent_hash=None, tokens=tuple(tokens[: count * block]), block_size_tokens=block
            )
            self.store.apply("a", [stored])

    async def fingerprint(self, endpoint: Endpoint, body: Mapping[str, Any]) -> PromptPrefix | None:
        roles = "".join(message["role"] for message in body.get("messages", ()))
        if body["model"] != "m" or any(word in f"{endpoint} {roles}" for word in self.unreadable):
            return None
        self.reads.append(endpoint)
        tokens = token_array(tokens_of(body))
        seen = (PromptPicture(1, 9, 4),) if self.reads_pictures and "image_url" in str(body) else ()
        return PromptPrefix(GENERATION, tokens, hash_blocks(tokens, 16, generation_seed(GENERATION)), 0, seen)

    @property
    def now(self) -> Pod:
        return self.fleet.snapshot.pods[0].pod

    async def outcome(self) -> tuple[str, str, PrefixTrust]:
        report = await self.feed.test(self.now)
        return report.tokens.value, report.hashes.value, report.trust


@pytest.fixture
def world(network: Network) -> SelfTestWorld:
    """An engine with the tokens and hashes of the router and blocks twice as large."""
    return SelfTestWorld(network, make_pod("a"))


async def test_a_pod_with_equal_tokens_and_hashes_is_trusted(world: SelfTestWorld) -> None:
    """One request with one output token, on the endpoint for clients."""
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    (body,) = world.bodies
    assert (body["max_tokens"], body["return_token_ids"]) == (1, True)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]


async def test_two_tests_never_share_a_prefix(world: SelfTestWorld) -> None:
    """A cached probe would announce no blocks."""
    await world.outcome()
    await world.outcome()
    first, second = (body["messages"][0]["content"] for body in world.bodies)
    assert first[:8] != second[:8]


async def test_a_different_chat_template_is_a_mismatch(world: SelfTestWorld) -> None:
    """Without waiting for events that cannot match."""
    world.engine_tokens = lambda body: [1, *tokens_of(body)]
    assert await world.outcome() == ("mismatch", "unknown", PrefixTrust.MISMATCH)


async def test_tokens_are_fetched_from_tokenize_if_the_answer_has_none(world: SelfTestWorld) -> None:
    """A difference there is a mismatch as well."""
    world.tells_ids = False
    world.engine.answers[TOKENIZE] = lambda request: json.dumps(
        {"tokens": tokens_of(json.loads(request.content))}
    ).encode()
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    world.engine.answers[TOKENIZE] = b'{"tokens": [1, 2, 3]}'
    assert await world.outcome() == ("mismatch", "unknown", PrefixTrust.MISMATCH)


async def test_more_tokens_than_a_probe_can_have_are_not_read(world: SelfTestWorld) -> None:
    """It counts as a pod that does not say them: as many as a long prompt has would hold the event loop."""
    world.tells_ids = False
    world.engine.answers[TOKENIZE] = b'{"tokens": [%b1]}' % (b"1," * 200_000)
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)


async def test_the_number_of_tokens_is_enough_without_tokens(network: Network) -> None:
    """No field is sent that TensorRT-LLM rejects; without events and number nothing is proven."""
    world = SelfTestWorld(network, make_pod("a", engine="trtllm"))
    world.publishes = False
    assert await world.outcome() == ("ok", "no_events", PrefixTrust.TRUSTED)
    assert "return_token_ids" not in world.bodies[0]
    world.counts = False
    assert await world.outcome() == ("unknown", "no_events", PrefixTrust.UNTESTED)


async def test_events_alone_prove_parity(network: Network) -> None:
    """They carry the engine's tokens."""
    world = SelfTestWorld(network, make_pod("a", engine="trtllm"))
    world.counts = False
    assert await world.outcome() == ("unknown", "ok", PrefixTrust.TRUSTED)


async def test_events_that_lack_blocks_of_the_probe_are_a_mismatch(world: SelfTestWorld) -> None:
    """Too few within the timeout, and no others."""
    world.announced_blocks = 3
    assert await world.outcome() == ("ok", "mismatch", PrefixTrust.MISMATCH)


async def test_late_events_of_a_busy_pod_prove_nothing(world: SelfTestWorld) -> None:
    """None in time, or those of other requests only."""
    world.announced_blocks = 0
    assert await world.outcome() == ("ok", "unknown", PrefixTrust.UNTESTED)
    world.engine_block, block = 16, 16
    tokens = tuple(range(100 * block))
    others = BlocksStored(block_hashes=tuple(range(100)), parent_hash=None, tokens=tokens, block_size_tokens=block)
    world.announce = lambda tokens: world.store.apply("a", [others])  # type: ignore[method-assign]
    assert await world.outcome() == ("ok", "unknown", PrefixTrust.UNTESTED)


async def test_equal_tokens_suffice_while_the_events_of_a_pod_are_refused(world: SelfTestWorld) -> None:
    """Found out during the test: its prompts are matched as those of a pod without events."""
    world.announced_blocks = 0
    world.feed = replace(world.feed, publishes_events=lambda _: not world.bodies)
    assert await world.outcome() == ("ok", "no_events", PrefixTrust.TRUSTED)


async def test_rejected_events_are_a_mismatch_at_once(network: Network) -> None:
    """The report contains the reason of the index."""
    world = SelfTestWorld(network, make_pod("a"), events_timeout_s=3600.0)
    world.engine_block = 24
    async with asyncio.timeout(DEADLINE_S):
        report = await world.feed.test(world.now)
    assert report.trust is PrefixTrust.MISMATCH
    assert report.reason == world.store.cache_of("a").blocks.rejected_reason != ""


async def test_the_first_probe_that_the_router_can_tokenize_is_used(world: SelfTestWorld) -> None:
    """Without a system message if the template refuses it, a completion if there is no template."""
    world.unreadable = {"system"}
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    world.unreadable = {"chat"}
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    assert world.bodies[0]["messages"][0]["role"] == "user"
    assert "prompt" in world.bodies[1]


async def test_a_failed_probe_proves_nothing(world: SelfTestWorld) -> None:
    """No tokenizer for the model, or an engine that is too busy."""
    world.unreadable = {"/v1/"}
    assert await world.outcome() == ("unknown", "unknown", PrefixTrust.UNTESTED)
    assert world.bodies == []
    world.unreadable = set()
    world.engine.hangs.add(CHAT)
    report = await world.feed.test(world.now)
    assert report.trust is PrefixTrust.UNTESTED
    assert "no response within" in report.reason


async def test_a_failing_pod_is_tested_until_it_passes(world: SelfTestWorld) -> None:
    """It serves meanwhile. `MatchingLog` names the difference."""
    world.engine_tokens = lambda body: [1, *tokens_of(body)]
    with capture_logs() as logs:
        async with running(watched(world.fleet, *world.feed.checks)):
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
    assert [log["event"] for log in logs if "self-test" in log["event"]] == ["self-test passed"]


def is_own(body: Mapping[str, Any]) -> bool:
    """Whether a probe is not one of those of the rules of chats, which `test_rules_test.py` is about."""
    return all(body["messages"] != chat["messages"] for chat in (ALL_IN_ONE, *(rule.chat for rule in RULES)))


async def test_messages_are_trusted_only_after_a_test_of_their_own(world: SelfTestWorld) -> None:
    """It is repeated while it fails, and chats stay trusted. Tokens are counted by the same conversion."""
    world.message_tokens = lambda body: [1, *tokens_of(body)]
    with capture_logs() as logs:
        async with running(watched(world.fleet, *world.feed.checks)):
            await until(lambda: len(world.messages) > 2)
            assert world.now.reads_alike(Endpoint.CHAT)
            assert not world.now.reads_alike(Endpoint.MESSAGES)
            world.message_tokens = tokens_of
            await until(lambda: world.now.reads_alike(Endpoint.MESSAGES) and world.now.reads_alike(Endpoint.RESPONSES))
            assert world.now.reads_alike(Endpoint.COUNT_TOKENS)
            world.fleet.restarted("a")
            assert not world.now.reads_alike(Endpoint.MESSAGES)
            await until(lambda: world.now.reads_alike(Endpoint.MESSAGES))
    failed = [log for log in logs if log["event"].startswith("conversion not trusted")]
    assert "the router has" in failed[0]["reason"]
    assert [is_own(body) for body in world.bodies].count(True) == 2


async def test_tools_are_tested_where_the_engine_reads_chats_in_its_own_way(network: Network) -> None:
    """A difference is in the log once, and chats stay trusted."""
    world = SelfTestWorld(network, make_pod("a", engine="sglang"))
    world.engine_tokens = lambda body: [1, *tokens_of(body)] if "tools" in body else tokens_of(body)
    with capture_logs() as logs:
        async with running(watched(world.fleet, *world.feed.checks)):
            await until(lambda: len(world.bodies) > 2)
            assert world.now.reads_alike(Endpoint.CHAT)
            assert Endpoint.CHAT not in world.now.converts
            world.engine_tokens = tokens_of
            await until(lambda: Endpoint.CHAT in world.now.converts)
    assert [log["endpoint"] for log in logs if "chats with tools" in log["event"]] == [CHAT]


async def test_a_pod_that_only_embeds_is_trusted_by_its_events(world: SelfTestWorld) -> None:
    """They show its tokens, and that its model caches prefixes. Without them it stays untested, as before."""
    del world.engine.answers[CHAT], world.engine.answers[COMPLETIONS]
    world.engine.answers[EMBEDDINGS] = world.generate
    world.tells_ids = False
    assert await world.outcome() == ("ok", "ok", PrefixTrust.TRUSTED)
    world.announced_blocks = 0
    assert await world.outcome() == ("unknown", "unknown", PrefixTrust.UNTESTED)
    world.announced_blocks, world.engine_tokens = None, lambda body: [7, *tokens_of(body)]
    assert await world.outcome() == ("unknown", "unknown", PrefixTrust.UNTESTED)
    asked = len(world.bodies)
    world.publishes = False
    assert await world.outcome() == ("unknown", "unknown", PrefixTrust.UNTESTED)
    assert len(world.bodies) == asked


async def test_pictures_are_trusted_after_a_test_of_their_own(world: SelfTestWorld) -> None:
    """Two requests. It is repeated after a restart, and chats stay trusted without it."""
    world.reads_pictures = True
    async with running(watched(world.fleet, *world.feed.checks)):
        await until(lambda: world.now.reads_pictures)
        assert ["image_url" in str(body) for body in world.bodies if is_own(body)] == [False, True, True]
        world.engine_tokens = lambda body: [*([1] if "image_url" in str(body) else []), *tokens_of(body)]
        with capture_logs() as logs:
            world.fleet.restarted("a")
            assert not world.now.reads_pictures
            await until(lambda: [log for log in logs if log["event"].startswith("pictures not trusted")])
        assert (world.now.trust, world.now.reads_pictures) == (PrefixTrust.TRUSTED, False)


async def test_a_failed_request_with_a_picture_is_repeated(world: SelfTestWorld) -> None:
    """It shows nothing about the pod."""
    world.reads_pictures = True
    failed: list[int] = []

    def generate(request: httpx.Request) -> bytes:
        if b"image_url" in request.content and len(failed) < 2:
            failed.append(1)
            return b"{}"
        return world.generate(request)

    world.engine.answers[CHAT] = generate
    world.publishes = False
    async with running(watched(world.fleet, *world.feed.checks)):
        await until(lambda: world.now.reads_pictures)
    assert len(failed) == 2


def test_the_probes_of_messages_hold_what_engines_convert_differently() -> None:
    """Every kind of block that a text model accepts, and disabled thinking; the nonce is in front."""
    (turn, *_), (disabled,) = messages_probes("m", "NONCE", 32)
    kinds = {block["type"] for m in turn["messages"] if m["content"] != str(m["content"]) for block in m["content"]}
    assert kinds == {"text", "thinking", "tool_use", "tool_result"}
    assert [m["role"] for m in turn["messages"]].count("system") == 1
    assert turn["system"][1]["text"].startswith("NONCE")
    assert disabled["thinking"] == {"type": "disabled"}


async def test_only_ready_pods_are_tested_and_restarted_ones_again(world: SelfTestWorld) -> None:
    """A restart resets the trust."""
    world.fleet.event("a", PodEvent.EJECT)
    async with running(watched(world.fleet, *world.feed.checks)):
        turns = iter(range(20))
        await until(lambda: next(turns) == 19)
        assert world.bodies == []
        world.fleet.event("a", PodEvent.PROBE_OK)
        await until(lambda: world.now.trust is PrefixTrust.TRUSTED)
        world.fleet.restarted("a")
        assert world.now.trust is PrefixTrust.UNTESTED
        await until(lambda: world.now.trust is PrefixTrust.TRUSTED)
    assert [is_own(body) for body in world.bodies].count(True) == 2


async def test_a_result_of_an_earlier_epoch_is_dropped(world: SelfTestWorld) -> None:
    """The pod restarts between the answer of the probe and its evaluation."""

    def generate(request: httpx.Request) -> bytes:
        answer = world.generate(request)
        world.fleet.restarted("a")
        world.engine.hangs.add(CHAT)
        return answer

    world.engine.answers[CHAT] = generate
    async with running(watched(world.fleet, *world.feed.checks)):
        await until(lambda: world.fleet.trust_reason("a"))
    assert world.now.trust is PrefixTrust.UNTESTED
    assert "probe request failed" in world.fleet.trust_reason("a")
