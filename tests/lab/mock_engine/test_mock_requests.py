"""Parsing and validation of request bodies."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest

from loadtest.mock_engine.mock_config import HandoffConfig, MockEngineConfig, TextEncoder
from loadtest.mock_engine.mock_requests import EngineError, RequestParser
from router.types import Endpoint

USER = [{"role": "user", "content": "hello there"}]
GIVEN = "kv_transfer_params.prompt_token_ids"


@pytest.fixture(scope="module")
def reader(make_config: Callable[..., MockEngineConfig]) -> RequestParser:
    return RequestParser(make_config(adapters=("lora",), max_model_len=100))


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_chat_is_rendered_and_tokenized_without_special_tokens(reader: RequestParser, tokenizer: TextEncoder) -> None:
    """Special tokens of a chat come from its template only, unless requested."""
    rendered = "<user> hello there <end> <assistant>"
    ask = reader.chat(body(messages=USER), "7")
    assert ask.prompt == tokenizer.encode(rendered, add_special_tokens=False)
    assert (ask.id, ask.endpoint, ask.model, ask.stream) == ("chatcmpl-7", Endpoint.CHAT, "tiny", False)
    special = reader.chat(body(messages=USER, add_special_tokens=True), "7")
    assert special.prompt == tokenizer.encode(rendered, add_special_tokens=True)


def test_a_completion_is_tokenized_with_special_tokens(reader: RequestParser, tokenizer: TextEncoder) -> None:
    """Text gets them unless disabled; token ids are used as given."""
    asks = [
        reader.completion(body(prompt="a b"), "7"),
        reader.completion(body(prompt=["a b"], add_special_tokens=False), "7"),
        reader.completion(body(prompt=[5, 6]), "7"),
        reader.completion(body(prompt=[[5, 6]]), "7"),
    ]
    assert [ask.prompt.tolist() for ask in asks] == [
        tokenizer.encode("a b", add_special_tokens=True).tolist(),
        tokenizer.encode("a b", add_special_tokens=False).tolist(),
        [5, 6],
        [5, 6],
    ]
    assert asks[0].id == "cmpl-7"


def test_an_adapter_is_a_model_of_its_own(reader: RequestParser) -> None:
    """The adapter and the salt seed the cache; the base model has neither."""
    ask = reader.chat(body(messages=USER, model="lora", cache_salt="s"), "7")
    assert (ask.model, ask.adapter, ask.salt) == ("lora", "lora", "s")
    assert reader.chat(body(messages=USER, model="tiny"), "7").adapter == ""


def test_max_completion_tokens_overrides_max_tokens(reader: RequestParser) -> None:
    """The newer field wins if a client sends both."""
    ask = reader.chat(body(messages=USER, max_tokens=9, max_completion_tokens=3), "7")
    assert len(ask.output.tokens) == 3


def test_stream_options_are_read(reader: RequestParser) -> None:
    """Usage in the stream, and token ids, only on request; null means not requested."""
    ask = reader.chat(body(messages=USER, stream=True, stream_options={"include_usage": True}), "7")
    assert (ask.stream, ask.include_usage, ask.return_token_ids) == (True, True, False)
    plain = reader.chat(body(messages=USER, stream=None, stream_options=None, return_token_ids=True, top_k=3), "7")
    assert (plain.stream, plain.include_usage, plain.return_token_ids) == (False, False, True)


@pytest.mark.parametrize(
    ("wrong", "message", "param"),
    [
        ({"n": 2, "stream": True}, "only n=1", "n"),
        ({"max_tokens": 0}, "at least 1", "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens must be less than or equal to max_tokens=1", "min_tokens"),
        ({"n": 2, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}, "only n=1", "n"),
        ({"kv_transfer_params": {"prompt_token_ids": [-1]}}, "not a list of token ids", GIVEN),
        ({"kv_transfer_params": {"prompt_token_ids": []}}, "non-empty list of non-negative integers", GIVEN),
        ({"max_tokens": 97}, "maximum context length is 100 tokens", "input_tokens"),
        ({"stream_options": {"include_usage": True}}, "`stream=True`", None),
        ({"cache_salt": ""}, "non-empty", "cache_salt"),
        ({"messages": []}, "must not be empty", "messages"),
        ({"messages": "hello"}, "Expected `array`", None),
        ({"messages": [{"role": "nobody", "content": ""}]}, "nobody may not speak", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text: an image", "messages"),
    ],
)
def test_an_invalid_chat_is_a_bad_request(
    reader: RequestParser, wrong: dict[str, Any], message: str, param: str | None
) -> None:
    """Status 400 with the invalid field, also for validation errors, as in vLLM."""
    with pytest.raises(EngineError, match=message) as refused:
        reader.chat(body(**({"messages": USER} | wrong)), "7")
    assert (refused.value.status, refused.value.param) == (HTTPStatus.BAD_REQUEST, param)


@pytest.mark.parametrize("prompt", [[-1], [1, "a"], [], "", [2**32], 3])
def test_an_invalid_prompt_is_a_bad_request(reader: RequestParser, prompt: Any) -> None:
    """Neither text nor one list of token ids, or empty."""
    with pytest.raises(EngineError) as refused:
        reader.completion(body(prompt=prompt, add_special_tokens=False), "7")
    assert refused.value.status is HTTPStatus.BAD_REQUEST


def test_a_body_that_is_not_a_json_object_is_a_bad_request(reader: RequestParser) -> None:
    """Invalid JSON, another JSON type, or text that is not UTF-8."""
    for raw in (b"{", b"[]", b"", b'{"model":"\xed\xa0\x80"}'):
        with pytest.raises(EngineError, match="invalid JSON body"):
            reader.chat(raw, "7")


def test_an_unknown_model_is_not_found(reader: RequestParser) -> None:
    """404, for every endpoint with a model."""
    reads: list[Callable[[], object]] = [
        lambda: reader.chat(body(messages=USER, model="x"), "7"),
        lambda: reader.completion(body(prompt="a", model="x"), "7"),
        lambda: reader.embedding(body(input="a", model="x")),
        lambda: reader.tokenize(body(prompt="a", model="x")),
    ]
    for read in reads:
        with pytest.raises(EngineError, match="The model `x` does not exist") as refused:
            read()
        assert refused.value.status is HTTPStatus.NOT_FOUND


def test_tokenize_defaults_to_special_tokens_for_text_and_to_none_for_chats(reader: RequestParser) -> None:
    """With the defaults of the generation endpoints, so that the result equals their prompt."""
    assert reader.tokenize(body(prompt="a b")) == reader.completion(body(prompt="a b"), "7").prompt
    assert reader.tokenize(body(messages=USER)) == reader.chat(body(messages=USER), "7").prompt
    with pytest.raises(EngineError, match="prompt or messages"):
        reader.tokenize(body(model="tiny"))


def test_embeddings_take_texts_and_tokens(reader: RequestParser) -> None:
    """One input or several; none may exceed the model's length."""
    _, texts, _ = reader.embedding(body(input=["a b", "c"]))
    assert [len(tokens) for tokens in texts] == [3, 2]
    _, ids, _ = reader.embedding(body(input=[[1], [2, 3]]))
    assert [tokens.tolist() for tokens in ids] == [[1], [2, 3]]
    with pytest.raises(EngineError, match="maximum context length"):
        reader.embedding(body(input=list(range(101))))


TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "read"}}, "tools": [TOOL]},
    ],
)
def test_what_a_chat_asks_for_is_answered_or_refused_by_name(reader: RequestParser, fields: dict[str, Any]) -> None:
    """An answer without it would be one that no engine gives."""
    with pytest.raises(EngineError) as refused:
        reader.chat(body(messages=USER, **fields), "7")
    assert next(iter(fields)) in f"{refused.value.param} {refused.value}"
    assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"echo": True}, {"suffix": "end"}])
def test_what_a_completion_asks_for_is_answered_or_refused_by_name(
    reader: RequestParser, fields: dict[str, Any]
) -> None:
    with pytest.raises(EngineError) as refused:
        reader.completion(body(prompt="hello", **fields), "7")
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none", "echo": False},
        {"logprobs": None, "response_format": None, "tool_choice": None},
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(reader: RequestParser, fields: dict[str, Any]) -> None:
    assert reader.chat(body(messages=USER, **fields), "7").output.tokens


def test_embeddings_of_another_length_or_unknown_encoding_are_refused(reader: RequestParser) -> None:
    """As by a vLLM whose model has embeddings of one length."""
    with pytest.raises(EngineError, match="dimensions must be unset"):
        reader.embedding(body(input="a", dimensions=4))
    with pytest.raises(EngineError, match="encoding_format"):
        reader.embedding(body(input="a", encoding_format="int8"))


def test_given_prompt_tokens_skip_the_template(make_config: Callable[..., MockEngineConfig]) -> None:
    """In the transfer params only, as in vLLM since 0.27; TensorRT-LLM has its own field."""
    handed = body(messages=USER, kv_transfer_params={"prompt_token_ids": [5, 6]})
    outside = body(messages=USER, prompt_token_ids=[5, 6])
    vllm = RequestParser(make_config())
    other = RequestParser(make_config(handoff=HandoffConfig(dialect="trtllm")))
    read = [len(reader.chat(given, "7").prompt) for reader in (vllm, other) for given in (handed, outside)]
    assert read == [2, 5, 5, 2]


def test_the_fields_of_every_dialect_are_kept(reader: RequestParser) -> None:
    """Those that are given, of any dialect."""
    params = {"do_remote_decode": True}
    asked = reader.chat(body(messages=USER, kv_transfer_params=params, bootstrap_room=0, bootstrap_host=None), "7")
    assert asked.handoff == {"kv_transfer_params": params, "bootstrap_room": 0}
    assert reader.chat(body(messages=USER), "7").handoff == {}
