"""The answers of a mock engine that a user's message lists.

Lines of one answer are `think: TEXT`, `say: TEXT`, and `tool_call: NAME {"argument": ...}`, which ends it; `also_call:`
adds a call to the answer that has just called. The engine gives the answers in their order, and answers the result of
the last call with text. The conversation is the only state, so any engine of a fleet continues it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(r"^(?:(think|say): (.*)|(tool|also)_call: (\S+) (\{.*\}))$", re.MULTILINE)


@dataclass(slots=True)
class ListedAnswer:
    """`calls` are names of tools and arguments as JSON."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.content)


def listed_answers(text: str) -> list[ListedAnswer]:
    answers: list[ListedAnswer] = []
    for kind, line, call, name, arguments in _LINE.findall(text):
        if not answers or (answers[-1].calls and call != "also"):
            answers.append(ListedAnswer())
        if call:
            answers[-1].calls.append((name, arguments))
        else:
            (answers[-1].reasoning if kind == "think" else answers[-1].content).append(line)
    return answers


def next_answer(chat: Mapping[str, Any]) -> ListedAnswer | None:
    """The answer that a chat's last list has next; None after the last one, or if the chat has no such tool."""
    calls_made = 0
    for message in reversed(chat["messages"]):
        if message["role"] == "user" and (answers := listed_answers(_text(message.get("content")))):
            for answer in answers:
                if calls_made <= 0:
                    known = {tool["function"]["name"] for tool in chat.get("tools") or ()}
                    return answer if {name for name, _ in answer.calls} <= known else None
                calls_made -= len(answer.calls)
            return None
        calls_made += len(message.get("tool_calls") or ())
    return None


def with_answer(chat: Mapping[str, Any], answer: ListedAnswer) -> dict[str, Any]:
    """The chat after this answer, as templates read it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = "\n".join(answer.reasoning)
    if answer.calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in answer.calls]
        message["tool_calls"] = [{"id": "call", "type": "function", "function": function} for function in functions]
    return {**chat, "messages": [*chat["messages"], message], "add_generation_prompt": False}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or () if isinstance(part, dict)]
    return "\n".join(text for text in parts if isinstance(text, str))
