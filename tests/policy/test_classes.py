"""Kinds of work, by what a request says and by what its prefix does."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from typing import Any

import pytest
from pydantic import ValidationError

from router.config.load import load
from router.config.policy_files import load_classes
from router.config.shipped import shipped
from router.policy.classes import Classes, ClassRules
from router.sim.virtual.generate import TrafficMix
from router.sim.virtual.traffic import Session
from router.types import Generation, PromptPrefix
from tests.policy.scenes import prompt, scene

RULES = load_classes(None)
ANSWER_S = 4.0


def classify(classes: Classes, asked: PromptPrefix | None, now_s: float = 0.0, **more: Any) -> str:
    usual: dict[str, Any] = {"prompt_tokens": asked.token_count if asked else 10, "headers": []}
    seen = scene(prompt=asked, now_s=now_s, shared_blocks=more.pop("shared_blocks", 0))
    return classes.classify(seen, **(usual | more))


def test_a_client_may_say_what_it_is_and_nothing_that_is_no_class() -> None:
    """The header, with a name that is configured."""
    classes = Classes(RULES)
    assert classify(classes, prompt(100), headers=[(b"x-workload-class", b"batch")]) == "batch"
    assert classify(classes, prompt(100), headers=[(b"x-workload-class", b"gold\xff")]) == "one_off"


def test_growth_at_a_persons_pace_is_a_chat_and_faster_an_agent() -> None:
    """From the second turn on, and from the third."""
    for pace_s, expected in ((30.0, ["one_off", "chat", "chat", "chat"]), (3.0, ["one_off", "chat", "agent", "agent"])):
        classes = Classes(RULES)
        told = [classify(classes, prompt(500 + 100 * turn), turn * pace_s) for turn in range(4)]
        assert told == expected


def test_length_and_sharing_tell_the_rest() -> None:
    """A very long prompt is one whatever else it is; a prompt that was not read is a one-off."""
    classes = Classes(RULES)
    assert classify(classes, prompt(200), prompt_tokens=40_000) == "long_context"
    assert classify(classes, None) == "one_off"


def arrivals(session: Session) -> list[tuple[float, int, Session]]:
    """When its turns come, if every answer takes as long."""
    at_s, times = session.start_s, []
    for turn, ask in enumerate(session.requests):
        at_s += ask.think_s + (ANSWER_S if turn else 0.0)
        times.append((at_s, turn, session))
    return times


def test_the_shipped_rules_know_most_of_a_mix_for_what_it_is() -> None:
    """Turns of the described mix, by kind: agents and chats once they go on, documents once a second one asks."""
    mix = load(shipped("config") / "traffic" / "mixed.yaml", TrafficMix)
    sessions = [one for one, _ in zip(mix.traffic().sessions, range(4000), strict=False)]
    coming = merge(*map(arrivals, sessions), key=lambda one: one[0])
    classes, told = Classes(RULES), Counter[tuple[str, int, str]]()
    generation = Generation(model="m", block_size_tokens=128)
    for at_s, turn, session in coming:
        ask = session.requests[turn]
        asked = PromptPrefix(generation, range(ask.prompt_tokens), ask.blocks[: ask.prompt_blocks])
        told[session.kind, min(turn, 2), classify(classes, asked, at_s)] += 1
    right = {"agent": ("agent", 2), "chat": ("chat", 2), "one_off": ("one_off", 0), "rag": ("rag", 0)}
    for kind, (expected, later) in right.items():
        of_kind = sum(count for (of, when, _), count in told.items() if (of, when) == (kind, later))
        assert told[kind, later, expected] > 0.6 * of_kind, sorted(told.items())


@pytest.mark.parametrize(
    "rules",
    [
        {"rules": []},
        {"rules": [{"class": "a", "min_turn": 1}]},
        {"rules": [{"class": "a", "request": {"class": "b"}}, {"class": "b"}]},
        {"rules": [{"class": "Not A Name"}]},
        {"rules": [{"class": "a", "min_turns": 1}, {"class": "b"}]},
    ],
)
def test_rules_that_leave_a_request_without_a_class_are_refused(rules: Any) -> None:
    """As are those that go in a circle, and typos."""
    with pytest.raises(ValidationError):
        ClassRules.model_validate(rules)
