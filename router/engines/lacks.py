"""What a request needs that not every pod of its model has, and the answers by which a pod says that it lacks it.

A need is the path of an inference endpoint, or one of the parameters below. An answer is only a suspicion, because a
client may have caused it: `feeds/lacks_test.py` asks the pod itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from router.engines.forwarded_paths import INFERENCE_PATHS
from router.errors import MAX_SAID_BYTES
from router.prompt.completion import is_listed
from router.types import Endpoint, InferenceRequest

SEVERAL_ANSWERS = "n > 1"
LISTED_PROMPTS = "a list of prompts"
CONTINUING_ALONE = "continue_final_message without add_generation_prompt: false"
LARGE_BODY = "a body above 32 MiB"
USAGE_OF_STREAMS = "stream_options"
"""Where only the router asks for it, a pod without it is not asked."""
_LARGE_BYTES = 32 * 1024 * 1024
_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
LACK_STATUSES = frozenset({*_REFUSED, HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED})


class Lack(NamedTuple):
    """An answer that says what its pod lacks: the path that it was asked at, or a parameter (`need`). `said`: the
    start of its body."""

    status: HTTPStatus
    said: re.Pattern[bytes]
    need: str = ""


_USAGE = re.compile(rb".*(stream_options|include_usage)", re.DOTALL)
COMMON_LACKS = (
    *(Lack(status, _USAGE, USAGE_OF_STREAMS) for status in _REFUSED),
    Lack(HTTPStatus.NOT_IMPLEMENTED, re.compile(b"")),
    Lack(HTTPStatus.NOT_FOUND, re.compile(rb"\Z")),
    Lack(HTTPStatus.NOT_FOUND, re.compile(rb'\{"detail": ?"Not Found"\}\Z')),
)
"""How servers in general say it: an empty body in Rust, `Not Found` in FastAPI. It differs for an unknown model."""


def needs(request: InferenceRequest, target: bytes) -> tuple[str, ...]:
    """What this request needs: its path first. Nothing for paths that are not asked for inference, such as that of a
    stored response."""
    path = target.partition(b"?")[0].decode("latin-1") if request.endpoint is Endpoint.OTHER else request.endpoint.value
    if path not in INFERENCE_PATHS:
        return ()
    fields = request.prompt
    given = {
        SEVERAL_ANSWERS: request.choices > request.prompts,
        LISTED_PROMPTS: request.endpoint is Endpoint.COMPLETIONS and is_listed(fields.get("prompt")),
        CONTINUING_ALONE: fields.get("continue_final_message") and fields.get("add_generation_prompt") is None,
        LARGE_BODY: len(request.body) > _LARGE_BYTES,
    }
    return (path, *(need for need, is_given in given.items() if is_given))


def lacking(rows: Iterable[Lack], status: int, said: bytes, needed: Sequence[str]) -> str:
    """What of `needed` a pod lacks by its answer; "" if the answer is about something else."""
    if status not in LACK_STATUSES or not needed:
        return ""
    start = said[:MAX_SAID_BYTES]
    found = (one.need or needed[0] for one in rows if one.status == status and one.said.match(start))
    return next((need for need in found if need in needed), "")


def question(need: str, model: str) -> tuple[str, Mapping[str, Any]] | None:
    """The path and the body of a request that shows whether a pod has what is needed; None where none can. The empty
    body has no model and no id that could be unknown, and nothing is generated for it."""
    hello = [{"role": "user", "content": "Hello"}]
    chat = {"model": model, "messages": hello, "max_tokens": 1}
    if need == LARGE_BODY:
        return None
    if need == SEVERAL_ANSWERS:
        return Endpoint.CHAT.value, {**chat, "n": 2}
    if need == CONTINUING_ALONE:
        messages = [*hello, {"role": "assistant", "content": "Well, "}]
        return Endpoint.CHAT.value, {**chat, "messages": messages, "continue_final_message": True}
    if need == USAGE_OF_STREAMS:
        return Endpoint.CHAT.value, {**chat, "stream": True, "stream_options": {"include_usage": True}}
    if need == LISTED_PROMPTS:
        return Endpoint.COMPLETIONS.value, {"model": model, "prompt": ["Hello", "Hello"], "max_tokens": 1}
    return need, {}
