"""Whether prefill pods find the answers of a decode pod, and what is missing if they do not."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from router.feeds import answers_test
from router.feeds.answers_test import ANSWER_TOKENS, AnswersTest, missing_answers
from router.feeds.self_test import SelfTestTiming
from router.feeds.watch import Turn
from router.types import Pod, Role
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import Network, watched
from tests.kit.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
PROMPT, ANSWER = list(range(100, 140)), list(range(200, 200 + ANSWER_TOKENS))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_test, "SAVED_S", 0.0)


class AnsweringWorld:
    """A prefill pod that finds `cached` tokens of every prompt (None: it does not say), and a decode pod."""

    def __init__(self, network: Network, cached: int | None, dialect: str = "shared_store", **facts: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cached = cached
        pods = [
            make_pod(role.value, role=role, models=("m",), handoff=dialect, **facts)
            for role in (Role.PREFILL, Role.DECODE)
        ]
        self.fleet = fleet_of(*pods)
        self.test = AnswersTest(self.fleet, network.post, SelfTestTiming(retest_s=0.001))
        answer = {"choices": [{"prompt_token_ids": PROMPT, "token_ids": ANSWER}]}
        network["decode"].answers[PATH] = json.dumps(answer).encode()
        network["prefill"].answers[PATH] = self._read
        self.decoding = network["decode"]

    def _read(self, request: httpx.Request) -> bytes:
        self.asked.append(json.loads(request.content))
        details = {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}
        choice = {"text": "", "prompt_token_ids": None, "token_ids": None}  # as vLLM without `return_token_ids`
        return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, **details}}).encode()

    def pod(self, role: Role) -> Pod:
        return next(status.pod for status in self.fleet.snapshot.pods if status.pod.role is role)

    @property
    def decode(self) -> Pod:
        return self.pod(Role.DECODE)

    @property
    def feed(self) -> Coroutine[Any, Any, None]:
        return watched(self.fleet, self.test.check)


async def test_a_prefill_pod_that_finds_tokens_of_the_answer_shows_that_it_is_kept(network: Network) -> None:
    """It gets the prompt, the answer and one token more. The decode pod is asked once in its life."""
    world = AnsweringWorld(network, cached=len(PROMPT) + 1)
    async with running(world.feed):
        await until(lambda: world.decode.keeps_answers is not None)
    assert world.decode.keeps_answers
    assert [(one["prompt"], one["max_tokens"]) for one in world.asked] == [([*PROMPT, *ANSWER, PROMPT[0]], 1)]
    assert not any(world.test.check.due(status) for status in world.fleet.snapshot.pods)
    assert missing_answers(world.decode) == ""


async def test_a_prefill_pod_that_finds_the_prompt_alone_is_asked_again(network: Network) -> None:
    """A store may be slow. What is missing is named, with what it is worth where traffic has shown that."""
    world = AnsweringWorld(network, cached=len(PROMPT))
    async with running(world.feed):
        await until(lambda: len(world.asked) > 1 and world.decode.keeps_answers is False)
        assert missing_answers(world.decode).startswith("prefill pods do not find its answers; set save_decode_cache")
        worth = missing_answers(world.decode, computed_tokens=4e6, again_tokens=1e6)
        assert worth.endswith("; it would save 25% of 4,000,000 tokens that prefill pods computed")
        world.cached = len(PROMPT) + 16
        await until(lambda: world.decode.keeps_answers)


@pytest.mark.parametrize("pulls", ["p2p", ""])
async def test_the_next_turn_pulls_where_both_pods_pull(network: Network, pulls: str) -> None:
    world = AnsweringWorld(network, cached=len(PROMPT) + 1, dialect="p2p", pulls=pulls)
    async with running(world.feed):
        await until(lambda: bool(world.asked))
    assert ("remote_kv_source" in world.asked[0].get("kv_transfer_params", {})) is bool(pulls)


async def test_nothing_is_known_where_the_prefill_pod_reports_no_cached_tokens(network: Network) -> None:
    """It counts as a failed test, which is repeated at growing intervals: each time the pod computes a long answer."""
    world = AnsweringWorld(network, cached=None)
    turn = Turn(world.test.check)
    assert await turn.check.run(world.decode, turn) is False
    assert (world.decode.keeps_answers, turn.logged) == (None, set())


async def test_a_decode_pod_that_does_not_answer_is_asked_again(network: Network) -> None:
    world = AnsweringWorld(network, cached=0)
    world.decoding.statuses[PATH] = 503
    async with running(world.feed):
        await until(lambda: world.decoding.asked[PATH] > 1)
    assert world.decode.keeps_answers is None


@pytest.mark.parametrize(
    "facts", [{"serves_alone": False}, {"engine": "trtllm"}], ids=["serves nothing alone", "returns no token ids"]
)
async def test_a_pod_that_cannot_be_asked_is_not_tested(network: Network, facts: dict[str, Any]) -> None:
    world = AnsweringWorld(network, cached=0, **facts)
    assert not any(world.test.check.due(status) for status in world.fleet.snapshot.pods)
