"""The fields of request bodies that a mock engine reads."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

AskedPrompts: TypeAlias = str | list[int | str | list[int]]
"""One text, one list of token ids, or a list of either."""


class AskedStreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AskedGeneration(msgspec.Struct, kw_only=True):
    """Fields of all generation endpoints. Unknown fields are ignored, as in vLLM."""

    model: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: AskedStreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    min_tokens: int | None = 0
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: bool | int | None = None
    tool_choice: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    disaggregated_params: dict[str, Any] | None = None


class AskedChat(AskedGeneration, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    echo: bool | None = False
    include_reasoning: bool | None = True
    tools: Any = None
    prompt_token_ids: list[int] | None = None


class AskedCompletion(AskedGeneration, kw_only=True):
    prompt: AskedPrompts
    echo: bool | None = False
    suffix: str | None = None


class AskedMessage(AskedGeneration, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")


class AskedResponse(AskedGeneration, kw_only=True):
    input: str | list[dict[str, Any]]
    max_output_tokens: int | None = None
    request_id: str | None = None
    previous_response_id: str | None = None


class AskedSpeech(AskedGeneration, kw_only=True):
    input: str
    response_format: Literal["pcm", "wav", "mp3"] = "mp3"  # type: ignore[assignment]
    stream_format: Literal["audio", "sse"] = "audio"


class AskedEmbedding(msgspec.Struct, kw_only=True):
    input: AskedPrompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class AskedTokens(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
