"""The tokens of a sample of chats are compared with the count of their pod, by the rules that may concern them."""

from __future__ import annotations

from typing import Any

import pytest

from router.apis.chat_rules import PLAIN
from router.observe.metrics import Metrics
from router.request import life
from router.types import PrefixTrust
from tests.kit.memory_front import TOKEN, USAGE, MemoryRouter

PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def compared(monkeypatch: pytest.MonkeyPatch, usage: bytes, *, every: int = 1, **fields: Any) -> list[tuple[str, bool]]:
    seen: list[tuple[str, bool]] = []

    def record(_self: Metrics, model: str, rule: str, *, are_equal: bool) -> None:
        assert model == "m"
        seen.append((rule, are_equal))

    monkeypatch.setattr(Metrics, "tokens_compared", record)
    monkeypatch.setattr(life, "COMPARED_EVERY", every)
    rig = MemoryRouter()
    for pod in "abc":
        rig.known.fleet.trust(pod, PrefixTrust.TRUSTED, "tested")
    served = rig.chat(stream_options={"include_usage": True}, **fields)
    served.head()
    for piece in (TOKEN, usage):
        served.piece(piece)
    served.end()
    return seen


@pytest.mark.parametrize(("count", "are_equal"), [(b"50", True), (b"49", False)])
def test_the_count_of_the_pod_is_compared_with_the_tokens_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, count: bytes, are_equal: bool
) -> None:
    """The prompt has 50."""
    usage = USAGE.replace(b'"prompt_tokens":50', b'"prompt_tokens":%b' % count)
    assert compared(monkeypatch, usage) == [(PLAIN, are_equal)]


def test_a_difference_names_the_rules_that_may_concern_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("text parts", True) in compared(monkeypatch, USAGE, messages=PARTS)


def test_only_a_sample_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, USAGE, every=2) == []
