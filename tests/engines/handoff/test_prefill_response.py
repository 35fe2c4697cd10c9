"""Reading the answers of prefill legs."""

from __future__ import annotations

import json

import pytest

from router.engines.handoff.prefill_response import read, whole_response
from tests.engines.handoff.pairs import answer


@pytest.mark.parametrize(
    "reply",
    [
        answer(prompt_token_ids=[1, 2]),
        answer({"prompt_token_ids": [1, 2]}),
        answer(prompt_token_ids=[[1, 2]]),
    ],
)
def test_prompt_tokens_are_found_where_each_engine_has_them(reply: bytes) -> None:
    """Chat, completion, and TensorRT-LLM's list per prompt."""
    found = read(reply)
    assert found is not None
    assert found.token_ids() == [1, 2]


@pytest.mark.parametrize("reply", [answer(), answer(prompt_token_ids=None), answer(prompt_token_ids=["a"])])
def test_missing_tokens_are_none(reply: bytes) -> None:
    """The rest is read."""
    found = read(reply)
    assert found is not None
    assert found.token_ids() is None


def test_cached_tokens_are_none_where_the_engine_omits_them() -> None:
    """vLLM writes null unless a flag enables it."""
    for usage, cached in [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 4),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, None),
        (None, None),
    ]:
        found = read(answer(usage=usage))
        assert found is not None
        assert found.cached_tokens == cached


def test_a_whole_response_lacks_only_the_routers_own_fields() -> None:
    """Every other byte stays."""
    reply = (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","token_ids":[5],'
        b'"disaggregated_params":{"a":1},"finish_reason":"stop"}],"prompt_token_ids":[1],"kv_transfer_params":null}'
    )
    assert whole_response(reply) == (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","finish_reason":"stop"}]}'
    )
    assert json.loads(whole_response(answer())) == json.loads(answer())


def test_an_answer_that_is_not_utf8_is_none() -> None:
    """Also where only the name of an unknown field is not UTF-8."""
    assert read(b'{"choices":[{"\xc3\xa4":1}]}')
    assert read(b'{"choices":[{"\xff":1}]}') is None
