"""OpenAI's Responses API, the successor of chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from router.apis.api import WORDS, Api, Body, PromptKind, ResponseFormat, count_named, long_text
from router.apis.body_types import ResponsesBody

MAX_RESPONSE_ID_CHARACTERS = 128
"""Maximum length of the id of a stored response, which has ASCII letters, digits, `_` and `-`."""
_PREAMBLE = rb"event: ?response\.(?:created|queued|in_progress)\r?\n"
_FORMAT = ResponseFormat(
    re.compile(rb"(?:\A|\n)(?!%b)event: ?[a-z_.]{1,48}\r?\n" % _PREAMBLE),
    (count_named(b"input_tokens"),),
    count_named(b"cached_tokens"),
    count_named(b"output_tokens"),
    re.compile(_PREAMBLE),
    re.compile(rb'"id": ?"([A-Za-z0-9_-]{1,%d})"' % MAX_RESPONSE_ID_CHARACTERS),
)
_STORAGE_FIELDS = ("previous_response_id", "background", "store")
_PROMPT_FIELDS = (
    *("input", "instructions", "tools", "reasoning", "truncation", "chat_template_kwargs", "previous_input_messages"),
    *_STORAGE_FIELDS,
)
"""Also whether the response is stored."""


def responses_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Body]]:
    """Groups of probes of the conversion of the Responses API: an agent's turn with every kind of item, then without
    what some templates do not know."""
    text = f"{nonce}\n{long_text(block_tokens)}"
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools = [
        {"type": "function", "name": "look", "description": "Weather of a place", "parameters": schema, "strict": True},
        {"type": "custom", "name": "shell", "description": "Runs a command"},
    ]
    asked = {"role": "user", "content": [{"type": "input_text", "text": part} for part in (text, "Look.")]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "First I look."}]}
    turns = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"place": "Köln", "days": 2}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21.5 C\nsunny"},
        {"role": "user", "content": "And?"},
    ]
    late = {"role": "developer", "content": "Be brief."}
    common = {"model": model, "max_output_tokens": 1, "temperature": 0, "store": False}
    fields = {**common, "instructions": f"{nonce} You are a probe. {WORDS}", "tools": tools}
    yield [
        {**fields, "input": [asked, thought, *turns[:3], late, turns[3]]},
        {**fields, "input": [asked, thought, *turns]},
        {**fields, "input": [asked, *turns]},
        {**common, "input": [asked, *turns]},
    ]


RESPONSES = Api(
    path="/v1/responses",
    response=_FORMAT,
    prompt=PromptKind.CONVERTED,
    body=ResponsesBody,
    prompt_fields=_PROMPT_FIELDS,
    raw_fields=frozenset(_PROMPT_FIELDS) - {*_STORAGE_FIELDS},
    items="input",
    shows_pictures=True,
    may_be_stored=True,
    probes=responses_probes,
)
