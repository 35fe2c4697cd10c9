"""Fuzzes request bodies: the router must read what the engine reads.

Engines read bodies with Python's own JSON, which is the reference for what is read, removed and left unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from router.apis.body_types import ChatBody, CompletionBody
from router.engines.handoff.bodies import edited
from router.engines.handoff.dialect import split_refusal
from router.engines.steering import CONTAINERS, HANDOFF_FIELDS, STEERING_FIELDS
from router.errors import MalformedRequest
from router.request.parse import (
    PARSERS,
    has_engine_fields,
    read_other,
    without_engine_fields,
)
from router.types import Endpoint

_ANY = msgspec.json.Decoder(float_hook=float)
_READ = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, Endpoint.MESSAGES, Endpoint.TOKENIZE)


def fields_for_engines(body: bytes) -> dict[str, Any]:
    """The fields that an engine reads, numbers as text; empty where it would refuse the body."""
    with suppress(ValueError, RecursionError):
        read = json.loads(body, parse_int=str, parse_float=str)
        return read if isinstance(read, dict) else {}
    return {}


def bodies(data: bytes) -> None:
    """A body, for every endpoint."""
    fields = fields_for_engines(data)
    for endpoint in _READ:
        with suppress(MalformedRequest):
            _check_read_as_by_engines(endpoint, data, fields)
    split_refusal(Endpoint.COMPLETIONS, data)
    other = read_other(data)
    assert other is None or not fields or other.model == fields["model"]
    with suppress(MalformedRequest):
        _check_loses_only(fields, without_engine_fields(data))
    with suppress(MalformedRequest):
        spliced = edited(data, {"kv_transfer_params": {"a": [1]}}, drop=("stream",), amend={"max_tokens": 1})
        if fields:
            _check_edited(fields, spliced)


def _check_read_as_by_engines(endpoint: Endpoint, data: bytes, fields: dict[str, Any]) -> None:
    parsed = PARSERS[endpoint].parse(data)
    if not fields:
        return  # skipped fields are not validated here: the engine refuses the body itself
    assert parsed.model == fields["model"]
    assert has_engine_fields(parsed) == bool((STEERING_FIELDS | CONTAINERS) & fields.keys())
    exact = json.loads(data)
    for name, value in PARSERS[endpoint].prompt_fields(parsed).items():
        if name in ("messages", "tools", "prompt", "documents", "chat_template_kwargs"):
            value = [_ANY.decode(message) for message in value] if name == "messages" else value
            value = _ANY.decode(value) if isinstance(value, msgspec.Raw) else value
            assert repr(value) == repr(exact[name]), f"{name} is read differently"


def _check_loses_only(fields: dict[str, Any], left: bytes) -> None:
    """Order, numbers and all other fields stay; objects in which engines look for fields have none left."""
    found = fields_for_engines(left)
    assert not STEERING_FIELDS & set(_names(found)), "an engine is steered"
    if fields:
        assert [*found] == [name for name in fields if name not in STEERING_FIELDS]
        assert all(repr(value) == repr(fields[name]) for name, value in found.items() if name not in CONTAINERS)


def _names(value: Any) -> Iterator[str]:
    """Names where an engine looks for them."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield from each
            for name in CONTAINERS & each.keys():
                yield from _names(each[name])


def _check_edited(fields: dict[str, Any], spliced: bytes) -> None:
    kept = {name: value for name, value in fields.items() if name not in HANDOFF_FIELDS | {"stream"}}
    if "max_tokens" in kept:
        kept["max_tokens"] = "1"
    assert repr(fields_for_engines(spliced)) == repr({**kept, "kv_transfer_params": {"a": ["1"]}})


SEEDS = (
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "h\\u00e9\\n"}]}],'
    b' "stream": true, "max_tokens": 16, "kv_transfer_params": {"remote_host": "h"}, "seed": 98765432109876543210}',
    b'{"model":"m","prompt":[[1,2],[3]],"stop":["a"],"r\\u0069d":"x","suffix":null,"n":"2","echo":true}',
    b'{"model": "m", "messages": [{"role": "tool", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],'
    b' "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": [1e3, -0.0, null]}}}]}',
    b'{"model":"m","vllm_xargs":{"a":1,"rid":2,"extra_args":[{"priority":1}]},"sampling_params":"x"}',
    b'\xef\xbb\xbf{"model": "m", "input": "x", "bootstrap_room": 1}',
    '{"model": "m", "rid": 1}'.encode("utf-16"),
)
JSON = (
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b'"',
    b"null",
    b"true",
    b"false",
    b"0",
    b"-1",
    b"1e400",
    b"{}",
    b"[]",
    b'""',
    b"\\u",
)
WORDS = (
    *JSON,
    *(b'"%b":' % name.encode() for name in sorted(STEERING_FIELDS | CONTAINERS)),
    *(b'"%b":' % name for names in (ChatBody, CompletionBody) for name in map(str.encode, names.__struct_fields__)),
)
