"""Renders only the end of a growing chat whose messages have more than a role and text: tools, calls, thinking.

The template renders two short chats: samples of the known messages, with short texts and one tool, and the same with
the new messages behind them. What the second has more is what the new messages add to the whole prompt, unless the
template prints earlier messages otherwise because of later ones (it drops earlier thinking, for example). So the
samples are the first messages, the last ones, and the last one of every kind; if new messages change the short chat
before its end, the whole prompt is rendered.

This is not a proof for every template. `can_continue` tries one out, the start of each short chat is compared with the
start of the whole prompt, and `frontends/prompt_readers.py` compares samples of the traffic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from router.errors import MalformedRequest
from router.guards import short_float
from router.prompt.conversation import BILLING_HEADER, Unrenderable, with_decoded_messages
from router.prompt.pending import CachedPrefix, Raw

FIRST_MESSAGES = 2
LAST_MESSAGES = 8
"""How many known messages every short chat has. Items of `/v1/responses` count as messages: four make a step."""
MAX_SAMPLES = 24
"""Chats with more samples, because they have many kinds of messages, are rendered whole."""
MAX_SAMPLE_BYTES, MAX_TOOL_BYTES = 32 * 1024, 16 * 1024
"""Maximum size of all samples together, and of the tool."""
TEXT_CHARACTERS = 64
MAX_REMOVED = 256
"""Maximum characters at the end of the known text that new messages replace: what starts the model's turn."""

Render: TypeAlias = Callable[[Sequence[Any]], str | None]
"""The prompt of a chat with these messages and the other fields of the request; None if it cannot be rendered."""

_MARKS = (
    *(b'"user"', b'"assistant"', b'"system"', b'"developer"', b'"tool"', b'"text"', b'"tool_calls"'),
    *(b'"thinking"', b'"redacted_thinking"', b'"reasoning"', b'"reasoning_content"', b'"encrypted_content"'),
    *(b'"tool_use"', b'"tool_result"', b'"function_call"', b'"function_call_output"', b'"custom_tool_call"'),
    *(b'"custom_tool_call_output"', b'""', b"null", b"[]", b'"status"'),
)
"""Fields and roles that distinguish kinds of messages. Quotes inside strings are escaped, so texts do not match."""
_ANY = msgspec.json.Decoder(float_hook=short_float)
_TOOLS = msgspec.json.Decoder(list[msgspec.Raw] | None)
_CACHE_CONTROL_KEY = b'"cache_control"'
_CACHE_CONTROL = re.compile(rb'"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
"""No engine reads it, and clients move it with every request."""
MAX_CACHE_CONTROLS = 16
"""Maximum number in a message: clients set one."""
_BILLING = re.compile(rb'"%s[^"\\]*"' % BILLING_HEADER.encode())
"""A text that changes with every request."""


class ChatSample(NamedTuple):
    """A known message in short chats: its number in the chat, its kind, and its JSON with short texts."""

    number: int
    kind: int
    message: bytes


SAMPLES = msgspec.msgpack.Decoder(tuple[ChatSample, ...])
"""Decodes samples that are kept as bytes, which the garbage collector does not visit."""


class PromptEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a prompt: the known text without its last `removed` characters, then `added`. `head` characters of
    the start of the whole prompt have the digest `head_digest`."""

    removed: int
    added: str
    short: str
    """The prompt of the short chat without the new messages."""


def kind_of(message: Raw) -> int:
    """A number that is equal for messages with the same fields and roles."""
    text = bytes(message)
    return sum([1 << place for place, mark in enumerate(_MARKS) if mark in text])


def samples_of(messages: Sequence[Raw], first: int, known: Sequence[ChatSample]) -> tuple[ChatSample, ...] | None:
    """The samples of a chat, from those of its first messages and the messages from `first` on; None where these are
    too many or too long."""
    kinds = {sample.number: sample.kind for sample in known}
    kinds |= {number: kind_of(messages[number]) for number in range(first, len(messages))}
    last = {kind: number for number, kind in kinds.items()}
    kept = {*range(min(FIRST_MESSAGES, len(messages))), *last.values()}
    kept.update(range(max(len(messages) - LAST_MESSAGES, 0), len(messages)))
    if len(kept) > MAX_SAMPLES:
        return None
    texts = {sample.number: sample.message for sample in known}
    try:
        found = [
            ChatSample(number, kinds[number], texts.get(number) or _shortened(messages[number]))
            for number in sorted(kept)
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return tuple(found) if sum([len(sample.message) for sample in found]) <= MAX_SAMPLE_BYTES else None


def _shortened(message: Raw) -> bytes:
    return msgspec.json.encode(_with_short_texts(_ANY.decode(message)))


def _with_short_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value[:TEXT_CHARACTERS]
    if isinstance(value, dict):
        return {name: _with_short_texts(inner) for name, inner in value.items()}
    return [_with_short_texts(inner) for inner in value] if isinstance(value, list) else value


def context_of(prompt: Mapping[str, Any], key: str, names: Sequence[str], drops_billing: bool) -> bytes:
    """All fields of a prompt besides its messages, `key`. `names`: the salt, and how the body becomes a chat, which may
    drop billing headers."""
    context = msgspec.json.encode([names, {field: value for field, value in prompt.items() if field != key}])
    return without_cache_control(_BILLING.sub(b"", context) if drops_billing else context)


def with_one_tool(prompt: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The prompt's fields with only the first tool that is a function, if one is; None if that is long."""
    tools = prompt.get("tools")
    try:
        listed = _TOOLS.decode(tools if isinstance(tools, msgspec.Raw) else msgspec.json.encode(tools)) or ()
    except msgspec.DecodeError:
        return None
    texts = map(bytes, listed)
    kept = next((text for text in texts if b'"function"' in text or b'"input_schema"' in text), None)
    if kept is None:
        return prompt if len(listed) == 0 else None
    if len(kept) > MAX_TOOL_BYTES:
        return None
    raw = b"[%b]" % kept
    return {**prompt, "tools": msgspec.Raw(raw) if isinstance(tools, msgspec.Raw) else _ANY.decode(raw)}


def without_cache_control(text: bytes) -> bytes:
    """JSON without its `cache_control` fields, as it would be if the client had not set them."""
    kept, start = [], 0
    for _ in range(MAX_CACHE_CONTROLS):
        at = text.find(_CACHE_CONTROL_KEY, start)
        found = _CACHE_CONTROL.match(text, at) if at >= 0 else None
        if found is None:
            break
        kept.append(text[start:at].rstrip(b" ").removesuffix(b","))
        start = found.end()
    return b"".join([*kept, text[start:]]) if start else text


def render_samples(render: Render, samples: Sequence[ChatSample], new: Sequence[Raw] = ()) -> str | None:
    return render([*[msgspec.Raw(sample.message) for sample in samples], *new])


def prompt_end(render: Render, samples: Sequence[ChatSample], new: Sequence[Raw]) -> PromptEnd | None:
    """What new messages add to the prompt of the chat that `samples` stand for; None where that is unknown."""
    before = render_samples(render, samples)
    after = render_samples(render, samples, new) if new else before
    if before is None or after is None:
        return None
    common = common_length(before, after)
    removed = len(before) - common
    return PromptEnd(removed, after[common:], before) if removed <= MAX_REMOVED else None


def common_length(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle
    return low


def head_of(short: str, whole: str) -> tuple[int, int]:
    """(length, digest) of what the prompts of a short chat and of the whole one start with."""
    length = common_length(short, whole)
    return length, digest_of(whole[:length])


def digest_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def continues(prefix: CachedPrefix, found: PromptEnd) -> bool:
    is_same = len(found.short) >= prefix.head and digest_of(found.short[: prefix.head]) == prefix.head_digest
    removed = found.short[len(found.short) - found.removed :]
    return is_same and prefix.rest.endswith(removed)


# --- trying a template out ---

_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": {"type": "object"}}}


def can_continue(render: Callable[[Mapping[str, Any]], str]) -> bool:
    """Whether continued prompts of a template are right for chats of every kind. `render` raises `MalformedRequest` or
    `Unrenderable` for those that the template refuses."""

    def rendered(messages: Sequence[Any], tools: Sequence[Any] = (_TOOL,)) -> str | None:
        try:
            return render(with_decoded_messages({"messages": list(messages), "tools": list(tools)}))
        except (MalformedRequest, Unrenderable):
            return None

    return all(_agrees(rendered, partial(rendered, tools=(_TOOL, _TOOL)), chat) for chat in _chats())


def _agrees(render: Render, render_whole: Render, chat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether continuing earlier starts of a chat gives the prompts of later ones, or cannot be done."""
    raw = [msgspec.Raw(msgspec.json.encode(message)) for message in chat]
    whole = [render_whole(raw[:end]) if end else None for end in range(len(chat) + 1)]
    for known in range(FIRST_MESSAGES + LAST_MESSAGES + 1, len(chat), 2):
        before, samples = whole[known], samples_of(raw[:known], 0, ()) or ()
        for end in range(known + 1, min(known + 2, len(chat)) + 1):
            found = prompt_end(render, samples, raw[known:end])
            if before is None or found is None:
                continue
            if not before.endswith(found.short[len(found.short) - found.removed :]):
                continue
            if before[: len(before) - found.removed] + found.added != whole[end]:
                return False
    return True


def _chats() -> Iterator[list[Mapping[str, Any]]]:
    """Chats of several questions, with calls and results for each, with and without thinking and words."""
    for thinks, speaks, calls in ((True, True, 1), (True, False, 2), (False, True, 1), (False, False, 2)):
        chat: list[Mapping[str, Any]] = [{"role": "system", "content": "Be brief."}]
        number = 0
        for question in range(2):
            chat.append({"role": "user", "content": f"question {question}"})
            for _ in range(3):
                number += 1
                chat.append(_step(number, thinks, speaks, calls))
                for call in range(calls):
                    chat.append(
                        {"role": "tool", "tool_call_id": f"call_{number}_{call}", "content": f"r{number} {call}"}
                    )
            chat.append({"role": "assistant", "content": f"answer {question}"})
        yield [*chat, {"role": "user", "content": "question 2"}]


def _step(number: int, thinks: bool, speaks: bool, calls: int) -> Mapping[str, Any]:
    made = [
        {
            "id": f"call_{number}_{call}",
            "type": "function",
            "function": {"name": "look", "arguments": msgspec.json.encode({"place": number}).decode()},
        }
        for call in range(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": f"step {number}" if speaks else "", "tool_calls": made}
    return {**message, "reasoning_content": f"thought {number}"} if thinks else message
