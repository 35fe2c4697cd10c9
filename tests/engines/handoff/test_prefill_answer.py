"""What the answers of prefill legs tell."""

from __future__ import annotations

import json

import pytest

from router.engines.handoff.prefill_answer import read, whole_answer
from tests.engines.handoff.pairs import answer


@pytest.mark.parametrize(
    "said",
    [
        answer(prompt_token_ids=[1, 2]),
        answer({"prompt_token_ids": [1, 2]}),
        answer(prompt_token_ids=[[1, 2]]),
    ],
)
def test_prompt_tokens_are_found_where_each_engine_has_them(said: bytes) -> None:
    """Chat, completion, and TensorRT-LLM's list for each prompt."""
    told = read(said)
    assert told is not None
    assert told.token_ids() == [1, 2]


@pytest.mark.parametrize("said", [answer(), answer(prompt_token_ids=None), answer(prompt_token_ids=["a"])])
def test_tokens_that_are_not_told_are_none(said: bytes) -> None:
    """Which is no reason to refuse the rest."""
    told = read(said)
    assert told is not None
    assert told.token_ids() is None


def test_cached_tokens_are_none_where_the_engine_does_not_tell_them() -> None:
    """vLLM writes null unless it is asked to by its flags."""
    for usage, cached in [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 4),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, None),
        (None, None),
    ]:
        told = read(answer(usage=usage))
        assert told is not None
        assert told.cached_tokens == cached


def test_a_whole_answer_lacks_only_what_we_asked_for() -> None:
    """Everything else stays as the pod wrote it."""
    said = (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","token_ids":[5],'
        b'"disaggregated_params":{"a":1},"finish_reason":"stop"}],"prompt_token_ids":[1],"kv_transfer_params":null}'
    )
    assert whole_answer(said) == (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","finish_reason":"stop"}]}'
    )
    assert json.loads(whole_answer(answer())) == json.loads(answer())


def test_what_is_no_text_is_no_answer() -> None:
    """Also where only the name of an unknown field is none: whoever passes it on reads that, too."""
    assert read(b'{"choices":[{"\xc3\xa4":1}]}')
    assert read(b'{"choices":[{"\xff":1}]}') is None
