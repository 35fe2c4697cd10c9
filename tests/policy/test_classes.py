"""Requests are classified by their header, conditions and prefix."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from typing import Any

import pytest
from pydantic import ValidationError

from loadtest.simulator.generate import TrafficMix
from loadtest.simulator.traffic import Session
from router.config.load import load, shipped
from router.config.policy_files import load_classes
from router.policy.classes import Classes, ClassRules
from router.types import Generation, PromptPrefix
from tests.kit.scenes import prompt, prompt_of, scene

RULES = load_classes(None)
ANSWER_S = 4.0


def classify(classes: Classes, asked: PromptPrefix | None, now_s: float = 0.0, **more: Any) -> str:
    usual: dict[str, Any] = {"prompt_tokens": asked.token_count if asked else 10, "headers": []}
    seen = scene(prompt=asked, now_s=now_s, shared_blocks=more.pop("shared_blocks", 0))
    return classes.classify(seen, **(usual | more))


def test_a_client_may_name_a_configured_class() -> None:
    """The header, with a name that is configured."""
    classes = Classes(RULES)
    assert classify(classes, prompt(100), headers=[(b"x-workload-class", b"batch")]) == "batch"
    assert classify(classes, prompt(100), headers=[(b"x-workload-class", b"gold\xff")]) == "one_off"


def test_a_growing_prompt_is_a_chat_and_a_fast_growing_one_an_agent() -> None:
    """From the second turn on, and from the third."""
    for pace_s, expected in ((30.0, ["one_off", "chat", "chat", "chat"]), (3.0, ["one_off", "chat", "agent", "agent"])):
        classes = Classes(RULES)
        found = [classify(classes, prompt(500 + 100 * turn), turn * pace_s) for turn in range(4)]
        assert found == expected


def test_very_long_and_unread_prompts_have_their_own_classes() -> None:
    """A very long prompt is long_context in any case; a prompt that was not read is one_off."""
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


def test_the_shipped_rules_classify_most_of_a_mix_correctly() -> None:
    """Turns of the described mix, by kind: agents and chats once they go on, documents once a second one asks."""
    mix = load(shipped("config") / "traffic" / "mixed.yaml", TrafficMix)
    sessions = [one for one, _ in zip(mix.traffic().sessions, range(4000), strict=False)]
    coming = merge(*map(arrivals, sessions), key=lambda one: one[0])
    classes, found = Classes(RULES), Counter[tuple[str, int, str]]()
    generation = Generation(model="m", block_size_tokens=128)
    for at_s, turn, session in coming:
        ask = session.requests[turn]
        asked = PromptPrefix(generation, range(ask.prompt_tokens), ask.blocks[: ask.prompt_blocks])
        found[session.kind, min(turn, 2), classify(classes, asked, at_s)] += 1
    right = {"agent": ("agent", 2), "chat": ("chat", 2), "one_off": ("one_off", 0), "rag": ("rag", 0)}
    for kind, (expected, later) in right.items():
        of_kind = sum(count for (of, when, _), count in found.items() if (of, when) == (kind, later))
        assert found[kind, later, expected] > 0.6 * of_kind, sorted(found.items())


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
    """As well as rules that depend on the class, and typos."""
    with pytest.raises(ValidationError):
        ClassRules.model_validate(rules)


def rule(**conditions: Any) -> ClassRules:
    """One rule with these conditions, and one for all other requests."""
    return ClassRules.model_validate({"rules": [{"class": "first", **conditions}, {"class": "other"}]})


@pytest.mark.parametrize(("min_turn", "expected"), [(1, "first"), (2, "first"), (3, "other")])
def test_min_turn_includes_its_bound(min_turn: int, expected: str) -> None:
    """The third prompt of a conversation continues two earlier ones."""
    classes = Classes(rule(min_turn=min_turn))
    assert [classify(classes, prompt(500 + 100 * turn)) for turn in range(3)][-1] == expected


@pytest.mark.parametrize(("max_gap_s", "expected"), [(9.9, "other"), (10.0, "first"), (10.1, "first"), (None, "first")])
def test_max_gap_includes_its_bound(max_gap_s: float | None, expected: str) -> None:
    """10 s between two prompts."""
    classes = Classes(rule(min_turn=1, max_gap_s=max_gap_s))
    assert [classify(classes, prompt(500 + 100 * turn), 10.0 * turn) for turn in range(2)][-1] == expected


@pytest.mark.parametrize(("min_shared_tokens", "expected"), [(63, "first"), (64, "first"), (65, "other")])
def test_min_shared_tokens_includes_its_bound(min_shared_tokens: int, expected: str) -> None:
    """Two prompts have the first four blocks of 16 tokens in common."""
    classes = Classes(rule(min_shared_tokens=min_shared_tokens))
    shared = list(range(64))
    classify(classes, prompt_of([*shared, *range(1000, 1100)]))
    assert classify(classes, prompt_of([*shared, *range(2000, 2100)])) == expected


def test_all_conditions_of_a_rule_must_hold() -> None:
    """A request that meets one of two conditions is of another class."""
    classes = Classes(rule(min_turn=1, request={"tenant": "gold"}))
    asked = [prompt(500), prompt(600)]
    assert [classify(classes, each) for each in asked] == ["other", "other"]
    gold = Classes(rule(min_turn=1, request={"prompt_tokens": {"min": 600}}))
    assert [classify(gold, each) for each in asked] == ["other", "first"]


def test_a_prompt_that_is_not_counted_is_not_remembered() -> None:
    """A preview does not change what later prompts are."""
    classes = Classes(rule(min_turn=1))
    classify(classes, prompt(500), counted=False)
    assert classify(classes, prompt(600)) == "other"
    assert classify(classes, prompt(700), counted=False) == "first"


def test_without_a_header_clients_name_no_class() -> None:
    """The header name is matched in lower case."""
    named = [(b"x-kind", b"first")]
    rules = rule(min_turn=1).model_copy(update={"header": "X-Kind"})
    assert classify(Classes(rules), prompt(100), headers=named) == "first"
    off = rules.model_copy(update={"header": ""})
    assert classify(Classes(off), prompt(100), headers=[*named, (b"", b"first")]) == "other"


def test_an_unread_prompt_shares_no_tokens() -> None:
    """Not even one."""
    assert classify(Classes(rule(min_shared_tokens=1)), None) == "other"
    assert classify(Classes(rule(min_shared_tokens=0)), None) == "first"
