"""Encodes responses of `/v1/responses` in the format of vLLM 0.32.

Source: docs/apis.md#streams. Takes values and returns bytes; no I/O. Instructions and tools are not repeated in
the response.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from loadtest.mock_engine.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from loadtest.mock_engine.mock_requests import GenerationRequest
from loadtest.mock_engine.mock_responses import Frames, encode, named_event

_OPENING_EVENTS = 2


def response_body(
    request: GenerationRequest, created_s: int, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS
) -> bytes:
    return encode({**_completed(request, created_s, cached_tokens), **handoff.top})


class ResponseFrames(Frames):
    def __init__(self, request: GenerationRequest, created_s: int) -> None:
        self._request = request
        self._created_s = created_s
        self._texts = request.output.texts
        self._serial = count(_OPENING_EVENTS)

    def opening(self) -> bytes:
        response = _response(self._request, self._created_s, "in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(
            named_event({"type": kind, "sequence_number": i, "response": response}) for i, kind in enumerate(kinds)
        )

    def tokens(self, first: int, end: int) -> list[bytes]:
        """One frame per token in `[first, end)`; before token 0 those that open the item and its part."""
        request = self._request
        place = _place(request)
        kind = "response.output_text.delta"
        if request.output.call is not None:
            kind = "response.function_call_arguments.delta"
        frames = []
        if first == 0:
            frames.append(self._event("response.output_item.added", output_index=0, item=_item(request, "in_progress")))
            if request.output.call is None:
                frames.append(self._event("response.content_part.added", part=_part(""), **place))
        frames += [self._event(kind, delta=text, **place) for text in self._texts[first:end] if text]
        return frames

    def closing(self, cached_tokens: int) -> bytes:
        """The end of the item, and the response with its usage."""
        request, place, text = self._request, _place(self._request), "".join(self._request.output.texts)
        if request.output.call is None:
            frames = self._event("response.output_text.done", text=text, **place)
            frames += self._event("response.content_part.done", part=_part(text), **place)
        else:
            frames = self._event("response.function_call_arguments.done", arguments=text, **place)
        frames += self._event("response.output_item.done", output_index=0, item=_item(request, "completed"))
        completed = _completed(request, self._created_s, cached_tokens)
        return frames + self._event("response.completed", response=completed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event({"type": kind, "sequence_number": next(self._serial), **fields})


def _response(request: GenerationRequest, created_s: int, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": request.id, "object": "response", "created_at": created_s, "status": status, "model": request.model}
    fixed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
    return head | fixed | {"output": output, "usage": None}


def _completed(request: GenerationRequest, created_s: int, cached_tokens: int) -> dict[str, Any]:
    finish_reason = request.output.finish_reason
    is_cut = finish_reason == "length"
    status = "incomplete" if is_cut else "cancelled" if finish_reason == "abort" else "completed"
    response = _response(request, created_s, status, [_item(request, "completed")])
    if is_cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    input_tokens, output_tokens = len(request.prompt), len(request.output.tokens)
    response["usage"] = {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": input_tokens - cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
    return response


def _item(request: GenerationRequest, status: str) -> dict[str, Any]:
    """The only item of the output; empty until it is completed."""
    text = "".join(request.output.texts) if status == "completed" else ""
    item: dict[str, Any] = {"id": _item_id(request), "status": status}
    if (call := request.output.call) is not None:
        return item | {"type": "function_call", "call_id": f"call_{_item_id(request)}", "name": call, "arguments": text}
    return item | {"type": "message", "role": "assistant", "content": [_part(text)] if text else []}


def _place(request: GenerationRequest) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": _item_id(request), "output_index": 0}
    return place if request.output.call is not None else place | {"content_index": 0, "logprobs": []}


def _item_id(request: GenerationRequest) -> str:
    """Differs between engines, as the random ids of vLLM do."""
    return f"item_{request.id}_{request.engine}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
