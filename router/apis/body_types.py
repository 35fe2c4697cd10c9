"""The fields of request bodies that the router reads, by API. All others are forwarded as received."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

MAX_NAME_CHARACTERS = 1024
"""Longest name that a client or a pod may give: session, tenant, salt, model. Names are kept after their request."""

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
"""A string that the router keeps after the request."""
Number: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""Decoded after the body, and then replaced by its value: a number that is repeated is decoded once."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that all generating endpoints have. Bodies with a wrong type here are refused."""

    model: str | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    n: Number = msgspec.UNSET
    best_of: Number = msgspec.UNSET
    n_predict: Number = msgspec.UNSET
    """What llama.cpp prefers to `max_tokens`; others ignore it."""
    temperature: Number = msgspec.UNSET
    top_p: Number = msgspec.UNSET
    stop: str | list[str] | None = None
    seed: Number = msgspec.UNSET
    user: str | None = None
    cache_salt: Name | None = None
    truncate_prompt_tokens: Number = msgspec.UNSET
    session_id: Name | None = None
    prompt_cache_key: Name | None = None


class ChatBody(SamplingFields, kw_only=True):
    messages: list[msgspec.Raw]
    """Undecoded objects: the prompt reader decodes only messages of unknown conversations."""
    max_tokens: Number = msgspec.UNSET
    max_completion_tokens: Number = msgspec.UNSET
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    prompt: msgspec.Raw
    """Undecoded: it may be a list of a million token ids."""
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: Number = msgspec.UNSET
    add_special_tokens: bool | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """The fields of an Anthropic request that the router needs. What only a conversion reads stays undecoded: engines
    differ in what they accept."""

    model: str | None = None
    messages: list[msgspec.Raw]
    stream: bool | None = None
    max_tokens: Number = msgspec.UNSET
    temperature: Number = msgspec.UNSET
    cache_salt: Name | None = None
    system: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_choice: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    thinking: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output_config: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields of a request of OpenAI's Responses API that the router needs. What only a conversion reads stays
    undecoded."""

    model: str | None = None
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """A list of items is split into them, which stay undecoded."""
    stream: bool | None = None
    max_output_tokens: Number = msgspec.UNSET
    temperature: Number = msgspec.UNSET
    cache_salt: Name | None = None
    session_id: Name | None = None
    prompt_cache_key: Name | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instructions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    reasoning: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    previous_input_messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    media_io_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    mm_processor_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The fields of vLLM's /tokenize: of a chat or of a completion."""

    model: str | None = None
    messages: list[msgspec.Raw] | None = None
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class OtherBody(msgspec.Struct):
    """The only fields that the router reads of other bodies. Texts to embed, score or rank stay undecoded."""

    model: str
    cache_salt: Any = None
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    items: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_2: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_2: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    truncate_prompt_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    padding: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    add_special_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


FIRST_FIELDS = ("query", "queries", "text_1", "data_1")
"""Paired with each of `SECOND_FIELDS`: one with all, or each with the one at its place."""
SECOND_FIELDS = ("documents", "items", "text_2", "data_2")
TEXT_FIELDS = ("input", *FIRST_FIELDS, *SECOND_FIELDS)
"""Fields with the texts of embeddings, /score and /rerank. Source: vLLM 0.32 entrypoints/pooling/*/protocol.py."""
CHANGING_FIELDS = ("truncate_prompt_tokens", "padding", "add_special_tokens")
"""Fields of embeddings that change the tokens of a text."""


def prompt_fields_of(body: type[msgspec.Struct]) -> tuple[str, ...]:
    """The own fields of a body, except those that limit the response."""
    return tuple(name for name in body.__annotations__ if name not in ("max_tokens", "max_completion_tokens"))
