"""The usage of a continued answer: each token counts once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.request.continuation.record import Record
from router.request.continuation.stream_events import written
from router.request.continuation.terms import Terms


def added_up(usage: Mapping[str, Any], prompt_tokens: int, kept: int, reasoning: int | None) -> dict[str, Any]:
    """A later pod's usage, with the kept tokens as output. `reasoning`: all tokens of reasoning; None: as it comes.
    Raises `ValueError` for one that is not a usage."""
    try:
        new, details = usage["completion_tokens"], usage.get("completion_tokens_details")
        found = {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": kept + new}
        found["total_tokens"] = prompt_tokens + kept + new
        if details and reasoning is not None:
            found["completion_tokens_details"] = {**details, "reasoning_tokens": reasoning}
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            found["prompt_tokens_details"] = {
                **usage["prompt_tokens_details"],
                "cached_tokens": min(cached, prompt_tokens),
            }
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a usage: {error!r}") from error
    return found


def last_events(record: Record, terms: Terms, prompt_tokens: int, reasoning: int, finish: str = "") -> bytes:
    """What is missing of an answer whose text is complete: the `finish` reason where that is missing, too, usage and
    `[DONE]`."""
    head = {
        "id": record.id,
        "object": "chat.completion.chunk" if terms.is_chat else "text_completion",
        "created": record.created,
        "model": record.model,
    }
    events = b""
    if finish:
        said: dict[str, Any] = {"delta": {}} if terms.is_chat else {"text": ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        events += written({**head, "choices": [choice]})
    if terms.wants_usage and not record.has_usage:
        made = len(record.ids)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + made,
            "completion_tokens": made,
            "prompt_tokens_details": None,
        }
        if terms.is_chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        events += written({**head, "choices": [], "usage": usage})
    return events
