"""Reading what every engine copies from OpenAI."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.engines.openai import (
    ServedModels,
    parse_models,
    parse_tokens,
    prompt_token_count,
    prompt_token_ids,
    tokenize_body,
)

FIELDS = frozenset({"messages", "tools"})
MESSAGES = [{"role": "user", "content": "hi"}]


def answer(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_base_models_and_adapters_are_told_apart_by_their_parent() -> None:
    """The context is the least that any base model takes; adapters name none."""
    cards = [
        {"id": "m", "parent": None, "max_model_len": 8192, "permission": []},
        {"id": "m2", "max_model_len": 4096},
        {"id": "sql", "parent": "m", "max_model_len": None},
    ]
    assert parse_models(answer({"object": "list", "data": cards})) == ServedModels(("m", "m2"), ("sql",), 4096)


def test_a_context_may_stand_in_the_meta_or_nowhere() -> None:
    """llama.cpp writes meta.n_ctx, TensorRT-LLM nothing."""
    assert parse_models(answer({"data": [{"id": "m", "meta": {"n_ctx": 2048}}]})) == ServedModels(("m",), (), 2048)
    assert parse_models(answer({"data": [{"id": "m", "meta": None}]})) == ServedModels(("m",), (), None)


@pytest.mark.parametrize("size", [0, -1])
def test_a_context_that_cannot_be_is_unknown(size: int) -> None:
    """Nothing would be short enough for it."""
    card = {"id": "m", "max_model_len": size, "meta": {"n_ctx": size}}
    assert parse_models(answer({"data": [card]})) == ServedModels(("m",), (), None)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"data": []}', b'{"data": [{"id": "a", "parent": "m"}]}'])
def test_an_answer_without_a_base_model_is_none(body: bytes) -> None:
    """As is one that is not JSON."""
    assert parse_models(body) is None


@pytest.mark.parametrize("read", [parse_models, parse_tokens, prompt_token_ids, prompt_token_count])
@pytest.mark.parametrize("body", [b"", b"nope", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"tokens": ["a"]}'])
def test_garbage_is_none(read: Callable[[bytes], object], body: bytes) -> None:
    """Whatever a pod says, reading it never raises."""
    assert read(body) is None


def test_prompt_tokens_are_found_in_chats_and_completions() -> None:
    """Top level for a chat, in the choice for a completion."""
    chat = {"prompt_token_ids": [1, 2], "choices": [{"message": {}, "token_ids": [9]}], "usage": {"prompt_tokens": 2}}
    completion = {"choices": [{"text": "", "prompt_token_ids": [3]}]}
    assert prompt_token_ids(answer(chat)) == [1, 2]
    assert prompt_token_ids(answer(completion)) == [3]
    assert prompt_token_count(answer(chat)) == 2
    assert prompt_token_ids(answer({"choices": [{"message": {}}]})) is None
    assert prompt_token_count(answer({"usage": None})) is None


def test_a_body_for_tokenize_says_all_that_decides_the_tokens() -> None:
    """Messages with what belongs to them, or a text; tool_choice decides nothing."""
    chat = {"messages": MESSAGES, "tools": [], "tool_choice": "auto", "documents": None}
    assert tokenize_body("m", chat, FIELDS) == {"model": "m", "messages": MESSAGES, "tools": []}
    text = {"prompt": "hi", "add_special_tokens": False}
    assert tokenize_body("m", text, FIELDS) == {"model": "m", **text}


@pytest.mark.parametrize("prompt", [{"messages": MESSAGES, "documents": [{}]}, {"prompt": [1, 2]}, {"input": "hi"}])
def test_a_prompt_that_tokenize_could_get_wrong_is_not_asked(prompt: dict[str, Any]) -> None:
    """A field that it does not take, tokens already, no prompt at all."""
    assert tokenize_body("m", prompt, FIELDS) is None
