"""What would this whole answer have looked like as a stream?

For clients that asked for a stream and whose answer is complete before anybody could stream it. Pure: bytes in, bytes
out. This file never leaves out anything that the answer says.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.types import Endpoint

_DONE = b"data: [DONE]\n\n"


class _Options(msgspec.Struct):
    include_usage: bool = False


class _Asked(msgspec.Struct):
    stream_options: _Options | None = None


def as_stream(endpoint: Endpoint, answer: bytes, asked: bytes) -> bytes:
    """Server-sent events that say what `answer` says; a usage where the client's body, `asked`, wants one.

    Raises `ValueError` where `answer` is none of that endpoint."""
    chat = endpoint is Endpoint.CHAT
    try:
        whole = msgspec.json.decode(answer)
        shared = {name: whole[name] for name in ("id", "created", "model") if name in whole}
        steps = [step for choice in whole["choices"] for step in (_chat_steps(choice) if chat else [dict(choice)])]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an answer to {endpoint.value}: {error!r}") from error
    shared["object"] = "chat.completion.chunk" if chat else "text_completion"
    events = [{**shared, "choices": [step]} for step in steps]
    options = msgspec.json.decode(asked, type=_Asked, strict=False).stream_options
    if options is not None and options.include_usage:
        events.append({**shared, "choices": [], "usage": whole.get("usage")})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + _DONE


def _chat_steps(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A choice as two: what is said, and why it ends."""
    said = {name: value for name, value in choice.get("message", {}).items() if value is not None}
    if "tool_calls" in said:
        said["tool_calls"] = [{"index": number, **call} for number, call in enumerate(said["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name != "message"}
    return [{**rest, "delta": said, "finish_reason": None}, {**rest, "delta": {}, "logprobs": None}]
