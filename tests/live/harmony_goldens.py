"""Records the tokens that vLLM's renderer gives to bodies for gpt-oss, for `tests/parity`.

These are chats, and the random bodies of `message_goldens.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from router.types import Endpoint
from tests.live.engines import HOME, EngineProcess, start_renderer
from tests.live.message_bodies import Body
from tests.live.message_goldens import BODIES, digest, record, rendered

DATE = "2026-01-02"
MODEL = HOME / "model" / "tiny-gptoss"
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "openai")
_HI: Body = {"role": "user", "content": "Hi"}
_LOOK: Body = {
    "name": "look",
    "description": "Looks.\\nTwice.",
    "parameters": {"properties": {"a": {"type": "string"}}},
}
_TOOLS = [{"type": "function", "function": _LOOK}, {"type": "function", "function": {"name": "rest"}}]
_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": "K\u00f6ln"}'}}
_PARTS = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
CHATS: tuple[Body, ...] = (
    {"messages": [_HI]},
    {"messages": [_HI], "tools": _TOOLS},
    {"messages": [_HI], "reasoning_effort": "low"},
    {"messages": [{"role": "system", "content": "Be brief."}, _HI], "reasoning_effort": "high"},
    {"messages": [{"role": "developer", "content": _PARTS}, _HI], "tools": _TOOLS},
    {"messages": [{"role": "system", "content": ""}, _HI], "tools": _TOOLS},
    {"messages": [_HI, {"role": "system", "content": "Late."}, {"role": "user", "content": _PARTS}]},
    {"messages": [_HI, {"role": "assistant", "content": "", "reasoning": "R"}, _HI]},
    {
        "messages": [
            {"role": "system", "content": "S"},
            _HI,
            {"role": "assistant", "content": "I look.", "reasoning": "First.", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": _PARTS},
            {"role": "assistant", "tool_calls": [{**_CALL, "id": "2"}, {**_CALL, "id": "3"}]},
            {"role": "tool", "tool_call_id": "3", "content": "3"},
            {"role": "assistant", "content": "Done.", "reasoning": "Second."},
            _HI,
            {"role": "assistant", "content": _PARTS, "reasoning": "Third."},
            {"role": "user", "content": ""},
        ],
        "tools": _TOOLS,
    },
)


def renderer(port: int) -> EngineProcess:
    """A running renderer of gpt-oss, with a fixed date."""
    return start_renderer("render-gptoss", port, MODEL, FLAGS, {"VLLM_SYSTEM_START_DATE": DATE})


def recordings(client: httpx.Client) -> Iterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """(endpoint, {body, tokens: their number, digest} of each body that the engine accepts)."""
    chats = ((body, rendered(client, Endpoint.CHAT, body)) for body in CHATS)
    yield (
        Endpoint.CHAT,
        [{"body": body, "tokens": len(found), "digest": digest(found)} for body, found in chats if found],
    )
    for endpoint in BODIES:
        yield endpoint, record(client, "gptoss", endpoint)
