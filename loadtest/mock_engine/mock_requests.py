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
from typing import Any, TypeVar

import msgspec

from loadtest.mock_engine.answers import Answers, Prompt
from loadtest.mock_engine.misreadings import MISREADINGS
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.output_parser import END_THINK, THINK
from loadtest.mock_engine.request_bodies import (
    AskedChat,
    AskedCompletion,
    AskedEmbedding,
    AskedGeneration,
    AskedMessage,
    AskedPrompts,
    AskedResponse,
    AskedSpeech,
    AskedTokens,
)
from loadtest.mock_engine.tool_calls import listed_answers, next_answer, with_answer
from loadtest.mock_engine.vocabulary import GeneratedText
from router.errors import ClientError
from router.hashing import token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.vllm_messages import VllmMessages
from router.prompt.apis.vllm_responses import VllmResponses
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.types import Endpoint

_T = TypeVar("_T")


class EngineError(Exception):
    """An error response. `param` names the invalid field."""

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


_HANDOFF_FIELDS = ("kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")


_NO_PROMPT = "data did not match any variant of untagged enum Prompt at line 1 column 2"
"""vLLM's front end in Rust of a list of prompts (0.33)."""


def core_died() -> EngineError:
    """vLLM's error for each request whose engine core has ended."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return EngineError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


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
    continuous_usage: bool = False
    return_token_ids: bool = False
    include_reasoning: bool = True
    audio: str = ""
    """The format of speech; "sse": events with it."""
    stream_interval: int = 1
    answers: int = 1
    """All are the same, that to the first prompt."""
    engine: str = ""
    """Identifies the engine in chats and completions: no other router says which pod responded."""
    handoff: Mapping[str, Any] = field(default_factory=dict)
    """Handoff fields of the body, of any dialect."""


class RequestParser:
    """Parses request bodies for one engine. Every method raises `EngineError`."""

    def __init__(self, config: MockEngineConfig) -> None:
        self._config = config
        self.adapters = set(config.adapters)
        """Those that are loaded now."""
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        ending = config.render({"messages": turns, "add_generation_prompt": False}).rpartition("x")[2]
        self._end = (self._encode(ending, False) or [0])[0]
        """The token that ends an answer; any one if templates write none."""
        self._answers = Answers(config, self._end)
        self._engine = f"fp_{uuid.uuid4().hex[:12]}"
        self._rust = VllmRustChat(config.template) if config.front_end == "rust" and config.template else None
        self._from_messages = VllmMessages(config.template)
        self._from_responses = VllmResponses(config.template)

    def chat(self, body: bytes, request_id: str) -> GenerationRequest:
        """A chat request. The template renders it; only the template adds special tokens."""
        raw, chat = _read(body, AskedChat)
        if not chat.messages:
            raise EngineError("messages must not be empty", param="messages")
        prompt = self._chat_prompt(raw, chat, None if chat.echo else self._given_tokens(chat))
        limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        return self._generation(f"chatcmpl-{request_id}", Endpoint.CHAT, chat, prompt, limit)

    def completion(self, body: bytes, request_id: str) -> GenerationRequest:
        _, completion = _read(body, AskedCompletion)
        prompts = self._prompts(completion.prompt, completion.add_special_tokens is not False)
        if not prompts:
            raise EngineError("this engine takes a prompt, got none", param="prompt")
        is_listed = isinstance(completion.prompt, list) and not isinstance(completion.prompt[0], int)
        if self._config.front_end == "rust" and is_listed:
            raise EngineError(_NO_PROMPT)
        prompt = self._completion_prompt(prompts[0], completion.prompt)
        request = self._generation(
            f"cmpl-{request_id}", Endpoint.COMPLETIONS, completion, prompt, completion.max_tokens
        )
        if len(prompts) > 1 and request.stream:
            raise EngineError(f"this engine streams the answer to one prompt, got {len(prompts)}", param="prompt")
        return replace(request, answers=request.answers * len(prompts))

    def messages(self, body: bytes, request_id: str) -> GenerationRequest:
        raw, asked = _read(body, AskedMessage)
        prompt = self._converted_prompt(self._from_messages, raw, asked)
        return self._generation(f"msg_{request_id}", Endpoint.MESSAGES, asked, prompt, asked.max_tokens)

    def count_tokens(self, body: bytes) -> int:
        raw, asked = _read(body, AskedTokens)
        self._model(asked.model)
        return len(self._converted_prompt(self._from_messages, raw, AskedGeneration()).tokens)

    def response(self, body: bytes, request_id: str) -> GenerationRequest:
        """A request of the Responses API. Responses are not stored."""
        raw, asked = _read(body, AskedResponse)
        if asked.previous_response_id is not None:
            message = f"Response with id '{asked.previous_response_id}' not found."
            raise EngineError(message, status=HTTPStatus.NOT_FOUND, param="response_id")
        prompt = self._converted_prompt(self._from_responses, raw, asked)
        request_id = asked.request_id or f"resp_{request_id}"
        return self._generation(request_id, Endpoint.RESPONSES, asked, prompt, asked.max_output_tokens)

    def speech(self, body: bytes, request_id: str) -> GenerationRequest:
        _, asked = _read(body, AskedSpeech)
        prompt = Prompt(self._encode(asked.input, True))
        request = self._generation(f"speech-{request_id}", Endpoint.OTHER, asked, prompt, asked.max_tokens)
        audio = asked.response_format if asked.stream_format == "audio" else asked.stream_format
        return replace(request, stream=True, audio=audio)

    def embedding(self, body: bytes) -> tuple[str, tuple[array[int], ...], str]:
        _, embedding = _read(body, AskedEmbedding)
        model, _ = self._model(embedding.model)
        if embedding.dimensions is not None:
            raise EngineError(f"Model {model!r} does not support Matryoshka embeddings; dimensions must be unset.")
        inputs = self._prompts(embedding.input, True)
        for tokens in inputs:
            self._check_length(len(tokens), 0)
        return model, inputs, embedding.encoding_format

    def tokenize(self, body: bytes) -> array[int]:
        """Tokens of a `/tokenize` request: a prompt with special tokens, or messages without."""
        raw, given = _read(body, AskedTokens)
        self._model(given.model)
        if given.messages is not None:
            return self._encode(self._render(raw), bool(given.add_special_tokens))
        if given.prompt is not None:
            return self._encode(given.prompt, given.add_special_tokens is not False)
        raise EngineError("either prompt or messages is required", param="prompt")

    def detokenize(self, body: bytes) -> str:
        tokens = self._checked_ids(decode_body(body, dict[str, Any]).get("tokens"), "tokens")
        return self._text(tokens)

    def _generation(
        self,
        request_id: str,
        endpoint: Endpoint,
        body: AskedGeneration,
        prompt: Prompt,
        max_tokens: int | None,
    ) -> GenerationRequest:
        model, adapter = self._model(body.model)
        options = body.stream_options
        _check_options(body, max_tokens)
        self._check_length(len(prompt.tokens), max_tokens or 1)
        if (answers := body.n or 1) > 1 and self._config.front_end == "rust":
            raise EngineError("Only n=1 is supported.", param="n")
        if answers > 1 and body.stream:
            raise EngineError(f"this engine streams only n=1, got {answers}", param="n")
        output = self._answers.output(endpoint, body, prompt, max_tokens)
        choice = body.tool_choice.get("type") if isinstance(body.tool_choice, dict) else body.tool_choice
        if choice not in (None, "auto", "none") and output.call is None:
            raise EngineError("this engine calls only tools that a message lists as `tool_call:`", param="tool_choice")
        return GenerationRequest(
            id=request_id,
            endpoint=endpoint,
            model=model,
            prompt=prompt.tokens,
            output=output,
            adapter=adapter,
            salt=body.cache_salt or "",
            stream=bool(body.stream),
            include_usage=self._config.forces_usage or bool(options and options.include_usage),
            continuous_usage=self._config.forces_usage or bool(options and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            include_reasoning=not isinstance(body, AskedChat) or body.include_reasoning is not False,
            stream_interval=self._config.stream_interval,
            engine=self._engine,
            answers=answers,
            handoff={name: value for name in _HANDOFF_FIELDS if (value := getattr(body, name)) is not None},
        )

    def _chat_prompt(self, chat: Mapping[str, Any], body: AskedGeneration, given: object = None) -> Prompt:
        listed = next_answer(chat)
        if given is not None and not _has_media(chat):
            prompt = Prompt(self._checked_ids(given, "kv_transfer_params.prompt_token_ids"), is_given=True)
        else:
            prompt = Prompt(self._encode(self._render(chat), bool(body.add_special_tokens)))
        if listed is None:
            return prompt
        text, whole = self._render(chat), self._render(with_answer(chat, listed))
        thinks = text.endswith(THINK) and not whole.startswith(text)  # the prompt begins reasoning: the answer has none
        shared = len(commonprefix([text.removesuffix(THINK) if thinks else text, whole]))
        written = END_THINK * thinks + whole[shared:]
        return prompt._replace(answer=self._encode(written, False))

    def _completion_prompt(self, tokens: array[int], given: AskedPrompts) -> Prompt:
        text = given if isinstance(given, str) else self._text(tokens)
        if not (listed := listed_answers(text)):
            return Prompt(tokens)
        answer = self._encode(listed[0].text, False) + token_array([self._end])
        return Prompt(tokens, answer, is_given=True)

    def _converted_prompt(self, conversion: Conversion, raw: Mapping[str, Any], body: AskedGeneration) -> Prompt:
        try:
            return self._chat_prompt(conversion.chat(raw), body, self._given_tokens(body))
        except Unrenderable as error:
            raise EngineError(str(error)) from error

    def _given_tokens(self, chat: AskedGeneration) -> object:
        """The prompt as token ids, if they are in the field that this engine reads; else None."""
        if self._config.handoff.dialect == "trtllm":
            return getattr(chat, "prompt_token_ids", None)
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
        if self._config.misreads:
            raw = MISREADINGS[self._config.misreads](raw)
        try:
            if self._rust is not None:
                text: str = self._rust.template.render(self._rust.template_body(raw))
                return text
            return self._config.render(raw)
        except ClientError as error:
            raise EngineError(str(error), param=error.param) from error
        except Unrenderable as error:
            raise EngineError(f"this engine supports only text: {error}", param="messages") from error

    def _prompts(self, value: AskedPrompts, add_special_tokens: bool) -> tuple[array[int], ...]:
        if isinstance(value, str):
            return (self._encode(value, add_special_tokens),)
        if any(isinstance(item, int) for item in value):
            return (self._checked_ids(value, "prompt"),)
        return tuple(
            self._encode(item, add_special_tokens) if isinstance(item, str) else self._checked_ids(item, "prompt")
            for item in value
        )

    def _checked_ids(self, value: object, param: str) -> array[int]:
        try:
            tokens = token_array(value)  # type: ignore[arg-type]  # rejects what is not a list of u32
        except (TypeError, OverflowError) as error:
            raise EngineError(f"not a list of token ids: {error}", param=param) from error
        if not tokens:
            raise EngineError(f"`{param}` must be a non-empty list of non-negative integers.", param=param)
        if (highest := max(tokens)) >= self._config.tokenizer.vocabulary_size:
            raise EngineError(f"Token id {highest} is out of vocabulary", param=param)
        return tokens

    def _text(self, tokens: array[int]) -> str:
        decode = self._config.tokenizer.decode_stream(token_array([]), skip_special_tokens=False)
        texts = [decode(token) for token in tokens]
        return "".join(text or "" for text in texts) + ("\ufffd" if texts[-1] is None else "")

    def _encode(self, text: str, add_special_tokens: bool) -> array[int]:
        return self._config.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def load_adapter(self, body: bytes) -> bytes:
        fields = decode_body(body, dict[str, Any])
        name = fields.get("lora_name")
        if not name or not fields.get("lora_path"):
            raise EngineError("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters and not fields.get("load_inplace"):
            raise EngineError(f"The lora adapter '{name}' has already been loaded.")
        self.adapters.add(name)
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    def unload_adapter(self, body: bytes) -> bytes:
        name = decode_body(body, dict[str, Any]).get("lora_name")
        if name not in self.adapters:
            raise EngineError(f"The lora adapter '{name}' cannot be found.", status=HTTPStatus.NOT_FOUND)
        self.adapters.discard(name)
        return f"Success: LoRA adapter '{name}' removed successfully.".encode()


def decode_body(body: bytes, body_type: type[_T]) -> _T:
    """The decoded JSON body. Raises `EngineError`."""
    try:
        return msgspec.json.decode(body, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"invalid JSON body: {error}") from error


def _read(body: bytes, body_type: type[_T]) -> tuple[dict[str, Any], _T]:
    """All fields of a body, and those that the engine reads."""
    raw = decode_body(body, dict[str, Any])
    try:
        return raw, msgspec.convert(raw, body_type)
    except msgspec.ValidationError as error:
        raise EngineError(str(error)) from error


def _check_options(body: AskedGeneration, max_tokens: int | None) -> None:
    for name in ("logprobs", "echo", "suffix") if isinstance(body, AskedCompletion) else ("logprobs",):
        if (value := getattr(body, name)) is not None and value is not False:
            raise EngineError(f"this engine does not support {name}", param=name)
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


def _has_media(chat: Mapping[str, Any]) -> bool:
    contents = [message.get("content") for message in chat["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") not in ("text", "input_text") for part in parts)
