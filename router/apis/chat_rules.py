"""The rules by which engines, and their front ends, make another prompt of the same chat.

Each has a chat that shows it: a front end with another rule has other tokens of it, if the model's template prints what
the rule is about.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from router.apis.api import Body, text_part


class ChatRule(msgspec.Struct, frozen=True):
    name: str
    concerns: re.Pattern[bytes]
    """Found in every body that the rule concerns, and in some others."""
    chat: Body


def _rule(name: str, concerns: bytes, *messages: Body, **fields: Any) -> ChatRule:
    return ChatRule(name, re.compile(concerns), {"messages": [_HI, *messages], **fields})


def _call(arguments: str) -> list[Body]:
    """A turn with a call and its result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [said, {"role": "tool", "tool_call_id": "call_1", "content": "21.5 C"}]


_HI = {"role": "user", "content": "Hi"}
_PARTS = [text_part("One"), text_part("Two")]
_SCHEMA = {"type": "object", "properties": {"x": {"type": "number", "default": 1e-7}}}
_REASONING = rb'"(reasoning|reasoning_content|thinking)"'
MAX_SEARCHED_BYTES = 64 * 1024
"""Longer bodies are not searched: the loop waits meanwhile."""
PLAIN = "plain"
RULES = (
    _rule("text parts", rb'"content"\s*:\s*\[', {"role": "user", "content": _PARTS}),
    _rule("parts of tool results", rb'"content"\s*:\s*\[', *_call("{}")[:1], {**_call("{}")[1], "content": _PARTS}),
    _rule("developer", rb'"developer"', {"role": "developer", "content": "Be brief."}, _HI),
    _rule(
        "billing line", b"x-anthropic-billing-header", {"role": "system", "content": "x-anthropic-billing-header: a\nB"}
    ),
    _rule("names of messages", rb'"name"', {"role": "user", "content": "Hi", "name": "ann"}),
    _rule("small numbers", rb"-(?<=\d[eE]-)|\.000", *_call('{"x": 1e-07, "y": 0.00001}')),
    _rule(
        "large numbers",
        rb"\d(?:(?<![\d.]\d)[\d.]{15}|[eE]\+?\d)",
        *_call('{"x": 18446744073709551616, "y": 123456789.12345679}'),
    ),
    _rule("tool calls", rb'"tool_calls"', *_call('{"b":1,"a":{"d":null,"c":true}}')),
    _rule("arguments that are no object", rb'"arguments"\s*:\s*"\s*[^{\s]', *_call("[1, 2]")),
    _rule("tools", rb'"tools"', tools=[{"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}]),
    _rule("reasoning", _REASONING, {"role": "assistant", "content": "x", "reasoning_content": "thought"}),
    _rule("empty reasoning", _REASONING, {"role": "assistant", "content": "a</think>b", "reasoning_content": ""}),
    _rule(
        "continued message",
        rb'"continue_final_message"',
        {"role": "assistant", "content": "The capital of"},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
)


def _joined(chats: Sequence[Body]) -> Body:
    """A chat of all their messages and fields; those of the system are first, because some templates want it so."""
    messages = [_HI, *(message for chat in chats for message in chat["messages"][1:])]
    fields = {name: value for chat in chats for name, value in chat.items()}
    return {**fields, "messages": sorted(messages, key=lambda one: one["role"] not in ("system", "developer"))}


ALL_IN_ONE = _joined([rule.chat for rule in RULES])
"""Where a pod has the router's tokens of it, it keeps all rules."""


def concerned_by(body: bytes) -> list[str]:
    """The rules that may concern a body; `plain` for one with none. Nothing for one that is too long to be searched."""
    if len(body) > MAX_SEARCHED_BYTES:
        return []
    return [rule.name for rule in RULES if rule.concerns.search(body)] or [PLAIN]


def concern(rules: Collection[str], body: bytes) -> bool:
    """Whether one of the rules of these names may concern a body, as it may if it is too long to be searched."""
    return len(body) > MAX_SEARCHED_BYTES or any(rule.concerns.search(body) for rule in RULES if rule.name in rules)
