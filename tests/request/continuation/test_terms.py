"""Which ways of continuing are refused by what a body asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.request.continuation.plan import first_body
from router.request.continuation.terms import Terms, terms_of
from router.types import Endpoint


def terms(**fields: Any) -> Terms:
    return terms_of(Endpoint.CHAT, json.dumps({"model": "m", "messages": [], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"stop": ["END"]}, ""),
        ({"min_tokens": 5}, ""),
        ({"stop": ["END"], "min_tokens": 5}, "stop strings and min_tokens"),
        ({"stop": "x" * 1025}, "long stop strings"),
        ({"stop": ["x" * 600] * 2}, "long stop strings"),
        ({"include_reasoning": False}, ""),
        ({"include_reasoning": False, "logprobs": True}, "hidden reasoning"),
        ({"include_reasoning": False, "response_format": {"type": "json_object"}}, "hidden reasoning"),
    ],
)
def test_streams_that_ids_do_not_continue_are_named(fields: dict[str, Any], why: str) -> None:
    assert terms(**fields).no_ids == why


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"response_format": {"type": "json_object"}}])
def test_pod_hides_the_reasoning_where_the_router_cannot(fields: dict[str, Any]) -> None:
    found = terms(include_reasoning=False, **fields)
    assert not found.hides_reasoning
    assert b"include_reasoning" not in first_body(b'{"model":"m"}', found)
    assert terms(include_reasoning=False).hides_reasoning


@pytest.mark.parametrize(
    ("fields", "holds", "announced"),
    [
        ({}, True, "yes"),
        ({"temperature": 0}, False, "yes"),
        ({"seed": 1}, False, "yes"),
        ({"tool_choice": "required"}, False, "until=content"),
    ],
)
def test_only_calls_that_cannot_be_made_again_are_held(fields: dict[str, Any], holds: bool, announced: str) -> None:
    body = json.dumps({"model": "m", "messages": [], "tools": [{"type": "function"}], **fields}).encode()
    found = terms_of(Endpoint.CHAT, body, holds_calls=True)
    assert (found.holds_calls, found.announced) == (holds, announced)
    assert not terms_of(Endpoint.CHAT, body).holds_calls
