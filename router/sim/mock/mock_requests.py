"""Parses and checks request bodies as vLLM does.

Renders and tokenizes the prompt, and fixes the output in advance. A body that vLLM rejects raises `EngineError` with
vLLM's status and wording.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from os.path import commonprefix
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from router.errors import ClientError
from router.hashing import token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.vllm_messages import VllmMessages
from router.prompt.apis.vllm_responses import VllmResponses
from router.prompt.conversation import Unrenderable
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.tool_calls import ToolCall, next_call, with_call
from router.sim.mock.vocabulary import GeneratedText, Vocabulary, generated_call
from router.types import Endpoint

_T = TypeVar("_T")
_Prompts: TypeAlias = str | list[int | str | list[int]]
"""One text, one list of token ids, or a list of either."""


class EngineError(Exception):
    """An error response. `param` names the invalid field."""

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _GenerationBody(msgspec.Struct, kw_only=True):
    """Fields of all generation endpoints. Unknown fields are ignored, as in vLLM."""

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


class _ChatBody(_GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None


class _CompletionBody(_GenerationBody, kw_only=True):
    prompt: _Prompts


class _MessagesBody(_GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int


class _ResponsesBody(_GenerationBody, kw_only=True):
    input: str | list[dict[str, Any]]
    max_output_tokens: int | None = None
    request_id: str | None = None
    previous_response_id: str | None = None


class _EmbeddingBody(msgspec.Struct, kw_only=True):
    input: _Prompts
    model: str | None = None


class _TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


_HANDOFF_FIELDS = (
    *("kv_transfer_params", "disaggregated_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)


class _Prompt(NamedTuple):
    """A prompt, and the call that answers it with its tokens, if it asks for one."""

    tokens: array[int]
    call: ToolCall | None = None
    call_tokens: array[int] = token_array()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    id: str
    endpoint: Endpoint
    model: str
    prompt: array[int]
    output: GeneratedText
    adapter: str = ""
    salt: str = ""
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    engine: str = ""
    """Identifies the engine in chats and completions: no other router says which pod responded."""
    handoff: Mapping[str, Any] = field(default_factory=dict)
    """Handoff fields of the body, of any dialect."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    model: str
    inputs: tuple[array[int], ...]


class RequestParser:
    """Parses request bodies for one engine. Every method raises `EngineError`."""

    def __init__(self, config: MockEngineConfig) -> None:
        self._config = config
        self.adapters = set(config.adapters)
        """Those that are loaded now."""
        self._vocabulary = Vocabulary(config.tokenizer)
        self._engine = f"fp_{uuid.uuid4().hex[:12]}"
        self._from_messages = VllmMessages(config.template)
        self._from_responses = VllmResponses(config.template)

    def chat(self, body: bytes, request_id: str) -> GenerationRequest:
        """A chat request. The template renders it; only the template adds special tokens."""
        raw = decode_body(body, dict[str, Any])
        chat = _convert(raw, _ChatBody)
        if not chat.messages:
            raise EngineError("messages must not be empty", param="messages")
        given_tokens = self._given_tokens(chat)
        if given_tokens is None:
            prompt = self._chat_prompt(raw, bool(chat.add_special_tokens))
        else:
            prompt = _Prompt(_token_ids(given_tokens))
        limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        return self._generation(f"chatcmpl-{request_id}", Endpoint.CHAT, chat, prompt, limit)

    def completion(self, body: bytes, request_id: str) -> GenerationRequest:
        completion = _convert(decode_body(body, dict[str, Any]), _CompletionBody)
        prompts = self._prompts(completion.prompt, completion.add_special_tokens is not False)
        if len(prompts) != 1:
            raise EngineError(f"this engine takes one prompt per request, got {len(prompts)}", param="prompt")
        request_id, prompt = f"cmpl-{request_id}", _Prompt(prompts[0])
        return self._generation(request_id, Endpoint.COMPLETIONS, completion, prompt, completion.max_tokens)

    def messages(self, body: bytes, request_id: str) -> GenerationRequest:
        raw = decode_body(body, dict[str, Any])
        asked = _convert(raw, _MessagesBody)
        prompt = self._converted_prompt(self._from_messages, raw)
        return self._generation(f"msg_{request_id}", Endpoint.MESSAGES, asked, prompt, asked.max_tokens)

    def count_tokens(self, body: bytes) -> int:
        raw = decode_body(body, dict[str, Any])
        self._model(_convert(raw, _TokenizeBody).model)
        return len(self._converted_prompt(self._from_messages, raw).tokens)

    def response(self, body: bytes, request_id: str) -> GenerationRequest:
        """A request of the Responses API. Responses are not stored."""
        raw = decode_body(body, dict[str, Any])
        asked = _convert(raw, _ResponsesBody)
        if asked.previous_response_id is not None:
            message = f"Response with id '{asked.previous_response_id}' not found."
            raise EngineError(message, status=HTTPStatus.NOT_FOUND, param="response_id")
        prompt = self._converted_prompt(self._from_responses, raw)
        request_id = asked.request_id or f"resp_{request_id}"
        return self._generation(request_id, Endpoint.RESPONSES, asked, prompt, asked.max_output_tokens)

    def garbled(self, request: GenerationRequest) -> GenerationRequest:
        """The same request with the wrong output that KV of another prompt produces."""
        return replace(request, output=self._vocabulary.garbled(request.output))

    def embedding(self, body: bytes) -> EmbeddingRequest:
        embedding = _convert(decode_body(body, dict[str, Any]), _EmbeddingBody)
        model, _ = self._model(embedding.model)
        inputs = self._prompts(embedding.input, True)
        for tokens in inputs:
            self._check_length(len(tokens), 0)
        return EmbeddingRequest(model, inputs)

    def tokenize(self, body: bytes) -> array[int]:
        """Tokens of a `/tokenize` request: a prompt with special tokens, or messages without."""
        raw = decode_body(body, dict[str, Any])
        given = _convert(raw, _TokenizeBody)
        self._model(given.model)
        if given.messages is not None:
            return self._encode(self._render(raw), bool(given.add_special_tokens))
        if given.prompt is not None:
            return self._encode(given.prompt, given.add_special_tokens is not False)
        raise EngineError("either prompt or messages is required", param="prompt")

    def _generation(
        self,
        request_id: str,
        endpoint: Endpoint,
        body: _GenerationBody,
        prompt: _Prompt,
        max_tokens: int | None,
    ) -> GenerationRequest:
        model, adapter = self._model(body.model)
        _check_options(body, max_tokens)
        self._check_length(len(prompt.tokens), max_tokens or 1)
        return GenerationRequest(
            id=request_id,
            endpoint=endpoint,
            model=model,
            prompt=prompt.tokens,
            output=self._output(endpoint, body, prompt, max_tokens),
            adapter=adapter,
            salt=body.cache_salt or "",
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
            engine=self._engine,
            handoff={name: value for name in _HANDOFF_FIELDS if (value := getattr(body, name)) is not None},
        )

    def _output(
        self, endpoint: Endpoint, body: _GenerationBody, prompt: _Prompt, max_tokens: int | None
    ) -> GeneratedText:
        """The output. `max_tokens` is its exact length where clients need not limit it, so that load tests can choose
        the length; agents' APIs have `min_tokens` for that."""
        available = self._config.max_model_len - len(prompt.tokens)
        limit = available if max_tokens is None else min(max_tokens, available)
        if prompt.call is not None:
            return generated_call(prompt.call, prompt.call_tokens, limit)
        if endpoint.api.is_converted:
            return self._vocabulary.generate(prompt.tokens, None, limit, body.min_tokens or 0)
        return self._vocabulary.generate(prompt.tokens, max_tokens, available)

    def _chat_prompt(self, chat: Mapping[str, Any], add_special_tokens: bool = False) -> _Prompt:
        text = self._render(chat)
        tokens = self._encode(text, add_special_tokens)
        if (call := next_call(chat)) is None:
            return _Prompt(tokens)
        whole = self._render(with_call(chat, call))
        written = whole[len(commonprefix([text, whole])) :]  # the prompt may end with words that only thinking needs
        return _Prompt(tokens, call, self._encode(written, False))

    def _converted_prompt(self, conversion: Conversion, raw: Mapping[str, Any]) -> _Prompt:
        try:
            return self._chat_prompt(conversion.chat(raw))
        except Unrenderable as error:
            raise EngineError(str(error)) from error

    def _given_tokens(self, chat: _ChatBody) -> object:
        """The prompt tokens that a prefill leg returned, if they are in the field that this engine reads; else None."""
        if self._config.handoff.dialect == "trtllm":
            return chat.prompt_token_ids
        return (chat.kv_transfer_params or {}).get("prompt_token_ids")

    def _model(self, name: str | None) -> tuple[str, str]:
        if name is None or name in self._config.models:
            return name or self._config.models[0], ""
        if name in self.adapters:
            return name, name
        raise EngineError(f"The model `{name}` does not exist.", status=HTTPStatus.NOT_FOUND, param="model")

    def _check_length(self, prompt_tokens: int, output_tokens: int) -> None:
        if not prompt_tokens:
            raise EngineError("the prompt has no tokens", param="prompt")
        limit = self._config.max_model_len
        if prompt_tokens + output_tokens > limit:
            raise EngineError(
                f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output "
                f"tokens and your prompt contains {prompt_tokens} input tokens.",
                param="input_tokens",
            )

    def _render(self, raw: Mapping[str, Any]) -> str:
        try:
            return self._config.render(raw)
        except ClientError as error:
            raise EngineError(str(error), param=error.param) from error
        except Unrenderable as error:
            raise EngineError(f"this engine supports only text: {error}", param="messages") from error

    def _prompts(self, value: _Prompts, add_special_tokens: bool) -> tuple[array[int], ...]:
        if isinstance(value, str):
            return (self._encode(value, add_special_tokens),)
        if any(isinstance(item, int) for item in value):
            return (_token_ids(value),)
        return tuple(
            self._encode(item, add_special_tokens) if isinstance(item, str) else _token_ids(item) for item in value
        )

    def _encode(self, text: str, add_special_tokens: bool) -> array[int]:
        return self._config.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def decode_body(body: bytes, body_type: type[_T]) -> _T:
    """The decoded JSON body. Raises `EngineError`."""
    try:
        return msgspec.json.decode(body, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"invalid JSON body: {error}") from error


def _convert(raw: Mapping[str, Any], body_type: type[_T]) -> _T:
    try:
        return msgspec.convert(raw, body_type)
    except msgspec.ValidationError as error:
        raise EngineError(str(error)) from error


def _check_options(body: _GenerationBody, max_tokens: int | None) -> None:
    if body.n not in (None, 1):
        raise EngineError(f"this engine supports only n=1, got {body.n}", param="n")
    if max_tokens is not None and max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise EngineError(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.",
            param="min_tokens",
        )
    if body.stream_options is not None and not body.stream:
        raise EngineError("Stream options can only be defined when `stream=True`.")
    if body.cache_salt == "":
        raise EngineError("cache_salt must be a non-empty string", param="cache_salt")


def _token_ids(value: object) -> array[int]:
    try:
        return token_array(value)  # type: ignore[arg-type]  # rejects what is not a list of u32
    except (TypeError, OverflowError) as error:
        raise EngineError(f"not a list of token ids: {error}", param="prompt") from error
