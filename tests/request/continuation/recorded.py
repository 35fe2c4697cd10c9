"""Streams of a real vLLM 0.32 as bytes, and what a client makes of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from router.request.continuation.answer_words import AnswerWords, answer_words

Case = dict[str, Any]
_FILE = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
CASES: list[Case] = _FILE["cases"]
DONE = b"data: [DONE]\n\n"


@cache
def _word(token: int) -> tuple[bytes, bool]:
    """The bytes of a token, and whether it is special."""
    word = _FILE["words"][str(token)]
    return (word["name"].encode(), word["special"]) if isinstance(word, dict) else (bytes.fromhex(word), False)


def decode(ids: Sequence[int], special: bool) -> str:
    words = map(_word, ids)
    return b"".join(text for text, is_special in words if special or not is_special).decode("utf-8", "replace")


def words() -> AnswerWords:
    names = {one["name"]: int(token) for token, one in _FILE["words"].items() if isinstance(one, dict)}
    return answer_words(decode, names.get)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case["name"] == name)


def body_of(case: Case) -> bytes:
    return json.dumps(case["request"], ensure_ascii=False).encode()


def logprobs(entries: Sequence[Any]) -> dict[str, Any]:
    return {"content": [{"token": t, "logprob": p, "bytes": b, "top_logprobs": []} for t, b, p in entries]}


def event(
    d: Any = None, *, t: Any = None, f: Any = None, s: Any = None, u: Any = None, given: Any = None, **more: Any
) -> bytes:
    """One event, as vLLM writes it. `given`: ids of the prompt, of a role chunk; `more`: l, i, id, created."""
    head = {"id": more.get("id", "chatcmpl-1"), "object": "chat.completion.chunk", "created": more.get("created", 7)}
    fields: dict[str, Any] = {**head, "model": "tiny", "choices": []}
    if d is not None:
        entries = more.get("l")
        choice = {"index": more.get("i", 0), "delta": d, "logprobs": logprobs(entries) if entries else None}
        choice["finish_reason"] = f
        if f is not None:
            choice["stop_reason"] = s
        if "role" not in d:
            choice["token_ids"] = t
        fields["choices"] = [choice]
        if "role" in d:
            fields |= {"prompt_token_ids": given, "prompt_text": None}
    if u is not None:
        fields["usage"] = u
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def stream(events: Sequence[Any], given: Sequence[int] | None, **more: Any) -> list[bytes]:
    """Recorded events as bytes, without `[DONE]`."""
    return [event(**one, given=given if given is None else list(given), **more) for one in events]


class Received:
    """What a client makes of a stream. Fails where that is not legal."""

    def __init__(self, received: bytes) -> None:
        self.texts: dict[str, str] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish: list[Any] = []
        self.usage: list[Any] = []
        self.logprobs: list[Any] = []
        self.roles = 0
        self.heads: set[Any] = set()
        self.is_done = False
        for one in _events(received):
            assert not self.is_done, "an event behind [DONE]"
            if one == "[DONE]":
                self.is_done = True
            else:
                self._read(json.loads(one))

    def _read(self, fields: dict[str, Any]) -> None:
        self.heads.add((fields["id"], fields["created"], fields["model"]))
        assert fields.get("prompt_token_ids") is None
        if fields.get("usage") and not fields["choices"]:
            self.usage.append(without_details(fields["usage"]))
        for choice in fields["choices"]:
            assert choice.get("token_ids") is None and choice.get("prompt_token_ids") is None
            assert not self.finish, "a choice behind its end"
            delta = choice.get("delta", {"content": choice.get("text")})
            self.roles += "role" in delta
            for name in ("content", "reasoning"):
                if delta.get(name):
                    self.texts[name] = self.texts.get(name, "") + delta[name]
            for piece in delta.get("tool_calls") or ():
                self._read_call(piece)
            entries = choice.get("logprobs") or {}
            self.logprobs += [entry["token"] for entry in entries.get("content", ())] + entries.get("tokens", [])
            if choice["finish_reason"] is not None:
                self.finish.append((choice["finish_reason"], choice.get("stop_reason")))

    def _read_call(self, piece: dict[str, Any]) -> None:
        call = self.calls.setdefault(piece["index"], {"ids": [], "name": "", "arguments": ""})
        call["ids"] += [piece["id"]] if piece.get("id") else []
        function = piece.get("function") or {}
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    @property
    def whole(self) -> Any:
        """All that must be equal for two streams of one answer."""
        calls = {number: (call["name"], call["arguments"], len(call["ids"])) for number, call in self.calls.items()}
        return self.texts, calls, self.finish, self.usage, self.logprobs, self.roles, self.is_done, len(self.heads)


def without_details(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def _events(received: bytes) -> Iterator[str]:
    assert received.endswith(b"\n\n") or not received
    for one in received.decode().split("\n\n")[:-1]:
        assert one.startswith("data: "), one
        yield one.removeprefix("data: ")


_VARIES = {
    *("sequence_number", "created_at", "completed_at", "signature", "input_tokens", "total_tokens"),
    *("input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"),
}


def named_steps(received: bytes) -> list[Any]:
    """What a client reads of a stream of messages or responses: events, with one text for deltas behind each other.
    Ids are numbered in their order; what depends on a pod's cache or clock is left out."""
    names: dict[str, int] = {}
    steps: list[Any] = []
    for one in received.decode().split("\n\n")[:-1]:
        data = one.partition("data: ")[2]
        if data == "[DONE]":
            continue
        fields = json.loads(data)
        text = fields.get("delta")
        if isinstance(text, dict):
            text = next((text[name] for name in ("text", "thinking", "partial_json") if name in text), None)
        key = [fields["type"], fields.get("output_index", fields.get("index"))]
        if isinstance(text, str) and steps and steps[-1][:2] == key:
            steps[-1][2] += text
        elif not isinstance(text, str) or text:
            steps.append([*key, text if isinstance(text, str) else _without_varying(fields, names)])
    return steps


def _without_varying(value: Any, names: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_without_varying(one, names) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: names.setdefault(one, len(names))
        if name in ("id", "item_id", "call_id") and isinstance(one, str)
        else _without_varying(one, names)
        for name, one in value.items()
        if name not in _VARIES
    }
