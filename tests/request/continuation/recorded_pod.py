"""A pod that answers as recorded, from any of its tokens on: detokenizer and parsers, as far as a seam meets them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from router.request.continuation.answer_words import HALF
from tests.request.continuation.recorded import DONE, Case, decode, event, words

_WORDS = words()


class RecordedPod:
    """`groups`: how many tokens each event has, again and again."""

    def __init__(self, case: Case, groups: Sequence[int] = (1,), **head: Any) -> None:
        self._prompt: list[int] = case["prompt_ids"]
        self._answer = [token for one in case["uncut"] for token in one.get("t") or ()]
        self._end = next(one for one in case["uncut"] if one.get("f"))
        self._groups = groups
        self._head = head

    def stream(self, body: bytes) -> list[bytes]:
        """What it sends for this body."""
        asked = json.loads(body)
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids") or self._prompt
        full = [*self._prompt, *self._answer]
        assert given == full[: len(given)], "ids that the first pod has not sent"
        new = full[len(given) :]
        if (limit := asked.get("max_tokens")) is not None:
            assert limit >= len(new) > 0, "limits were not lowered"
        usage = asked.get("stream_options", {}).get("include_usage")
        shown: dict[str, Any] = {"prompt_tokens": len(given), "total_tokens": len(full), "completion_tokens": len(new)}
        pieces = list(self._pieces(_Speaker(given, asked), new))
        shown["completion_tokens_details"] = {"reasoning_tokens": self._thought(given, new)}
        role = event({"role": "assistant", "content": ""}, given=given, **self._head)
        return [role, *pieces, *([event(u=shown, **self._head)] if usage else ()), DONE]

    def _pieces(self, speaker: _Speaker, new: Sequence[int]) -> Iterator[bytes]:
        place, number = 0, 0
        while place < len(new):
            size = self._groups[number % len(self._groups)]
            ids, place, number = new[place : place + size], place + size, number + 1
            ends = place >= len(new)
            delta = speaker.said(ids, ends=ends, stop=self._end.get("s"))
            end = {"f": self._end["f"], "s": self._end.get("s")} if ends else {}
            yield event(delta, t=list(ids), **end, **self._head)

    def _thought(self, given: Sequence[int], new: Sequence[int]) -> int:
        """As the pod counts: all of its output where the reasoning ended in its prompt."""
        kept = given[len(self._prompt) :]
        if _WORDS.end_think in kept and _WORDS.think in kept:
            return len(new)
        is_open, count = _WORDS.think in kept, 0
        for token in new:
            if token in (_WORDS.think, _WORDS.end_think):
                is_open = token == _WORDS.think
            else:
                count += is_open
        return count


class _Speaker:
    def __init__(self, given: Sequence[int], asked: dict[str, Any]) -> None:
        stop = asked.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else stop
        self._holds = 0 if asked.get("include_stop_str_in_output") else max(map(len, self._stops), default=1) - 1
        self._includes = asked.get("include_stop_str_in_output")
        text = decode(given, True)
        self._raw, self._skipped = list(given), 0 if text.endswith(HALF) else len(text)
        marks = [token for token in given if token in (_WORDS.think, _WORDS.end_think)]
        self._thinks = bool(marks) and marks[-1] == _WORDS.think
        self._has_tools = bool(asked.get("tools"))
        self._sent = {"reasoning": 0, "content": 0}
        self._calls: list[list[str]] = []

    def said(self, ids: Sequence[int], *, ends: bool, stop: str | None) -> dict[str, Any]:
        """The delta of these tokens."""
        self._raw += ids
        whole = len(self._raw)
        while decode(self._raw[whole - 4 : whole], True).endswith(HALF) and not ends:
            whole -= 1
        text = decode(self._raw[:whole], True)[self._skipped :].removesuffix("<|im_end|>" if ends else "")
        reasoning, content, calls = self._parsed(text)
        if ends and stop is not None and stop in content:
            content = content[: content.index(stop) + (len(stop) if self._includes else 0)]
        elif not ends and self._holds:
            content = content[: max(len(content) - self._holds, 0)]
        delta: dict[str, Any] = {}
        for name, said in (("reasoning", reasoning), ("content", content)):
            if len(said) > self._sent[name]:
                delta[name] = said[self._sent[name] :]
                self._sent[name] = len(said)
        if pieces := list(self._call_pieces(calls)):
            delta["tool_calls"] = pieces
        return delta

    def _parsed(self, text: str) -> tuple[str, str, list[str]]:
        """Reasoning, content and the raw calls of the text so far."""
        reasoning = ""
        if text.startswith("<think>") or self._thinks:
            reasoning, _, text = text.removeprefix("<think>").partition("</think>")
        if not self._has_tools:
            return reasoning, text, []
        content, *calls = text.split("<tool_call>")
        return reasoning, content, calls

    def _call_pieces(self, calls: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number, raw in enumerate(calls):
            name, _, rest = raw.partition('"name": "')[2].partition('"')
            arguments, closing, _ = rest.partition('"arguments": ')[2].partition("\n</tool_call>")
            if not rest:
                continue
            if number == len(self._calls):
                self._calls.append([name, ""])
                yield {
                    "id": f"call-{id(self)}-{number}",
                    "type": "function",
                    "index": number,
                    "function": {"name": name},
                }
            whole = arguments[:-1] if closing else arguments.rstrip("}\n")  # the last brace is that of the call
            if len(whole) > len(self._calls[number][1]):
                yield {"index": number, "function": {"arguments": whole[len(self._calls[number][1]) :]}}
                self._calls[number][1] = whole
