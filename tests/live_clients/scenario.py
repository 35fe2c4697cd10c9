"""What each client asks for, as values: one list of steps for all clients of an API.

All answers are greedy, or have a seed. The usage of streams is asked for in each way that there is, because the
router asks for it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Step: TypeAlias = Mapping[str, Any]
"""`api` names the call; `body` has its fields."""

MODEL = "tiny"
TEXT = "Write the numbers from one to twenty in words, and say which of them you like."
CHAT = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": TEXT}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}
PARAMETERS = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a page.", "parameters": PARAMETERS}}]

SEEDED = {"temperature": 1, "seed": 7}
"""vLLM makes several choices only of a sampled answer."""

USAGE: Mapping[str, Mapping[str, Any]] = {
    "no options": {},
    "null options": {"stream_options": None},
    "usage": {"stream_options": {"include_usage": True}},
    "no usage": {"stream_options": {"include_usage": False}},
    "usage in each chunk": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "each chunk without usage": {"stream_options": {"continuous_usage_stats": True}},
    "each chunk, no usage": {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
}
USUAL = ("no options", "usage", "usage in each chunk")
CHAT_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "a forced call": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 16},
    "two choices": {"n": 2, **SEEDED},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "one token": {"max_tokens": 1},
    "a stop string": {"stop": ["e", "a", "o", " "]},
    "JSON": {"response_format": {"type": "json_schema", "json_schema": {"name": "page", "schema": PARAMETERS}}},
}
COMPLETION_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "two choices": {"n": 2, **SEEDED},
    "two prompts": {"prompt": [TEXT, "Another one."]},
    "log probabilities": {"logprobs": 2},
    "one token": {"max_tokens": 1},
    "a stop string": {"stop": ["e", "a", "o", " "]},
    "echo": {"echo": True},
}


def steps(api: str, base: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> Iterator[Step]:
    """Each variant whole, and streamed with the usual ways of asking for usage; the plain one with all ways."""
    for name, fields in variants.items():
        yield {"api": api, "body": {**base, **fields}}
        for way in USAGE if name == "plain" else USUAL:
            yield {"api": api, "body": {**base, **fields, "stream": True, **USAGE[way]}}


GENERATION: list[Step] = [
    *steps("chat", GREEDY | {"messages": CHAT}, CHAT_FIELDS),
    *steps("completions", GREEDY | {"prompt": TEXT}, COMPLETION_FIELDS),
    {"api": "chat", "body": GREEDY | {"messages": CHAT, "temperature": -1}},  # the engine refuses it
]
RESPONSES: list[Step] = [
    {"api": "responses", "body": {"model": MODEL, "temperature": 0, "max_output_tokens": 12, "input": TEXT, **more}}
    for more in ({}, {"stream": True})
]
MESSAGES: list[Step] = [
    {"api": "messages", "body": {**GREEDY, "system": "You answer briefly.", "messages": CHAT[1:], **more}}
    for more in (
        {},
        {"stream": True},
        {"stream": True, "stop_sequences": ["e", "a", "o", " "]},
        {"stream": True, "max_tokens": 1},
        {"tools": [{"name": "read", "input_schema": PARAMETERS}]},
        {"stream": True, "tools": [{"name": "read", "input_schema": PARAMETERS}]},
    )
]
MESSAGES.append({"api": "count_tokens", "body": {"model": MODEL, "messages": CHAT[1:]}})
EMBEDDINGS: list[Step] = [
    {"api": "embeddings", "body": {"model": MODEL, **more}}
    for more in (
        {"input": TEXT},
        {"input": [TEXT, "Another one."]},
        {"input": [[1, 2, 3], [4, 5]]},
        {"input": TEXT, "encoding_format": "float"},
        {"input": TEXT, "encoding_format": "base64"},
    )
]
AUDIO: list[Step] = [
    *(
        {"api": "speech", "body": {"model": MODEL, "input": TEXT, "voice": "alloy", "response_format": one}}
        for one in ("pcm", "wav", "mp3")
    ),
    {"api": "transcription", "body": {"model": MODEL}},
    {"api": "transcription", "body": {"model": MODEL, "stream": True}},
    {"api": "file", "body": {"purpose": "batch"}},
]
