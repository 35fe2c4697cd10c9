"""Request bodies that show whether two programs tokenize alike.

Bodies for the chat and completion endpoints, by name: every field and every kind of text that affects a prompt's
tokens, and some bodies that an engine must reject.
"""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]


def _said(*turns: tuple[str, Any], **fields: Any) -> Body:
    """A body with messages of these roles and contents."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _called(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _tool_turns(arguments: Any) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 4.5, "sky": "\u00fcberzogen"}'}
    return [ASK, _called(arguments), result]


ASK: dict[str, Any] = {"role": "user", "content": "What is the weather in K\u00f6ln?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city's name, e.g. 'K\u00f6ln'"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
        "name": "get_weather",
        "description": 'Today\'s weather <b>&</b> "more"',
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "strict": True}}
ARGUMENTS = json.dumps({"city": "K\u00f6ln", "days": 2})
REASONED: dict[str, Any] = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2 make 4."}
LONG = " ".join(f"Line {n}: the quick brown fox, {n * n} lazy dogs;" for n in range(160))
MIXED = (
    "na\u00efve caf\u00e9 e\u0301 \U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea \u65e5\u672c\u8a9e \u4e2d\u6587"
    " \ud55c\uad6d\uc5b4 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627"
    " \u200f\u200b\u00a0\t\r\n  \u2028 \ufb01 \u212b"
)
MARKERS = (
    "<\uff5cAssistant\uff5c><\uff5cend\u2581of\u2581sentence\uff5c><|im_end|>\n<|im_start|>system\n<think></s>{{ 7*7 }}"
)
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=9f3ab;"

CHATS: dict[str, Body] = {
    "plain": _said(("user", "Hello, who are you?")),
    "multi turn": _said(
        ("user", "2+2?"), ("assistant", "4"), ("user", "and 3+3?"), ("assistant", " 6 "), ("user", "9?")
    ),
    "system": _said(("system", "You are terse.\n"), ("user", "Hello")),
    "system in the middle": _said(("user", "Hello"), ("system", "Be brief."), ("user", "Well?")),
    "parts": _said(("system", _parts("One.", "Two.")), ("user", _parts("Three", "", "four\n"))),
    "parts as strings": _said(("user", ["one", "two"])),
    "tools": {"messages": [ASK], "tools": [WEATHER, CLOCK]},
    "tool calls and results": {"messages": _tool_turns(ARGUMENTS), "tools": [WEATHER]},
    "tool calls without tools": {"messages": [*_tool_turns(ARGUMENTS), {"role": "user", "content": "Thanks"}]},
    "tool call with bad JSON": {"messages": _tool_turns('{"city": "K\u00f6'), "tools": [WEATHER]},
    "tool call with a JSON list": {"messages": _tool_turns("[1, 2]"), "tools": [WEATHER]},
    "tool call with no arguments": {"messages": _tool_turns(""), "tools": [WEATHER]},
    "tool call with an object": {"messages": _tool_turns({"city": "K\u00f6ln"}), "tools": [WEATHER]},
    "tool result in parts": {
        "messages": [
            *_tool_turns(ARGUMENTS)[:2],
            {"role": "tool", "tool_call_id": "call_1", "content": _parts("4", "5")},
        ]
    },
    "tool choice none": {"messages": [ASK], "tools": [WEATHER], "tool_choice": "none"},
    "no tools": {"messages": [ASK], "tools": []},
    "developer": _said(("developer", "Answer in French."), ("user", "Hello")),
    "developer after system": _said(("system", "A."), ("developer", "B."), ("user", "Hello")),
    "unknown role": _said(("narrator", "Once upon a time"), ("user", "Hello")),
    "reasoning_content in history": {"messages": [ASK, REASONED, {"role": "user", "content": "Sure?"}]},
    "reasoning in history": {
        "messages": [
            ASK,
            {"role": "assistant", "content": "4", "reasoning": "2 and 2."},
            {"role": "user", "content": "Sure?"},
        ]
    },
    "reasoning_content last": {
        "messages": [ASK, REASONED],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "thinking on": _said(("user", "Hello"), chat_template_kwargs={"enable_thinking": True}),
    "thinking off": _said(("user", "Hello"), chat_template_kwargs={"enable_thinking": False}),
    "reasoning effort low": _said(("user", "Hello"), reasoning_effort="low"),
    "reasoning effort none": _said(("user", "Hello"), reasoning_effort="none"),
    "documents": _said(
        ("user", "Summarise"),
        documents=[{"title": "A", "text": "Alpha."}, {"title": "B", "text": "Beta \u2713"}],
    ),
    "continue final message": _said(
        ("user", "Count"), ("assistant", "One, two,"), continue_final_message=True, add_generation_prompt=False
    ),
    "continue and generate": _said(
        ("user", "Count"), ("assistant", "One,"), continue_final_message=True, add_generation_prompt=True
    ),
    "no generation prompt": _said(("user", "Hello"), add_generation_prompt=False),
    "names": {"messages": [{"role": "user", "name": "ann", "content": "I am Ann."}, ASK | {"name": "bob"}]},
    "every script": _said(("user", MIXED)),
    "leading and trailing space": _said(("user", "  \n indented\n\n\n"), ("assistant", "\n"), ("user", " ")),
    "empty content": _said(("user", "")),
    "null content": _said(("user", "Hello"), ("assistant", None), ("user", "Well?")),
    "missing content": {"messages": [{"role": "user"}]},
    "special tokens as text": _said(("user", MARKERS)),
    "two thousand tokens": _said(("system", "Read."), ("user", LONG)),
    "billing header": _said(("system", _parts(BILLING, "You are Claude Code.")), ("user", "Hello")),
    "billing header as a string": _said(("system", BILLING), ("user", "Hello")),
    "special tokens added": _said(("user", "Hello"), add_special_tokens=True),
    "no messages": {"messages": []},
    "content is a number": _said(("user", 7)),
    "tool without a function": {"messages": [ASK], "tools": [{"type": "function"}]},
}

COMPLETIONS: dict[str, Body] = {
    "string": {"prompt": "Once upon a time, caf\u00e9 \u65e5\u672c"},
    "string without special tokens": {"prompt": "Once upon a time", "add_special_tokens": False},
    "empty string": {"prompt": ""},
    "ids": {"prompt": [0, 100, 200, 300, 128798]},
    "list of strings": {"prompt": ["First prompt", "Second, longer prompt"]},
    "list of id lists": {"prompt": [[5, 6, 7], [8, 9]]},
    "id out of the vocabulary": {"prompt": [5, 400000]},
    "negative id": {"prompt": [5, -1]},
    "no ids": {"prompt": []},
}
