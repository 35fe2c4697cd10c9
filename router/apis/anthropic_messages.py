"""Anthropic's messages API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from router.apis.api import (
    CHAT_FORMAT,
    WORDS,
    Api,
    Body,
    Conventions,
    PromptKind,
    ResponseFormat,
    count_named,
    long_text,
    text_part,
)
from router.apis.body_types import MessagesBody

_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""`error.type` by status, where it is neither that of other client errors nor of other failures."""
ANTHROPIC = Conventions(
    prefix="/v1/messages",
    error_kind=lambda status, _: _ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error"),
    error_object=lambda fields: {"type": "error", "error": fields},
    limits={b"requests": "requests", b"input-tokens": "prompt", b"output-tokens": "output"},
    limit_header=b"anthropic-ratelimit-%(of)b-%(value)b",
    resets_at_time=True,
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
)

_CACHE_READ = count_named(b"cache_read_input_tokens")
_FORMAT = ResponseFormat(
    re.compile(rb'"(?:text|thinking|partial_json)": ?"[^"]|"type": ?"tool_use"'),
    (count_named(b"input_tokens"), count_named(b"cache_creation_input_tokens"), _CACHE_READ),
    _CACHE_READ,
    count_named(b"output_tokens"),
)
_PROMPT_FIELDS = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")


def messages_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Body]]:
    """Groups of probes of the conversion of Anthropic's messages: an agent's turn with every kind of block, then
    without what some conversions and templates do not know; and disabled thinking."""
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    text = f"{nonce}\n{long_text(block_tokens)}"
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"place": "Köln", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text_part("21.5 C"), text_part("sunny")]}
    thought = {"type": "thinking", "thinking": "First I look.", "signature": "s"}
    system = [text_part("x-anthropic-billing-header: cch=1;"), text_part(f"{nonce} You are a probe."), text_part(WORDS)]
    schema = {"properties": {"place": {"type": "string"}}, "required": ["place"]}
    turns = [
        {"role": "user", "content": [text_part(text), text_part("Look.")]},
        {"role": "assistant", "content": [thought, text_part("I look."), call]},
        {"role": "user", "content": [text_part("Well?"), result]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"name": "look", "description": "Weather of a place", "input_schema": schema}]
    unthinking = {"role": "assistant", "content": [text_part("I look."), call]}
    fields = {**common, "system": system, "tools": tools}
    yield [
        {**fields, "messages": turns},
        {**fields, "messages": [*turns[:3], turns[4]]},
        {**fields, "messages": [turns[0], unthinking, *turns[2:]]},
        {**fields, "messages": [turns[0], unthinking, turns[2], turns[4]]},
    ]
    yield [{**common, "thinking": {"type": "disabled"}, "messages": turns[:1]}]


MESSAGES = Api(
    path="/v1/messages",
    conventions=ANTHROPIC,
    response=_FORMAT,
    prompt=PromptKind.CONVERTED,
    body=MessagesBody,
    prompt_fields=_PROMPT_FIELDS,
    raw_fields=frozenset(_PROMPT_FIELDS),
    items="messages",
    takes_uuids=False,
    probes=messages_probes,
)
COUNT_TOKENS = replace(
    MESSAGES,
    path="/v1/messages/count_tokens",
    response=CHAT_FORMAT,
    generates=False,
    is_about_tokens=True,
    probes=None,
    proven_with=MESSAGES.path,
)
