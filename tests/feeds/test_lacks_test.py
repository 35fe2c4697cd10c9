"""What pods are asked for that they may lack."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from router.engines.lacks import LARGE_BODY, SEVERAL_ANSWERS, USAGE_OF_STREAMS
from router.engines.vllm import RUST_LACKS
from router.feeds import lacks_test
from router.feeds.lacks_test import LacksTest
from router.types import Pod
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import FakePod, Network, watched
from tests.kit.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio

ONLY_ONE = b'{"error":{"message":"Only n=1 is supported."}}'


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lacks_test, "LOOK_S", 0.001)
    monkeypatch.setattr(lacks_test, "MAX_PAUSE_S", 0.001)


class LackingWorld:
    """The test over one ready pod, whose paths are all there unless `FakePod.statuses` says otherwise."""

    def __init__(self, network: Network, **facts: Any) -> None:
        self.fleet = fleet_of(make_pod("a", **facts))
        self.test = LacksTest(self.fleet, network.post, timeout_s=1.0)
        self.server: FakePod = network["a"]
        self.server.answers = dict.fromkeys((*RUST_LACKS, "/v1/chat/completions", "/v1/completions"), b"{}")

    @property
    def pod(self) -> Pod:
        return self.fleet.snapshot.pods[0].pod

    @property
    def feed(self) -> Coroutine[Any, Any, None]:
        return watched(self.fleet, self.test.check)


def only_one(request: httpx.Request) -> bytes:
    return ONLY_ONE


async def test_a_pod_is_asked_only_with_a_reason(network: Network) -> None:
    """One in Rust at its join, for what the front end is known to lack; others for what an answer has said."""
    usual, rust = LackingWorld(network), LackingWorld(network, front_end="rust")
    usual.server = network["b"]
    async with running(rust.feed):
        await until(lambda: rust.server.asked.total() == len(RUST_LACKS) - 1 and rust.fleet.lacks)
    assert rust.fleet.lacks == {LARGE_BODY}  # it answered the others, and cannot be asked for this
    assert not usual.test.check.due(usual.fleet.snapshot.pods[0])
    usual.test.suspect(usual.pod, "/v1/messages")
    assert usual.test.check.due(usual.fleet.snapshot.pods[0])


async def test_a_suspicion_counts_once_the_pod_confirms_it(network: Network) -> None:
    """The pod is asked once in its life for each."""
    world = LackingWorld(network)
    world.server.answers |= {"/v1/messages": b"", "/v1/chat/completions": only_one}
    world.server.statuses = {"/v1/messages": 404, "/v1/chat/completions": 400}
    async with running(world.feed):
        for need in ("/v1/messages", "/v1/responses", SEVERAL_ANSWERS):
            world.test.suspect(world.pod, need)
        await until(lambda: world.server.asked["/v1/responses"])
        await until(lambda: world.pod.lacks == {"/v1/messages", SEVERAL_ANSWERS})
        world.test.suspect(world.pod, "/v1/responses")
        assert not world.test.check.due(world.fleet.snapshot.pods[0])


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_pod_that_refuses_the_usage_of_streams_refuses_it_of_the_router(
    network: Network, refuses: bool
) -> None:
    """A client whose name of a model is `stream_options` changes nothing."""
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> bytes:
        asked.append(request.content)
        return b'{"error":"unknown field: stream_options"}'

    world = LackingWorld(network)
    world.server.answers["/v1/chat/completions"] = answer
    world.server.statuses = {"/v1/chat/completions": 422} if refuses else {}
    async with running(world.feed):
        world.test.suspect(world.pod, USAGE_OF_STREAMS)
        await until(lambda: not world.test.check.due(world.fleet.snapshot.pods[0]))
    assert (world.pod.lacks, len(asked)) == ({USAGE_OF_STREAMS} if refuses else frozenset(), 1)
    assert b'"stream_options":{"include_usage":true}' in asked[0].replace(b" ", b"")


async def test_an_answer_that_says_nothing_is_asked_for_again(network: Network) -> None:
    """A pod may be busy."""
    world = LackingWorld(network)
    world.server.statuses = {"/v1/messages": 503}
    async with running(world.feed):
        world.test.suspect(world.pod, "/v1/messages")
        await until(lambda: world.server.asked["/v1/messages"] > 2)
        world.server.statuses["/v1/messages"] = 501
        await until(lambda: world.pod.lacks)


async def test_what_a_pod_lacks_is_forgotten_with_its_epoch(network: Network) -> None:
    """So is what it was asked for, and an answer of its former process suspects nothing."""
    world = LackingWorld(network)
    world.server.statuses = {"/v1/messages": 501}
    async with running(world.feed):
        before = world.pod
        world.test.suspect(before, "/v1/messages")
        await until(lambda: world.pod.lacks)
        world.fleet.restarted("a")
        assert world.pod.lacks == frozenset()
        world.test.suspect(before, "/v1/messages")
        assert not world.test.check.due(world.fleet.snapshot.pods[0])
        world.test.suspect(world.pod, "/v1/messages")
        await until(lambda: world.pod.lacks)
