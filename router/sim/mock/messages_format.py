"""Encodes responses of `/v1/messages` in the format of vLLM 0.32.

Source: docs/apis.md#streams. Takes values and returns bytes; no I/O.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from router.sim.mock.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from router.sim.mock.mock_requests import EngineError, GenerationRequest
from router.sim.mock.mock_responses import encode, error_type, named_event
from router.sim.mock.vocabulary import FinishReason, Piece

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {"content": "text", "reasoning": "thinking", "name": "tool_use", "arguments": "tool_use"}
"""The type of the block of a piece."""


def error_frames(error: EngineError) -> bytes:
    return named_event({"type": "error", "error": {"type": error_type(error), "message": str(error)}})


def message_body(request: GenerationRequest, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS) -> bytes:
    message = _message(request, _blocks(request)) | {"stop_reason": _stop_reason(request)}
    counts = {"output_tokens": len(request.output.tokens), **_usage(request, cached_tokens)}
    return encode({**message, **handoff.top, "usage": counts})


class MessageFrames:
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._open = ""
        """The kind of the block that is open, and its number."""
        self._index = -1

    def opening(self) -> bytes:
        return b""

    def tokens(self, first: int, end: int) -> list[bytes]:
        frames = [self._piece(piece) for piece in self._request.output.pieces[first:end]]
        if first == 0:
            usage = {"input_tokens": len(self._request.prompt), "output_tokens": 0}
            frames.insert(0, _event("message_start", {"message": _message(self._request, []) | {"usage": usage}}))
        return frames

    def _piece(self, piece: Piece) -> bytes:
        """The events of one token."""
        kind = _KINDS.get(piece.kind)
        if kind is None or not (piece.text or piece.kind == "name"):
            return b""
        frame = b""
        if piece.kind == "name" or kind != self._open:
            frame, self._open, self._index = self._stop(), kind, self._index + 1
            block: dict[str, Any] = {"input": {}} if kind == "tool_use" else {kind: ""}
            frame += self._block("start", content_block=_opened(kind, piece.text) | block)
        if piece.kind != "name":
            name, field = ("input_json", "partial_json") if kind == "tool_use" else (kind, kind)
            frame += self._block("delta", delta={"type": f"{name}_delta", field: piece.text})
        return frame

    def _stop(self) -> bytes:
        """The end of the open block."""
        if not self._open:
            return b""
        signature = {"type": "signature_delta", "signature": uuid.uuid4().hex}
        signed = self._block("delta", delta=signature) if self._open == "thinking" else b""
        return signed + self._block("stop")

    def _block(self, event: str, **fields: Any) -> bytes:
        return _event(f"content_block_{event}", {"index": self._index, **fields})

    def closing(self, cached_tokens: int) -> bytes:
        delta = {"stop_reason": _stop_reason(self._request), "stop_sequence": None}
        counts = {"output_tokens": len(self._request.output.tokens), **_usage(self._request, cached_tokens)}
        return self._stop() + _event("message_delta", {"delta": delta, "usage": counts}) + _event("message_stop", {})


def _blocks(request: GenerationRequest) -> list[dict[str, Any]]:
    """The content of a whole message."""
    blocks: list[dict[str, Any]] = []
    for piece in request.output.pieces:
        kind = _KINDS.get(piece.kind)
        if kind is None or not (piece.text or piece.kind == "name"):
            continue
        if piece.kind == "name" or not blocks or blocks[-1]["type"] != kind:
            signature = {"signature": uuid.uuid4().hex} if kind == "thinking" else {}
            blocks.append(_opened(kind, piece.text) | {"input" if kind == "tool_use" else kind: ""} | signature)
        if piece.kind != "name":
            blocks[-1]["input" if kind == "tool_use" else kind] += piece.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _decoded(block["input"])
    return blocks


def _opened(kind: str, name: str) -> dict[str, Any]:
    """A block without its content. The ids of calls are random, as those of the engine."""
    call = {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "name": name} if kind == "tool_use" else {}
    return {"type": kind, **call}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return named_event({"type": name, **fields})


def _message(request: GenerationRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": request.id, "type": "message", "role": "assistant", "model": request.model}
    return head | {"content": content, "stop_reason": None, "stop_sequence": None}


def _stop_reason(request: GenerationRequest) -> str | None:
    return _STOP_REASONS.get(request.output.finish_reason)


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
