"""The recent decisions and their outcomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from router.observe.ended import Ended
from router.observe.receipts import ReceiptWriter
from router.observe.recent_decisions import MAX_EXCERPT_CHARACTERS, MAX_READ_BYTES, RecentDecisions, excerpt
from router.policy.decide import decide
from router.types import Scene
from tests.kit.scenes import POLICIES, pod, ready, request, scene

BY = POLICIES["cost_aware"]
PROMPT = {"prompt": "harbour"}
ENDED = Ended(id="one", at_s=0.0, model="m", endpoint="chat", result="ok")


def seen(name: str) -> Scene:
    return scene(*ready(pod("a"), pod("b")), request=request(name, prompt=PROMPT))


def decided(recent: RecentDecisions, *names: str) -> None:
    for name in names:
        recent.record(seen(name), decide(seen(name), BY), BY, 0.0)


def test_the_oldest_decision_is_dropped() -> None:
    """Memory is limited to a number of decisions."""
    recent = RecentDecisions(size=2)
    decided(recent, "one", "two", "three")
    assert len(recent.latest(9)) == 2 and recent.find("one") is None
    assert (found := recent.find("three")) and found[0].scene.request_id == "three"
    assert [each.scene.request_id for each, _ in recent.latest(5)] == ["two", "three"]
    assert [each.scene.request_id for each, _ in recent.latest(1)] == ["three"]


def test_a_repeated_request_id_replaces_the_earlier_decision() -> None:
    """Clients choose ids. The decision is then the newest."""
    recent = RecentDecisions(size=2)
    decided(recent, "one", "two", "one", "three")
    assert [each.scene.request_id for each, _ in recent.latest(5)] == ["one", "three"]


def test_a_size_of_zero_keeps_nothing() -> None:
    """`keep: 0`."""
    recent = RecentDecisions(size=0)
    decided(recent, "one")
    assert not recent.latest(9)


def test_prompt_tokens_in_flight_are_those_of_requests_that_have_not_ended() -> None:
    """By tenant."""
    recent, facts = RecentDecisions(), scene(*ready(pod("a")), request=request("one", tenant="acme"))
    kept = recent.record(facts, decide(facts, BY), BY, 0.0)
    assert recent.in_flight_tokens() == {"acme": kept.scene.prompt_tokens}
    assert kept.scene.prompt_tokens
    recent.settle(replace(ENDED, decision=kept), None)
    assert recent.in_flight_tokens() == {}


def test_the_outcome_is_added_and_written() -> None:
    """To the recorded decision and to every sink."""
    lines: list[bytes] = []
    recent = RecentDecisions(writer=ReceiptWriter(lines.append))
    kept = recent.record(seen("one"), decide(seen("one"), BY), BY, 0.0, "chat")
    recent.settle(replace(ENDED, decision=kept), None)
    recent.settle(ENDED, None)
    assert recent.find("one") == (kept, replace(ENDED, decision=kept)) and len(lines) == 3
    assert b'"workload":"chat"' in lines[1]


def test_a_prompt_is_written_and_then_dropped() -> None:
    """The prompts of a thousand requests have no bound."""
    lines: list[bytes] = []
    recent = RecentDecisions(prompts=True, writer=ReceiptWriter(lines.append, scenes=False))
    kept = recent.record(seen("one"), decide(seen("one"), BY), BY, 0.0)
    recent.settle(replace(ENDED, decision=kept), None)
    assert b"harbour" in lines[0] and kept.prompt is None
    assert kept.excerpt == "harbour"


def test_prompts_are_kept_only_where_configured() -> None:
    """They are private."""
    for prompts in (False, True):
        recent = RecentDecisions(prompts=prompts)
        decided(recent, "one")
        assert (found := recent.find("one")) and found[0].prompt == (PROMPT if prompts else None)


def test_no_beginning_of_a_prompt_is_kept_unless_prompts_are() -> None:
    recent = RecentDecisions()
    kept = recent.record(seen("one"), decide(seen("one"), BY), BY, 0.0)
    recent.settle(replace(ENDED, decision=kept), None)
    assert kept.excerpt == ""


def chat(*messages: Any) -> dict[str, Any]:
    """The messages of a chat, undecoded."""
    return {"messages": [msgspec.Raw(msgspec.json.encode(one)) for one in messages]}


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (chat({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}), "Be brief. / Hi"),
        (chat({"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}), "Hi"),
        ({"prompt": "x" * 1000}, "x" * MAX_EXCERPT_CHARACTERS),
        ({"prompt": msgspec.Raw(b'"Hi"')}, "Hi"),
        ({"prompt": ["Hi", "there"]}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        (chat({"role": "user", "content": [{"text": 7}]}), ""),
        (chat({"role": "user", "content": "x" * MAX_READ_BYTES}), ""),
        (chat({"role": 7, "content": "Hi"}, {"role": "user"}), ""),
        ({"messages": [msgspec.Raw(b"{")]}, ""),
        ({"messages": {}}, ""),
        ({}, ""),
    ],
)
def test_the_beginning_of_a_prompt_is_that_of_its_system_prompt_and_first_user(
    prompt: dict[str, Any], found: str
) -> None:
    """Clients may send any shape."""
    assert excerpt(prompt) == found
