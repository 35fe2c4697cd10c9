"""Joins the stream of a later pod to what the client has: it reads one stream, with nothing twice and nothing missing.

What the client has behind the seam is compared with what the later pod sends, byte by byte; a difference ends the
stream. The joined stream is recorded, so that a third pod can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from router.request.continuation.answer_words import CONTEXT, HALF, MAX_HALF_TOKENS, AnswerWords
from router.request.continuation.plan import Continue, added_up, last_events
from router.request.continuation.record import Record
from router.request.continuation.stream import Diverged, PodStream
from router.request.continuation.stream_events import (
    DONE,
    MAX_REMEMBERED_BYTES,
    Delta,
    StreamChoice,
    StreamEvent,
    fields_of,
    without_ids,
    written,
)
from router.request.continuation.terms import MAX_STOP_CHARACTERS, Terms

_REASONING = ("reasoning", "reasoning_content")


class _Before(msgspec.Struct):
    """How much of the joined stream had come before an event."""

    content: int
    reasoning: int
    calls: list[tuple[int, int]]
    logprobs: int


class Joiner(PodStream):
    """`has` is what the client had when the stream broke. `record` is that of the joined stream, once the later pod has
    caught up with it."""

    __slots__ = ("_held", "_plan", "_stops", "has")

    def __init__(self, terms: Terms, has: Record, plan: Continue, words: AnswerWords | None) -> None:
        super().__init__(terms, has.from_seam(plan.kept, plan.held))
        self.has = has
        self._plan = plan
        self._held = plan.held
        self._stops: StopWatch | None = None
        if terms.stops and plan.kept and words is not None:
            ids = [*plan.prompt[-CONTEXT:], *self.record.ids[-CONTEXT:]]
            self._stops = StopWatch(terms.stops, ids, self.record.content.decode(), words)

    @property
    def current(self) -> Record:
        return self.record if self._is_level and not self._held else self.has

    @property
    def _is_level(self) -> bool:
        """Whether the later pod has sent all that the client has."""
        has, new = self.has, self.record
        return (
            len(new.content) >= len(has.content)
            and len(new.reasoning) >= len(has.reasoning)
            and new.logprobs >= has.logprobs
            and len(new.calls) >= len(has.calls)
            and all(len(one.arguments) >= len(old.arguments) for one, old in zip(new.calls, has.calls, strict=False))
            and all(len(one.name) >= len(old.name) for one, old in zip(new.calls, has.calls, strict=False))
        )

    def _passed(self, event: bytes, read: StreamEvent) -> bytes:
        if not self.has_begun:
            self._begin()
            if read.choices and _is_role_alone(read.choices[0]):
                return b""
        fields = fields_of(without_ids(event))
        fields |= {"id": self.has.id, "created": self.has.created, "model": self.has.model}
        if self._plan.kept and (usage := fields.get("usage")):
            fields["usage"] = added_up(usage, len(self._plan.prompt), self._plan.kept, self._reasoning(usage))
        if not read.choices:
            return written(fields)
        if len(read.choices) > 1 or read.choices[0].index:
            raise ValueError("a choice that was not asked for")
        return self._joined(fields, read.choices[0])

    def _without_prompt(self) -> int:
        """The prompt of a later pod is compared: it may have the ids of all that is remembered, and no more."""
        if len(self._rest) > 2 * MAX_REMEMBERED_BYTES:
            self.fault, self._rest = "event too large", bytearray()
        return 0

    def _begin(self) -> None:
        """Check that the pod reads the same prompt, and has taken the ids."""
        plan, self.has_begun = self._plan, True
        if not self.prompt:
            if plan.method == "ids":
                raise Diverged("the pod has ignored the ids")
        elif not plan.prompt:
            self.record.prompt = self.prompt
        elif self.prompt.translate(None, b" \r\n\t") != plan.sent:
            raise Diverged("the pod has another prompt")

    def _reasoning(self, usage: Any) -> int | None:
        """Tokens of reasoning of the whole answer; None where the pod counts them."""
        plan = self._plan
        if plan.reasoning is None or not plan.in_reasoning:
            return plan.reasoning
        details = usage.get("completion_tokens_details") or {}
        return plan.reasoning + int(details.get("reasoning_tokens") or 0)

    def _joined(self, fields: dict[str, Any], choice: StreamChoice) -> bytes:
        """The event without what the client has, and with what was held at the seam."""
        record, ends = self.record, choice.finish_reason is not None
        before = _Before(
            len(record.content),
            len(record.reasoning),
            [(len(call.name.encode()), len(call.arguments.encode())) for call in record.calls],
            record.logprobs,
        )
        record.add(choice)
        record.is_finished |= ends
        said: dict[str, Any] = fields["choices"][0]
        self._drop_logprobs(said, choice, before)
        if self._stops is not None and choice.token_ids and (found := self._stops.feed(choice.token_ids)):
            return self._stopped(fields, said, found, before)
        shows = self._drop_text(said, choice, before, ends=ends) | (said.get("logprobs") is not None)
        if (shows or ends) and not self._is_level:
            raise Diverged("the pod sends something else than the client has")
        return written(fields) if shows or ends else b""

    def _drop_text(self, said: dict[str, Any], choice: StreamChoice, before: _Before, *, ends: bool) -> bool:
        """Take out what the client has. Returns whether anything is left."""
        content = _fresh(self.has.content, self.record.content, before.content)
        reasoning = _fresh(self.has.reasoning, self.record.reasoning, before.reasoning)
        if content or ends:
            content, self._held = self._held + content, ""
        if choice.delta is None:
            said["text"] = content
            return bool(content) or self._is_level
        delta: dict[str, Any] = said["delta"]
        delta.pop("role", None)
        if content:
            delta["content"] = content
        elif delta.get("content"):
            del delta["content"]
        for name in _REASONING:
            if name in delta and (not reasoning or self.terms.hides_reasoning):
                del delta[name]
            elif name in delta:
                delta[name] = reasoning
        if "tool_calls" in delta:
            delta["tool_calls"] = self._fresh_calls(delta["tool_calls"] or (), before)
            if not delta["tool_calls"]:
                del delta["tool_calls"]
        return any(value is not None for value in delta.values())

    def _fresh_calls(self, pieces: Any, before: _Before) -> list[dict[str, Any]]:
        """The pieces of tool calls that the client does not have. Its calls keep their ids."""
        has, new = self.has.calls, self.record.calls
        fresh = [piece for piece in pieces if piece["index"] >= len(has)]
        for number in sorted({piece["index"] for piece in pieces if piece["index"] < len(has)}):
            name_at, arguments_at = before.calls[number] if number < len(before.calls) else (0, 0)
            if _fresh(has[number].name.encode(), new[number].name.encode(), name_at):
                raise Diverged("the pod calls another tool")
            if rest := _fresh(has[number].arguments.encode(), new[number].arguments.encode(), arguments_at):
                fresh.insert(0, {"index": number, "function": {"arguments": rest}})
        return fresh

    def _drop_logprobs(self, said: dict[str, Any], choice: StreamChoice, before: _Before) -> None:
        """Take out the entries of tokens that the client has, by their number."""
        entries = said.get("logprobs")
        if not entries:
            return
        dropped = max(min(self.has.logprobs, self.record.logprobs) - before.logprobs, 0)
        rest = {name: value[dropped:] if isinstance(value, list) else value for name, value in entries.items()}
        if choice.delta is None and self._plan.kept and isinstance(rest.get("text_offset"), list):
            shift = len((self.has.content + self._plan.held.encode()).decode())
            rest["text_offset"] = [place + shift for place in rest["text_offset"]]
        left = any(value for value in rest.values() if isinstance(value, list))
        said["logprobs"] = rest if left or not dropped else None

    def _stopped(self, fields: dict[str, Any], said: dict[str, Any], found: Stopped, before: _Before) -> bytes:
        """The end of the answer: cut at the stop string that began before the seam."""
        record, plan = self.record, self._plan
        text = self.has.content.decode() + plan.held + found.text
        shown = self.has.content if self._held else record.content[: before.content]
        end = found.begin + (len(found.stop) if self.terms.includes_stop else 0)
        rest = text[len(shown.decode()) : end]
        if "delta" in said:
            said["delta"] = {"content": rest} if rest else {}
        else:
            said["text"] = rest
        said |= {"finish_reason": "stop", "stop_reason": found.stop}
        del record.ids[plan.kept + found.tokens :]
        self._held, self.is_over = "", True
        record.is_finished = record.is_done = True
        return written(fields) + last_events(record, self.terms, len(plan.prompt), plan.reasoning or 0) + DONE


def _is_role_alone(choice: StreamChoice) -> bool:
    delta: Delta | None = choice.delta
    return (
        delta is not None
        and delta.role is not None
        and choice.finish_reason is None
        and not (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
    )


def _fresh(old: bytes | bytearray, new: bytes | bytearray, begin: int) -> str:
    """What came from `begin` on of the new text, without what was there before. Raises `Diverged` for a difference."""
    end = min(len(old), len(new))
    if new[begin:end] != old[begin:end]:
        raise Diverged("the pod sends other text than the client has")
    return new[max(begin, len(old)) :].decode()


class Stopped(NamedTuple):
    stop: str
    begin: int
    """Where it begins in the kept text and the new one together."""
    tokens: int
    """New tokens up to the one that completes it."""
    text: str
    """Their text."""


class StopWatch:
    """Finds a stop string that begins before the seam and ends after it: the later pod cannot see its beginning. `ids`
    are the last ones of prompt and kept tokens, `kept` is the text of the latter. Each token is decoded once, and only
    `MAX_STOP_CHARACTERS` of them."""

    __slots__ = ("_base", "_begin", "_ids", "_kept", "_stops", "_text", "_words")

    def __init__(self, stops: Sequence[str], ids: list[int], kept: str, words: AnswerWords) -> None:
        self._stops, self._ids, self._kept, self._words = stops, ids, kept, words
        self._base = self._begin = len(ids)
        """The tokens up to the first one have their text in `_text`."""
        self._text = ""

    def feed(self, new: Sequence[int]) -> Stopped | None:
        """The stop string that these tokens complete."""
        for token in new:
            if not self._stops:
                return None
            self._ids.append(token)
            if (found := self._look()) is not None:
                return found
        return None

    def _look(self) -> Stopped | None:
        end, seam, longest = len(self._ids), len(self._kept), max(map(len, self._stops))
        piece = self._words.text(self._ids, self._base, end, special=False)
        if piece.endswith(HALF) and end - self._base < MAX_HALF_TOKENS:
            return None
        self._text, self._base = self._text + piece, end
        first = max(seam - longest + 1, 0)
        window = self._kept[first:] + self._text
        for stop in self._stops:
            place = window.find(stop)
            if 0 <= place < seam - first:
                return Stopped(stop, first + place, end - self._begin, self._text)
        if len(self._text) >= longest - 1 or end - self._begin >= MAX_STOP_CHARACTERS:
            self._stops = ()
        return None
