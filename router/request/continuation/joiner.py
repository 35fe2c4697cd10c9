"""Joins the stream of a later pod to what the client has: it reads one stream, with nothing twice and nothing missing.

What the client has behind the seam is compared with what the later pod sends, byte by byte; a difference ends the
stream. The joined stream is recorded, so that a third pod can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from router.request.continuation.answer_words import CONTEXT, HALF, MAX_HALF_TOKENS, AnswerWords
from router.request.continuation.plan import Continue, added_up, last_events
from router.request.continuation.stream import Diverged, PodStream, Record
from router.request.continuation.stream_events import (
    DONE,
    MAX_REMEMBERED_BYTES,
    StreamChoice,
    StreamEvent,
    fields_of,
    without_ids,
    written,
)
from router.request.continuation.terms import MAX_STOP_CHARACTERS, Terms


class Joiner(PodStream):
    """`has` is what the client had when the stream broke. `record` is that of the joined stream, once the later pod has
    caught up with it."""

    __slots__ = ("_held", "_plan", "_stops", "has")

    def __init__(self, terms: Terms, has: Record, plan: Continue, words: AnswerWords | None) -> None:
        super().__init__(terms, has.from_seam(plan.seam.kept, plan.seam.held))
        self.has = has
        self._plan = plan
        self._held = plan.seam.held
        self._stops: StopWatch | None = None
        if terms.stops and plan.seam.kept and words is not None:
            ids = [*plan.prompt[-CONTEXT:], *self.record.ids[-CONTEXT:]]
            self._stops = StopWatch(terms.stops, ids, self.record.content.decode(), words)

    @property
    def current(self) -> Record:
        return self.record if self._is_level and not self._held else self.has

    @property
    def _is_level(self) -> bool:
        """Whether the later pod has sent all that the client has."""
        has, new = self.has, self.record
        if new.logprobs < has.logprobs or len(new.calls) < len(has.calls):
            return False
        return all(len(text) >= len(old) for text, old in zip(new.texts, has.texts, strict=False))

    def _passed(self, event: bytes, read: StreamEvent) -> bytes:
        if not self.has_begun:
            self._begin()
        fields = fields_of(without_ids(event))
        fields |= {"id": self.has.id, "created": self.has.created, "model": self.has.model}
        if self._plan.seam.kept and (usage := fields.get("usage")):
            fields["usage"] = added_up(usage, self._plan)
        return self._joined(fields, read.choices[0]) if read.choices else written(fields)

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

    def _joined(self, fields: dict[str, Any], choice: StreamChoice) -> bytes:
        """The event without what the client has, and with what was held at the seam."""
        record, ends = self.record, choice.finish_reason is not None
        said: dict[str, Any] = fields["choices"][0]
        record.check_calls(choice.said.tool_calls or ())  # of an event that cannot be read, nothing counts as sent
        self._drop_logprobs(said)
        if self._stops is not None and choice.token_ids and (found := self._stops.feed(choice.token_ids)):
            return self._stopped(fields, said, found, choice.token_ids)
        self._drop_text(said, choice, ends=ends)
        calls = [(len(call.name), len(call.arguments)) for call in record.calls]
        record.add(choice)
        record.is_finished |= ends
        delta, is_level = said.get("delta") or {}, self._is_level
        if pieces := self._fresh_calls(delta.pop("tool_calls", None) or (), calls):
            delta["tool_calls"] = pieces
        says = ends or bool(said.get("text") or said.get("logprobs")) or any(delta.values())
        if says and not is_level:
            raise Diverged("the pod sends something else than the client has")
        shows = says or choice.delta is None or any(one is not None for one in delta.values())
        return written(fields) if shows and is_level else b""

    def _drop_text(self, said: dict[str, Any], choice: StreamChoice, *, ends: bool) -> None:
        """Take out the text that the client has."""
        has, record, new = self.has, self.record, choice.said
        content = _fresh(has.content, len(record.content), new.content)
        reasoning = _fresh(has.reasoning, len(record.reasoning), new.reasoning or new.reasoning_content)
        if content or ends:
            content, self._held = self._held + content, ""
        if choice.delta is None:
            said["text"] = content
            return
        delta: dict[str, Any] = said["delta"]
        is_role = delta.pop("role", None) is not None
        if content:
            delta["content"] = content
        elif is_role or delta.get("content"):
            delta.pop("content", None)
        for name in delta.keys() & {"reasoning", "reasoning_content"}:
            if reasoning and not self.terms.hides_reasoning:
                delta[name] = reasoning
            else:
                del delta[name]

    def _fresh_calls(self, pieces: Any, before: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """The pieces of tool calls that the client does not have. Its calls keep their ids. `before`: how much of names
        and arguments had come before these pieces."""
        has, new = self.has.calls, self.record.calls
        numbers = [piece.get("index", 0) for piece in pieces]
        fresh = [piece for piece, number in zip(pieces, numbers, strict=True) if number >= len(has)]
        for number in sorted({number for number in numbers if number < len(has)}):
            name_at, arguments_at = before[number] if number < len(before) else (0, 0)
            if _fresh(has[number].name, name_at, new[number].name[name_at:].decode()):
                raise Diverged("the pod calls another tool")
            if rest := _fresh(has[number].arguments, arguments_at, new[number].arguments[arguments_at:].decode()):
                fresh.insert(0, {"index": number, "function": {"arguments": rest}})
        return fresh

    def _drop_logprobs(self, said: dict[str, Any]) -> None:
        """Take out the entries of tokens that the client has, by their number."""
        entries = said.get("logprobs")
        if not entries:
            return
        dropped = max(self.has.logprobs - self.record.logprobs, 0)
        rest = {name: value[dropped:] if isinstance(value, list) else value for name, value in entries.items()}
        if isinstance(rest.get("text_offset"), list) and self._plan.seam.kept:
            shift = len((self.has.content + self._plan.seam.held.encode()).decode())
            rest["text_offset"] = [place + shift for place in rest["text_offset"]]
        left = any(value for value in rest.values() if isinstance(value, list))
        said["logprobs"] = rest if left or not dropped else None

    def _stopped(self, fields: dict[str, Any], said: dict[str, Any], found: Stopped, ids: Sequence[int]) -> bytes:
        """The end of the answer: cut at the stop string that began before the seam."""
        record, plan = self.record, self._plan
        shown = self.has.content if self._held else record.content
        text = found.text + (found.stop if self.terms.includes_stop else "")
        rest = text[len(shown.decode()) :]
        if "delta" in said:
            said["delta"] = {"content": rest} if rest else {}
        else:
            said["text"] = rest
        said |= {"finish_reason": "stop", "stop_reason": found.stop}
        record.ids.extend(ids)
        del record.ids[plan.seam.kept + found.tokens :]
        self._held, self.is_over = "", True
        record.is_finished = record.is_done = True
        return written(fields) + last_events(record, self.terms, len(plan.prompt), plan.reasoning) + DONE


def _fresh(old: bytearray, begin: int, text: str | None) -> str:
    """A text, which goes on at `begin`, without what the old one has of it. Raises `Diverged` for a difference."""
    new = (text or "").encode()
    known = old[begin : begin + len(new)]
    if not new.startswith(known):
        raise Diverged("the pod sends other text than the client has")
    return new[len(known) :].decode()


class Stopped(NamedTuple):
    """`text`: the answer in front of the stop string. `tokens`: new ones up to that which completes it."""

    stop: str
    text: str
    tokens: int


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
                return Stopped(stop, (self._kept + self._text)[: first + place], end - self._begin)
        if len(self._text) >= longest - 1 or end - self._begin >= MAX_STOP_CHARACTERS:
            self._stops = ()
        return None
