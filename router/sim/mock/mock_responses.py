"""How does vLLM word this?

Bodies and SSE frames of every answer, shaped as vLLM 0.32 shapes them (reference/protocols.md 4.2, 4.3, 6.1, 6.2).
Values in, bytes out: this file never sends anything.
"""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import xxhash

from router.sim.mock.handoff_dialects import HandoffFields
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.mock_requests import EmbeddingRequest, EngineError, GenerationRequest
from router.types import Endpoint

DONE = b"data: [DONE]\n\n"
EMBEDDING_DIMENSIONS = 8

_ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}

_NOTHING = HandoffFields()

encode = msgspec.json.Encoder().encode


def error_body(refusal: EngineError) -> bytes:
    """`{"error": {message, type, param, code}}`, with the HTTP status as an int for code."""
    status = refusal.status
    kind = _ERROR_TYPES.get(status, status.phrase)
    return encode({"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": int(status)}})


def error_frames(refusal: EngineError) -> bytes:
    """The same in a stream that has begun already: its status stays 200."""
    return b"data: " + error_body(refusal) + b"\n\n" + DONE


def models_body(config: MockEngineConfig, created_s: int) -> bytes:
    """Cards of the served names and of the adapters, which name their parent and no length of their own."""
    base = config.models[0]
    cards = [_card(name, base, None, config.max_model_len, created_s) for name in config.models]
    cards += [_card(name, f"/adapters/{name}", base, None, created_s) for name in config.adapters]
    return encode({"object": "list", "data": cards})


def tokens_body(tokens: array[int], max_model_len: int) -> bytes:
    """The answer of `/tokenize`."""
    listed = tokens.tolist()
    return encode({"count": len(listed), "max_model_len": max_model_len, "tokens": listed, "token_strs": None})


def embedding_body(ask: EmbeddingRequest, embedding_id: str, created_s: int) -> bytes:
    """One vector for each input, the same for the same tokens."""
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(tokens, ask.base64)}
        for index, tokens in enumerate(ask.inputs)
    ]
    count = sum(len(tokens) for tokens in ask.inputs)
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
    return encode(
        {
            "id": f"embd-{embedding_id}",
            "object": "list",
            "created": created_s,
            "model": ask.model,
            "data": data,
            "usage": usage,
        }
    )


def usage(ask: GenerationRequest, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts; `cached_tokens` is always told, as with `--enable-prompt-tokens-details`."""
    prompt_tokens = len(ask.prompt)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "created_cache_tokens": prompt_tokens - cached_tokens,
        },
    }


def unary_body(ask: GenerationRequest, created_s: int, cached_tokens: int, told: HandoffFields = _NOTHING) -> bytes:
    """The whole answer in one body. `told` is what a prefill leg says beyond the usual."""
    text = "".join(ask.answer.texts)
    chat = ask.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": ask.answer.finish_reason, "stop_reason": None}
    body = _envelope(ask, created_s, "chat.completion" if chat else "text_completion", choice)
    if ask.return_token_ids:
        choice["token_ids"] = ask.answer.tokens
        (body if chat else choice)["prompt_token_ids"] = ask.prompt.tolist()
    choice |= told.choice
    body |= told.top
    return encode(body | {"usage": usage(ask, len(ask.answer.tokens), cached_tokens)})


class StreamFrames:
    """The SSE frames of one streamed answer."""

    def __init__(self, ask: GenerationRequest, created_s: int) -> None:
        self._ask = ask
        self._chat = ask.endpoint is Endpoint.CHAT
        self._created_s = created_s
        self._object = "chat.completion.chunk" if self._chat else "text_completion"

    def tokens(self, first: int, end: int) -> list[bytes]:
        """One frame for each of tokens `[first, end)`; before token 0 of a chat, the frame that names the role."""
        frames = [self._token(index) for index in range(first, end)]
        if first == 0 and self._chat:
            role = self._frame({"delta": {"role": "assistant", "content": ""}}, None, self._prompt_token_ids())
            frames.insert(0, role)
        return frames

    def closing(self, cached_tokens: int) -> bytes:
        """Why it ended, the usage where asked for, and the end mark."""
        ask = self._ask
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        frames = self._frame(empty, ask.answer.finish_reason, {})
        if ask.include_usage:
            counted = usage(ask, len(ask.answer.tokens), cached_tokens)
            frames += _sse(_envelope(ask, self._created_s, self._object) | {"usage": counted})
        return frames + DONE

    def _token(self, index: int) -> bytes:
        text = self._ask.answer.texts[index]
        choice: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        if self._ask.return_token_ids:
            choice["token_ids"] = (self._ask.answer.tokens[index],)
            if index == 0 and not self._chat:
                choice |= self._prompt_token_ids()
        return self._frame(choice, None, {})

    def _prompt_token_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._ask.prompt.tolist()} if self._ask.return_token_ids else {}

    def _frame(self, choice: dict[str, Any], finish_reason: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}
        return _sse(_envelope(self._ask, self._created_s, self._object, choice) | extra)


def _envelope(ask: GenerationRequest, created_s: int, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": ask.id, "object": kind, "created": created_s, "model": ask.model, "choices": choices}


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, created_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def _vector(tokens: array[int], as_base64: bool) -> Sequence[float] | str:
    digests = (xxhash.xxh3_64_intdigest(tokens.tobytes(), seed) for seed in range(EMBEDDING_DIMENSIONS))
    numbers = [digest / 2**63 - 1 for digest in digests]
    if as_base64:
        return base64.b64encode(struct.pack(f"<{EMBEDDING_DIMENSIONS}f", *numbers)).decode()
    return numbers
