"""The bodies that the parity self-test sends to a pod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from router.types import Endpoint

PROBE_BLOCKS = 4
"""Minimum length of the probe in engine blocks. Several, so that the hashes of parent blocks are tested as well."""
ASSUMED_BLOCK_TOKENS = 64
"""Block size of an engine that does not report it."""
_WORDS = "naïve café 東京 Привет 🚀 ﬁne\tprint(1) don't  İstanbul 12345 … 한국어 ṩ end."

_SMALL = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAC0lEQVR42mNgQAYAAA4AATo1BFYAAAAASUVORK5CYII="
"""A PNG of 2 x 2 pixels, which models enlarge."""
_SCREENSHOT = (
    "iVBORw0KGgoAAAANSUhEUgAABQAAAALQAQAAAADnBuD7AAAAh0lEQVR42u3BMQEAAADCoPVPbQlPoAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAB4GsTfAAGc95RKAAAAAElFTkSuQmCC"
)
"""A PNG of 1280 x 720 pixels, black and white, which engines convert to RGB."""

Probe: TypeAlias = tuple[Endpoint, dict[str, Any]]
MakeGroups: TypeAlias = Callable[[str, str, int | None], Iterable[Sequence[Probe]]]
"""Makes groups of probes from a model, a nonce and the pod's block size. Of each group the first that the router reads
is sent."""


def probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Probe]:
    """Probe requests, the most thorough first: a chat with several roles, a chat without a system message (some
    templates refuse one), a completion. `nonce` prevents cache hits. Each word is at least one token."""
    text = _long_text(block_tokens)
    system = {"role": "system", "content": f"{nonce} You are a probe. {_WORDS}"}
    turns = [
        {"role": "user", "content": f"{nonce}\n{text}"},
        {"role": "assistant", "content": f"Well, {_WORDS}"},
        {"role": "user", "content": "And?"},
    ]
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    yield Endpoint.CHAT, {**common, "messages": [system, *turns]}
    yield Endpoint.CHAT, {**common, "messages": turns}
    yield Endpoint.COMPLETIONS, {**common, "prompt": f"{nonce} {text}"}


def embeddings_probe(model: str, nonce: str, block_tokens: int | None) -> Probe:
    """A text to embed. Only KV events show its tokens."""
    return Endpoint.EMBEDDINGS, {"model": model, "input": f"{nonce} {_long_text(block_tokens)}"}


def messages_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """Groups of probes of the conversion of Anthropic's messages: an agent's turn with every kind of block, then
    without what some conversions and templates do not know; and disabled thinking."""
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    text = f"{nonce}\n{_long_text(block_tokens)}"
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"place": "Köln", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [_text("21.5 C"), _text("sunny")]}
    thought = {"type": "thinking", "thinking": "First I look.", "signature": "s"}
    system = [_text("x-anthropic-billing-header: cch=1;"), _text(f"{nonce} You are a probe."), _text(_WORDS)]
    schema = {"properties": {"place": {"type": "string"}}, "required": ["place"]}
    turns = [
        {"role": "user", "content": [_text(text), _text("Look.")]},
        {"role": "assistant", "content": [thought, _text("I look."), call]},
        {"role": "user", "content": [_text("Well?"), result]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"name": "look", "description": "Weather of a place", "input_schema": schema}]
    unthinking = {"role": "assistant", "content": [_text("I look."), call]}
    fields = {**common, "system": system, "tools": tools}
    yield [
        (Endpoint.MESSAGES, {**fields, "messages": turns}),
        (Endpoint.MESSAGES, {**fields, "messages": [*turns[:3], turns[4]]}),
        (Endpoint.MESSAGES, {**fields, "messages": [turns[0], unthinking, *turns[2:]]}),
        (Endpoint.MESSAGES, {**fields, "messages": [turns[0], unthinking, turns[2], turns[4]]}),
    ]
    yield [(Endpoint.MESSAGES, {**common, "thinking": {"type": "disabled"}, "messages": turns[:1]})]


def tools_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """A group of probes of chats with tools: an agent's turn, then without a system message."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "Köln"}'}}
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    turns = [
        {"role": "system", "content": f"{nonce} You are a probe."},
        {"role": "user", "content": [_text(f"{nonce}\n{_long_text(block_tokens)}"), _text("Look.")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21.5 C"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    fields = {"model": model, "max_tokens": 1, "temperature": 0, "tools": [tool]}
    yield [(Endpoint.CHAT, {**fields, "messages": turns}), (Endpoint.CHAT, {**fields, "messages": turns[1:]})]


def responses_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """Groups of probes of the conversion of the Responses API: an agent's turn with every kind of item, then without
    what some templates do not know."""
    text = f"{nonce}\n{_long_text(block_tokens)}"
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools = [
        {"type": "function", "name": "look", "description": "Weather of a place", "parameters": schema, "strict": True},
        {"type": "custom", "name": "shell", "description": "Runs a command"},
    ]
    asked = {"role": "user", "content": [{"type": "input_text", "text": part} for part in (text, "Look.")]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "First I look."}]}
    turns = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"place": "Köln", "days": 2}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21.5 C\nsunny"},
        {"role": "user", "content": "And?"},
    ]
    late = {"role": "developer", "content": "Be brief."}
    common = {"model": model, "max_output_tokens": 1, "temperature": 0, "store": False}
    fields = {**common, "instructions": f"{nonce} You are a probe. {_WORDS}", "tools": tools}
    yield [
        (Endpoint.RESPONSES, {**fields, "input": [asked, thought, *turns[:3], late, turns[3]]}),
        (Endpoint.RESPONSES, {**fields, "input": [asked, thought, *turns]}),
        (Endpoint.RESPONSES, {**fields, "input": [asked, *turns]}),
        (Endpoint.RESPONSES, {**common, "input": [asked, *turns]}),
    ]


def picture_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """Groups of probes with a picture: its number of tokens shows the limits of its size, and the blocks behind it its
    identifier."""
    for encoded in (_SMALL, _SCREENSHOT):
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        content = [_text(f"{nonce} Look:"), shown, _text(_long_text(block_tokens))]
        messages = [{"role": "user", "content": content}]
        yield [(Endpoint.CHAT, {"model": model, "max_tokens": 1, "temperature": 0, "messages": messages})]


def _long_text(block_tokens: int | None) -> str:
    words = _WORDS.split(" ")
    length = PROBE_BLOCKS * (block_tokens or ASSUMED_BLOCK_TOKENS)
    return " ".join(words[i % len(words)] for i in range(length))


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CONVERSION_PROBES: Mapping[Endpoint, MakeGroups] = {
    Endpoint.CHAT: tools_probes,
    Endpoint.MESSAGES: messages_probes,
    Endpoint.RESPONSES: responses_probes,
}
"""The conversions that are tested, with their probes."""
PROVEN_WITH: Mapping[Endpoint, tuple[Endpoint, ...]] = {Endpoint.MESSAGES: (Endpoint.COUNT_TOKENS,)}
"""Endpoints with the same conversion as the tested one."""
