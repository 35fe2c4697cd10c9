"""What does this body ask the engine for?

Decodes and checks request bodies as vLLM does, renders and tokenizes the prompt, and fixes the answer. What vLLM would
refuse is refused with its status and wording class. This file never waits for anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import msgspec

from router.errors import ClientError
from router.hashing import token_array
from router.prompt.template import Unrenderable
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.vocabulary import GeneratedText, Vocabulary
from router.types import Endpoint

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Prompts: TypeAlias = str | list[int | str | list[int]]
"""One text, one list of token ids, or a list of either."""


class EngineError(Exception):
    """The engine answers with an error. `param` names the field at fault."""

    def __init__(self, status: HTTPStatus, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Generation(msgspec.Struct, kw_only=True):
    """Fields that both generating endpoints share. Unknown ones are accepted and ignored, as vLLM does."""

    model: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    min_tokens: int | None = 0
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    disaggregated_params: dict[str, Any] | None = None


class _Chat(_Generation, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(_Generation, kw_only=True):
    prompt: _Prompts


class _Embedding(msgspec.Struct, kw_only=True):
    input: _Prompts
    model: str | None = None
    encoding_format: str | None = "float"


class _Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


_HANDOFF_FIELDS = (
    *("kv_transfer_params", "disaggregated_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation, checked; the answer is already known, only its time is not."""

    id: str
    endpoint: Endpoint
    model: str
    prompt: array[int]
    answer: GeneratedText
    adapter: str = ""
    salt: str = ""
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    handoff: Mapping[str, Any] = field(default_factory=dict)
    """The fields of any handoff dialect that the body has."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, as tokens."""

    model: str
    inputs: tuple[array[int], ...]
    base64: bool


class RequestParser:
    """Reads bodies for one engine. Every method raises `EngineError` for what the engine would refuse."""

    def __init__(self, config: MockEngineConfig) -> None:
        self._config = config
        self._vocabulary = Vocabulary(config.tokenizer)

    def chat(self, body: bytes, request_id: str) -> GenerationRequest:
        """A chat: rendered by the template; special tokens come from there alone."""
        raw = _decoded(body)
        asked = _checked(raw, _Chat)
        if not asked.messages:
            raise EngineError(HTTPStatus.BAD_REQUEST, "messages must not be empty", param="messages")
        handed = self._handed_tokens(asked)
        if handed is None:
            prompt = self._encode(self._render(raw), bool(asked.add_special_tokens))
        else:
            prompt = _token_ids(handed)
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        return self._ask(f"chatcmpl-{request_id}", Endpoint.CHAT, asked, prompt, limit)

    def completion(self, body: bytes, request_id: str) -> GenerationRequest:
        """A completion of one prompt, as text or as tokens."""
        asked = _checked(_decoded(body), _Completion)
        prompts = self._prompts(asked.prompt, asked.add_special_tokens is not False)
        if len(prompts) != 1:
            raise EngineError(HTTPStatus.BAD_REQUEST, "this engine takes one prompt a request", param="prompt")
        return self._ask(f"cmpl-{request_id}", Endpoint.COMPLETIONS, asked, prompts[0], asked.max_tokens)

    def garbled(self, ask: GenerationRequest) -> GenerationRequest:
        """The same request, as it is answered on KV that is not of its prompt."""
        return replace(ask, answer=self._vocabulary.garbled(ask.answer))

    def embedding(self, body: bytes) -> EmbeddingRequest:
        """Texts to embed."""
        asked = _checked(_decoded(body), _Embedding)
        model, _ = self._model(asked.model)
        inputs = self._prompts(asked.input, True)
        for tokens in inputs:
            self._check_length(len(tokens), 0)
        return EmbeddingRequest(model, inputs, asked.encoding_format == "base64")

    def tokens(self, body: bytes) -> array[int]:
        """What `/tokenize` is asked for: a prompt with special tokens, or messages without."""
        raw = _decoded(body)
        asked = _checked(raw, _Tokenize)
        self._model(asked.model)
        if asked.messages is not None:
            return self._encode(self._render(raw), bool(asked.add_special_tokens))
        if asked.prompt is not None:
            return self._encode(asked.prompt, asked.add_special_tokens is not False)
        raise EngineError(HTTPStatus.BAD_REQUEST, "either prompt or messages is required", param="prompt")

    def _ask(
        self, ask_id: str, endpoint: Endpoint, asked: _Generation, prompt: array[int], max_tokens: int | None
    ) -> GenerationRequest:
        model, adapter = self._model(asked.model)
        _check_options(asked, max_tokens)
        self._check_length(len(prompt), max_tokens or 1)
        answer = self._vocabulary.answer(prompt, max_tokens, self._config.max_model_len - len(prompt))
        return GenerationRequest(
            id=ask_id,
            endpoint=endpoint,
            model=model,
            prompt=prompt,
            answer=answer,
            adapter=adapter,
            salt=asked.cache_salt or "",
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            return_token_ids=bool(asked.return_token_ids),
            handoff={name: given for name in _HANDOFF_FIELDS if (given := getattr(asked, name)) is not None},
        )

    def _handed_tokens(self, asked: _Chat) -> object:
        """The prompt that a prefill leg has tokenized already; None where there is none, or the engine reads none."""
        if self._config.handoff.dialect == "trtllm":
            return asked.prompt_token_ids
        return (asked.kv_transfer_params or {}).get("prompt_token_ids") if self._config.reuses_tokens else None

    def _model(self, name: str | None) -> tuple[str, str]:
        """The name to answer with, and the adapter it stands for."""
        if name is None or name in self._config.models:
            return name or self._config.models[0], ""
        if name in self._config.adapters:
            return name, name
        raise EngineError(HTTPStatus.NOT_FOUND, f"The model `{name}` does not exist.", param="model")

    def _check_length(self, prompt_tokens: int, output_tokens: int) -> None:
        if not prompt_tokens:
            raise EngineError(HTTPStatus.BAD_REQUEST, "the prompt has no tokens", param="prompt")
        limit = self._config.max_model_len
        if prompt_tokens + output_tokens > limit:
            raise EngineError(
                HTTPStatus.BAD_REQUEST,
                f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output "
                f"tokens and your prompt contains {prompt_tokens} input tokens.",
                param="input_tokens",
            )

    def _render(self, raw: Mapping[str, Any]) -> str:
        try:
            return self._config.render(raw)
        except ClientError as error:
            raise EngineError(HTTPStatus.BAD_REQUEST, str(error), param=error.param) from error
        except Unrenderable as error:
            raise EngineError(
                HTTPStatus.BAD_REQUEST, f"this engine reads only text: {error}", param="messages"
            ) from error

    def _prompts(self, given: _Prompts, add_special_tokens: bool) -> tuple[array[int], ...]:
        if isinstance(given, str):
            return (self._encode(given, add_special_tokens),)
        if any(isinstance(one, int) for one in given):
            return (_token_ids(given),)
        return tuple(
            self._encode(one, add_special_tokens) if isinstance(one, str) else _token_ids(one) for one in given
        )

    def _encode(self, text: str, add_special_tokens: bool) -> array[int]:
        return self._config.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(HTTPStatus.BAD_REQUEST, f"the body is not a JSON object: {error}") from error


def _checked(raw: Mapping[str, Any], shape: type[_Body]) -> _Body:
    try:
        return msgspec.convert(raw, shape)
    except msgspec.ValidationError as error:
        raise EngineError(HTTPStatus.BAD_REQUEST, str(error)) from error


def _check_options(asked: _Generation, max_tokens: int | None) -> None:
    if asked.n not in (None, 1):
        raise EngineError(HTTPStatus.BAD_REQUEST, "this engine gives one choice a request: n must be 1", param="n")
    if max_tokens is not None and max_tokens < 1:
        raise EngineError(
            HTTPStatus.BAD_REQUEST, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens"
        )
    if max_tokens is not None and (asked.min_tokens or 0) > max_tokens:
        raise EngineError(
            HTTPStatus.BAD_REQUEST,
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {asked.min_tokens}.",
            param="min_tokens",
        )
    if asked.stream_options is not None and not asked.stream:
        raise EngineError(HTTPStatus.BAD_REQUEST, "Stream options can only be defined when `stream=True`.")
    if asked.cache_salt == "":
        raise EngineError(HTTPStatus.BAD_REQUEST, "cache_salt must be a non-empty string", param="cache_salt")


def _token_ids(given: object) -> array[int]:
    try:
        return token_array(given)  # type: ignore[arg-type]  # what is no list of u32 is refused here
    except (TypeError, OverflowError) as error:
        raise EngineError(HTTPStatus.BAD_REQUEST, f"not a list of token ids: {error}", param="prompt") from error
