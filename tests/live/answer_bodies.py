"""Bodies to which a model that knows its answers has one answer, and streams as bytes.

The model answers "script NAME" by heart, with margins between its tokens: with random weights, an answer has no
reasoning, no calls, and two runs of it may differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import httpx

from tests.live.answer_scripts import TOOLS
from tests.live.engines import HOME
from tests.live.live_fleet import DEADLINE_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = HOME / "model" / os.environ.get("WARMROUTE_ANSWERS_MODEL", "answers-qwen3")


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "sunny": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days", "sunny", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}


def chat(script: str, *, thinks: bool = False, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "max_tokens": 160,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"script {script}"}],
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    return {**body, **fields}


CASES: dict[str, dict[str, Any]] = {
    "plain": chat("plain"),
    "bytes": chat("bytes"),
    "thinking": chat("think", thinks=True),
    "hidden thinking": chat("think", thinks=True, include_reasoning=False),
    "stop": chat("stops", stop=["STOP", "ENDED"]),
    "stop of many tokens": chat("stops", stop=["STO three EN", "zzzz"]),
    "included stop": chat("stops", stop=["STO three EN"], include_stop_str_in_output=True),
    "length": chat("plain", max_tokens=30),
    "tool": chat("tool", tools=TOOLS),
    "tools": chat("tools", thinks=True, tools=TOOLS),
    "json": chat("json", response_format=FORMAT),
    "json after thinking": chat("thinkjson", thinks=True, response_format=FORMAT),
    "log probabilities": chat("bytes", logprobs=True, top_logprobs=1),
    "sampled": chat("bytes", temperature=0.02),
    "sampled thinking": chat("think", thinks=True, temperature=0.02),
    "no usage": chat("plain", stream_options=None),
    "continuous usage": chat("plain", stream_options={"include_usage": True, "continuous_usage_stats": True}),
}


_PROMPT = "<|im_start|>user\nscript {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def completion(script: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 70, "prompt": _PROMPT.format(script)}
    return {**body, **fields}


def streamed(
    url: str,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    on_event: Callable[[int, httpx.Headers], None] | None = None,
) -> bytes:
    """The bytes of a stream. `on_event` is called with the number of events so far."""
    received = b""
    with httpx.stream("POST", url + path, json=body, timeout=DEADLINE_S) as response:
        for piece in response.iter_raw():
            received += piece
            if on_event is not None:
                on_event(received.count(b"data: {"), response.headers)
    return received
