"""Which rules of chats a pod breaks, as a test of the pod finds out: of a mock engine with a broken rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from loadtest.mock_engine.misreadings import MISREADINGS
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_requests import EngineError, RequestParser
from router.apis.chat_rules import MAX_SEARCHED_BYTES, PLAIN, RULES, concern, concerned_by
from router.errors import ClientError, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.feeds.self_test import SelfTest, SelfTestTiming
from router.feeds.watch import Turn
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.request.booking import misreads
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, Generation, InferenceRequest, Pod, PrefixTrust, PromptPrefix
from tests.kit import scenes
from tests.kit.scenes import LLAMA_8B, fleet_of, make_pod
from tests.loaded_tokenizers import loaded_tokenizer
from tests.parity.test_chat_tokens import DEMO

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.name }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<end>{% endfor %}"
)


pytestmark = pytest.mark.anyio


class Place:
    """A pod with a mock engine, and the router's reading of its model."""

    def __init__(self, rule: str = "", front_end: str = "") -> None:
        tokenizer = loaded_tokenizer(DEMO)
        template = ChatTemplate(tokenizer, TEMPLATE)
        self._fingerprinter = Fingerprinter(tokenizer, template, Generation(model="m"))
        self._conversion = VllmRustChat if front_end else None
        pod = make_pod("a", models=("m",), trust=PrefixTrust.TRUSTED, front_end=front_end)
        self.fleet = fleet_of(pod)
        config = MockEngineConfig(
            models=("m",),
            speed=LLAMA_8B,
            tokenizer=tokenizer,
            render=template.render,
            template=template,
            misreads=rule,
            front_end="rust" if front_end else "",
        )
        self._engine = RequestParser(config)
        self.asked = 0
        self.fails: Mapping[int, UpstreamError] = {}
        """By number of the request to /tokenize, from 1: how it fails."""

    async def fingerprint(self, endpoint: Endpoint, body: Mapping[str, Any]) -> PromptPrefix | None:
        request = scenes.request("", endpoint=endpoint, body=b"", prompt={**body})
        try:
            return self._fingerprinter.fingerprint(request, self._conversion)
        except (ClientError, Unrenderable):
            return None

    async def post(self, _pod: Pod, path: str, body: Any, _timeout_s: float) -> bytes:
        if path != "/tokenize":
            raise self.fails.get(self.asked, UpstreamBroken("400", status=400))
        self.asked += 1
        if self.asked in self.fails:
            raise self.fails[self.asked]
        try:
            tokens = self._engine.tokenize(msgspec.json.encode(body))
        except EngineError as error:
            raise UpstreamBroken(str(error)) from error
        return msgspec.json.encode({"tokens": list(tokens)})

    async def misread(self, *, is_done: bool = True) -> frozenset[str]:
        (status,) = self.fleet.snapshot.pods
        test = SelfTest(self.fleet, LocalStore(), self.post, self.fingerprint, lambda _: False, SelfTestTiming())
        check = next(check for check in test.checks if check.name == "test of rules")
        assert await check.run(status.pod, Turn(check)) is is_done
        (after,) = self.fleet.snapshot.pods
        return after.pod.misreads


@pytest.mark.parametrize("front_end", ["", "rust"])
async def test_a_pod_that_keeps_all_rules_is_asked_once(front_end: str) -> None:
    place = Place(front_end=front_end)
    assert (await place.misread(), place.asked) == (frozenset(), 1)


@pytest.mark.parametrize("rule", MISREADINGS)
async def test_a_broken_rule_is_named(rule: str) -> None:
    assert rule in await Place(rule).misread()


@pytest.mark.parametrize("failure", [UpstreamTimeout("late"), UpstreamBroken("busy", status=503)])
async def test_a_chat_without_an_answer_is_asked_again(failure: UpstreamError) -> None:
    """What the other chats have shown is known meanwhile."""
    place = Place("developer")
    place.fails = {len(RULES) + 1: failure}
    assert "developer" in await place.misread(is_done=False)
    place.fails = {}
    assert "developer" in await place.misread()


async def test_a_pod_that_refuses_all_chats_is_asked_once() -> None:
    """As one that only embeds."""
    place = Place("developer")
    place.fails = {number: UpstreamBroken("400", status=400) for number in range(1, len(RULES) + 2)}
    assert (await place.misread(), place.asked) == (frozenset(), len(RULES) + 1)


def test_every_rule_can_be_broken() -> None:
    assert list(MISREADINGS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_concerns_its_own_chat_and_no_plain_one(rule: Any) -> None:
    plain = b'{"model":"m","messages":[{"role":"user","content":"Hi, 12.5 and 2026-11-29"}]}'
    assert concern([rule.name], msgspec.json.encode({"model": "m", **rule.chat}))
    assert not concern([rule.name], plain)
    long = plain + b" " * MAX_SEARCHED_BYTES
    assert concern([rule.name], long) and concerned_by(long) == []


@pytest.mark.parametrize(
    ("number", "rule"),
    [
        ("1e-7", "small numbers"),
        ("1E-05", "small numbers"),
        ("0.00001", "small numbers"),
        ("1e5", "large numbers"),
        ("1.5E+300", "large numbers"),
        ("1234567890.12345", "large numbers"),
        ("12345678901234567890", "large numbers"),
        ("123456789012.5", PLAIN),
        ("re-use-1", PLAIN),
    ],
)
def test_a_number_is_found_in_every_form(number: str, rule: str) -> None:
    assert concerned_by(b'{"x": %b}' % number.encode()) == [rule]


def test_only_chats_of_a_broken_rule_are_not_predicted() -> None:
    """The events of the pod alone say which of their blocks it has."""

    def request(body: bytes) -> InferenceRequest:
        return scenes.request("", body=body)

    pod = make_pod("a", misreads=frozenset({"developer"}))
    assert misreads(pod, request(b'{"messages":[{"role":"developer","content":"x"}]}'))
    assert not misreads(pod, request(b'{"messages":[{"role":"user","content":[]}]}'))
    assert not misreads(make_pod("b"), request(b'{"messages":[{"role":"developer","content":"x"}]}'))
