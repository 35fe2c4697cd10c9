"""Encodes responses of `/v1/messages` in the format of vLLM 0.32.

Source: docs/apis.md#streams. Takes values and returns bytes; no I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.sim.mock.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from router.sim.mock.mock_requests import EngineError, GenerationRequest
from router.sim.mock.mock_responses import encode, error_type, named_event
from router.sim.mock.vocabulary import FinishReason

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_frames(error: EngineError) -> bytes:
    return named_event({"type": "error", "error": {"type": error_type(error), "message": str(error)}})


def message_body(request: GenerationRequest, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS) -> bytes:
    text = "".join(request.output.texts)
    block = _block(request)
    block |= {"input": _decoded(text)} if request.output.call else {"text": text}
    message = _message(request, [block]) | {"stop_reason": _stop_reason(request)}
    counts = {"output_tokens": len(request.output.tokens), **_usage(request, cached_tokens)}
    return encode({**message, **handoff.top, "usage": counts})


class MessageFrames:
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._texts = request.output.texts

    def opening(self) -> bytes:
        return b""

    def tokens(self, first: int, end: int) -> list[bytes]:
        output = self._request.output
        name, field = ("input_json_delta", "partial_json") if output.call else ("text_delta", "text")
        frames = [
            _event("content_block_delta", {"index": 0, "delta": {"type": name, field: text}})
            for text in self._texts[first:end]
            if text
        ]
        if first == 0:
            usage = {"input_tokens": len(self._request.prompt), "output_tokens": 0}
            start = _event("message_start", {"message": _message(self._request, []) | {"usage": usage}})
            empty: dict[str, Any] = {"input": {}} if output.call else {"text": ""}
            block = _block(self._request) | empty
            frames.insert(0, start + _event("content_block_start", {"index": 0, "content_block": block}))
        return frames

    def closing(self, cached_tokens: int) -> bytes:
        delta = {"stop_reason": _stop_reason(self._request), "stop_sequence": None}
        counts = {"output_tokens": len(self._request.output.tokens), **_usage(self._request, cached_tokens)}
        ended = _event("content_block_stop", {"index": 0}) + _event("message_delta", {"delta": delta, "usage": counts})
        return ended + _event("message_stop", {})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return named_event({"type": name, **fields})


def _message(request: GenerationRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": request.id, "type": "message", "role": "assistant", "model": request.model}
    return head | {"content": content, "stop_reason": None, "stop_sequence": None}


def _block(request: GenerationRequest) -> dict[str, Any]:
    call = request.output.call
    if call is None:
        return {"type": "text"}
    return {"type": "tool_use", "id": f"toolu_{request.id}", "name": call}


def _stop_reason(request: GenerationRequest) -> str:
    return _STOP_REASONS.get(request.output.finish_reason, "end_turn")


def _usage(request: GenerationRequest, cached_tokens: int) -> dict[str, int]:
    """Input tokens by what the cache did with them; their sum is the prompt's length. The last token is in no block
    that was cached before: clients take `input_tokens: 0` for a missing number."""
    written = len(request.prompt) - cached_tokens - 1
    return {"input_tokens": 1, "cache_creation_input_tokens": written, "cache_read_input_tokens": cached_tokens}


def _decoded(arguments: str) -> Any:
    """The arguments of a call, which may be cut."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
