"""Encodes responses of `/v1/messages` in the format of vLLM 0.32.

Source: docs/apis.md#streams. Takes values and returns bytes; no I/O.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from loadtest.mock_engine.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest
from loadtest.mock_engine.mock_responses import Frames, encode, error_type, named_event
from loadtest.mock_engine.vocabulary import FinishReason, Piece

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {"content": "text", "reasoning": "thinking", "name": "tool_use", "arguments": "tool_use"}
"""The type of the block of a piece."""


def error_frames(error: EngineError) -> bytes:
    return named_event({"type": "error", "error": {"type": error_type(error), "message": str(error)}})


def message_body(request: GenerationRequest, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS) -> bytes:
    message = _message(request, _blocks(request)) | _stop(request)
    counts = {"output_tokens": len(request.output.tokens), **_usage(request, cached_tokens)}
    return encode({**message, **handoff.top, "usage": counts})


class MessageFrames(Frames):
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._open = ""
        """The kind of the block that is open, and its number."""
        self._index = -1

    def tokens(self, first: int, end: int) -> list[bytes]:
        pieces = self._request.output.pieces[first:end]
        frames = [b"".join(map(named_event, self.events(piece))) for piece in pieces]
        if first == 0:
            usage = {"input_tokens": len(self._request.prompt), "output_tokens": 0}
            frames.insert(0, _event("message_start", {"message": _message(self._request, []) | {"usage": usage}}))
        return frames

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Those of one token. The ids of calls are random, as those of the engine."""
        kind, begins = _KINDS.get(piece.kind), piece.kind == "name"
        if kind is None or not (piece.text or begins):
            return
        if begins or kind != self._open:
            yield from self.stop()
            self._open, self._index = kind, self._index + 1
            call = {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "name": piece.text, "input": {}}
            yield self._block("start", content_block={"type": kind, **(call if begins else {kind: ""})})
        if not begins:
            name, field = ("input_json", "partial_json") if kind == "tool_use" else (kind, kind)
            yield self._block("delta", delta={"type": f"{name}_delta", field: piece.text})

    def stop(self) -> Iterator[dict[str, Any]]:
        """The end of the open block."""
        if self._open == "thinking":
            yield self._block("delta", delta={"type": "signature_delta", "signature": uuid.uuid4().hex})
        if self._open:
            yield self._block("stop")

    def _block(self, event: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{event}", "index": self._index, **fields}

    def closing(self, cached_tokens: int) -> bytes:
        counts = {"output_tokens": len(self._request.output.tokens), **_usage(self._request, cached_tokens)}
        last = _event("message_delta", {"delta": _stop(self._request), "usage": counts})
        ended = b"".join(map(named_event, self.stop())) + last
        return ended + _event("message_stop", {})


def _blocks(request: GenerationRequest) -> list[dict[str, Any]]:
    """The content of a whole message: what its stream adds up to."""
    blocks: list[dict[str, Any]] = []
    frames = MessageFrames(request)
    for event in chain(chain.from_iterable(map(frames.events, request.output.pieces)), frames.stop()):
        if block := event.get("content_block"):
            blocks.append(block)
        for field, text in event.get("delta", {}).items():
            if field != "type":
                blocks[-1][field] = blocks[-1].get(field, "") + text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _decoded(block.pop("partial_json", ""))
    return blocks


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return named_event({"type": name, **fields})


def _message(request: GenerationRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": request.id, "type": "message", "role": "assistant", "model": request.model}
    return head | {"content": content, "stop_reason": None, "stop_sequence": None}


def _stop(request: GenerationRequest) -> dict[str, str | None]:
    string = request.output.stop_reason
    reason = _STOP_REASONS.get(request.output.finish_reason) if string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": string}


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
