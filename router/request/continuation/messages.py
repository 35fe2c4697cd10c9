"""The chat that vLLM 0.32 makes of a streamed `/v1/messages` request, for the pod: the stream of a chat has token ids.
The stream of the message is written from that of the chat.

Source: `entrypoints/anthropic/serving.py`. What is not known exactly is not converted, and goes as it came. Signatures,
which vLLM draws, are made of the id of the response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_128_hexdigest

from router.guards import Bound
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import Unrenderable
from router.request.continuation.stream_events import DATA, DONE, END, MAX_REMEMBERED_BYTES, MaybeRaw, fields_of
from router.types import Endpoint, Pod

VERSION = "0.32."
_LEAST_BUDGET = 1024
_EFFORTS = (None, "low", "medium", "high", "xhigh", "max")
_SCHEMA = "json_schema"
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_RAW = ("messages", "system", "tools", "chat_template_kwargs")
_SAME = ("temperature", "top_p", "top_k", "cache_salt")


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that are known. The engine ignores `metadata` and `context_management`."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(gt=0)]
    messages: list[msgspec.Raw]
    stream: bool
    system: MaybeRaw = msgspec.UNSET
    tools: MaybeRaw = msgspec.UNSET
    chat_template_kwargs: MaybeRaw = msgspec.UNSET
    metadata: dict[str, Any] | None = None
    context_management: MaybeRaw = msgspec.UNSET
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None


_ASKED = msgspec.json.Decoder(_Asked)
_BODY = Bound("message", 256 * 1024, 12_000)
"""An item takes up to 0.35 us, a byte up to 14 ns: calls of tools in other letters than ASCII are escaped."""
_DIGITS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 100
"""Integers take time that grows with the square of their digits."""


def converts(pod: Pod) -> bool:
    """Whether a pod has shown that it continues chats, and reads messages as the router does."""
    is_proven = Endpoint.CHAT in pod.continues and pod.reads_alike(Endpoint.MESSAGES)
    return is_proven and pod.engine == "vllm" and pod.version.startswith(VERSION)


def chat_of(body: bytes, conversion: Conversion) -> bytes:
    """The body of the chat; b"" where it is not known."""
    try:
        _BODY.check_size(len(body))
        if _LONG in body.translate(_DIGITS):
            return b""
        asked = _BODY.json(body, _ASKED)
        raw = {name: one for name in _RAW if not isinstance(one := getattr(asked, name), msgspec.UnsetType)}
        chat = conversion.sent_chat({**raw, "output_config": asked.output_config})
        return msgspec.json.encode(chat | _fields(asked, chat))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Unrenderable):
        return b""


def _fields(asked: _Asked, chat: Mapping[str, Any]) -> dict[str, Any]:
    """All but the prompt. Raises `ValueError` where the engine might refuse the message, or the chat."""
    limit, output, thinking = asked.max_tokens, asked.output_config or {}, asked.thinking
    fields: dict[str, Any] = {"model": asked.model, "max_tokens": limit, "max_completion_tokens": limit}
    fields |= {"stream": True, "stream_options": _USAGE, "tool_choice": "auto" if "tools" in chat else None}
    fields |= {name: getattr(asked, name) for name in _SAME} | {"stop": asked.stop_sequences}
    contents, form = (message.get("content") for message in chat["messages"]), output.get("format") or {}
    has_media = any(part["type"] != "text" for one in contents if isinstance(one, list) for part in one)
    if has_media or output.get("effort") not in _EFFORTS or form.get("type", _SCHEMA) != _SCHEMA:
        raise ValueError("pictures, or something unknown")
    if schema := form.get("schema"):
        fields["response_format"] = {"type": _SCHEMA, "json_schema": {"name": _SCHEMA, "schema": schema}}
    if thinking is not None and thinking["type"] != "adaptive":  # only the engine knows how it disables thinking
        fields["thinking_token_budget"] = budget = thinking["budget_tokens"]
        if thinking["type"] != "enabled" or not (isinstance(budget, int) and _LEAST_BUDGET <= budget < limit):
            raise ValueError("not a budget")
    if asked.tool_choice is not None:
        fields["tool_choice"] = _choice(asked.tool_choice, [tool["function"]["name"] for tool in chat.get("tools", ())])
        fields["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
    return fields


def _choice(choice: Mapping[str, Any], tools: list[str]) -> Any:
    if choice["type"] == "tool" and choice["name"] in tools:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice["type"] != "none" and not tools:
        raise ValueError("a choice without tools")
    return _CHOICES[choice["type"]]


_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
_CACHED = {"created_cache_tokens": "cache_creation_input_tokens", "cached_tokens": "cache_read_input_tokens"}
_BLOCKS = {"text": ("text", "text"), "thinking": ("thinking", "thinking"), "tool_use": ("input_json", "partial_json")}
"""Kind and field of the deltas of a block."""


class MessageStream:
    """One message. Its chat has not both tools and stop strings: no string ends a call."""

    __slots__ = ("_call", "_call_id", "_finish", "_id", "_index", "_kind", "_pending", "_stop", "_uses_tool")

    def __init__(self) -> None:
        self._id = self._kind = self._call_id = self._pending = ""
        """The id of the response, the type of the open block, the id of its call, and the text inside the call."""
        self._index, self._call = 0, -1
        """The number of the next block, or of the open one, and that of its call."""
        self._finish: str = "stop"
        self._stop: object = None
        self._uses_tool = False

    @property
    def waiting_bytes(self) -> int:
        """Size of the text inside the open call, about: most characters take one byte."""
        return len(self._pending)

    def feed(self, events: bytes) -> bytes:
        """What the client gets of whole events. Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` for
        events of another form."""
        return b"".join(map(self._event, events.split(END)[:-1]))

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(DATA):
            return event + END  # comments keep connections open
        if event + END == DONE:
            return self._end() + _named("message_stop")
        fields = fields_of(event)
        if not self._id:
            if not fields["id"]:
                raise ValueError("no id")
            self._id = fields["id"]
            head = {"id": self._id, "type": "message", "role": "assistant", "content": [], "model": fields["model"]}
            ends = {"stop_reason": None, "stop_sequence": None, "usage": _usage(fields)}
            return _named("message_start", message=head | ends)
        if not fields["choices"]:
            return self._end() + _named("message_delta", delta=self._reason(), usage=_usage(fields))
        choice = fields["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
        return self._said(choice["delta"])

    def _said(self, delta: dict[str, Any]) -> bytes:
        events = b""
        if text := delta.get("reasoning"):
            events += self._begin("thinking", thinking="") if self._kind != "thinking" else b""
            events += self._piece(text)
        if text := delta.get("content"):
            if self._kind != "tool_use":
                events += self._begin("text", text="") if self._kind != "text" else b""
                events += self._piece(text)
            elif len(self._pending) < MAX_REMEMBERED_BYTES:
                self._pending += text
            else:
                raise ValueError("too much text inside a call")
        return events + b"".join(map(self._called, delta.get("tool_calls") or ()))

    def _called(self, call: dict[str, Any]) -> bytes:
        function, known, events = call.get("function") or {}, call.get("id"), b""
        if known is not None and known != self._call_id and function.get("name") is not None:
            events = self._begin("tool_use", id=known, name=function["name"], input={})
            self._call, self._call_id, self._uses_tool = call["index"], known, True
        is_open = call["index"] == self._call if known is None else known == self._call_id
        return events + self._piece(function["arguments"]) if is_open and function.get("arguments") else events

    def _begin(self, kind: str, **fields: Any) -> bytes:
        events, self._kind = self._end(), kind
        return events + _named("content_block_start", content_block={"type": kind, **fields}, index=self._index)

    def _piece(self, text: str) -> bytes:
        kind, field = _BLOCKS[self._kind]
        return _named("content_block_delta", delta={"type": f"{kind}_delta", field: text}, index=self._index)

    def _end(self) -> bytes:
        """The end of the open block, and the text that came inside a call as a block of its own."""
        kind, text, index, events = self._kind, self._pending, self._index, b""
        if not kind:
            return b""
        self._kind = self._call_id = self._pending = ""
        self._index, self._call = index + 1, -1
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": xxh3_128_hexdigest(f"{self._id} {index}".encode())}
            events = _named("content_block_delta", delta=signature, index=index)
        events += _named("content_block_stop", index=index)
        return events + self._begin("text", text="") + self._piece(text) + self._end() if text else events

    def _reason(self) -> dict[str, Any]:
        reason, stop = _STOP_REASONS.get(self._finish), None
        if reason == "end_turn" and self._uses_tool:
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(self._stop, str):
            reason, stop = "stop_sequence", self._stop
        return {"stop_reason": reason, "stop_sequence": stop}


def _named(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _usage(fields: dict[str, Any]) -> dict[str, int]:
    """Input is what was neither read from the cache nor written to it."""
    usage = fields.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    cached = {name: count for key, name in _CACHED.items() if (count := details.get(key)) is not None}
    fresh = max(usage.get("prompt_tokens", 0) - sum(cached.values()), 0)
    return {"input_tokens": fresh, "output_tokens": usage.get("completion_tokens") or 0, **cached}
