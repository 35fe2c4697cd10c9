"""Decides how a broken stream goes on: from its ids behind a seam, by making it again, with a made end, or not at all.

The seam is at the last token at which the client has all of the text so far and nothing more, no parser holds anything,
and no character is half written. A wrong seam is worse than none: where kept ids end inside a character, vLLM sends the
whole prompt to the client (docs/continuation.md#the-seam).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from router.request.continuation.answer_words import HALF, MAX_HALF_TOKENS, AnswerWords
from router.request.continuation.stream import Record
from router.request.continuation.stream_events import DONE, ids_of, written
from router.request.continuation.terms import Terms

WINDOW_TOKENS = 128
"""The last tokens among which the seam is searched."""


class Seam(NamedTuple):
    """Behind `kept` tokens of the answer. `held`: their text that the client does not have yet. `in_reasoning`: whether
    the reasoning is open there."""

    kept: int = 0
    held: str = ""
    in_reasoning: bool = False


def find_seam(record: Record, prompt: Sequence[int], terms: Terms, words: AnswerWords) -> Seam | str:
    """The seam, or why there is none."""
    ids, before = [*prompt, *record.ids], len(prompt)
    in_reasoning = bool(record.reasoning) and not (record.content or record.calls)
    said = bytes(record.reasoning if in_reasoning else record.content).decode()
    if record.reasoning and None in (words.think, words.end_think):
        return "reasoning markers"
    if in_reasoning and terms.stops:
        return "stop strings and reasoning"
    if terms.may_call and words.tool_call is None:
        return "tool call markers"
    end = _before_call(record, words) if terms.may_call else len(record.ids)
    marked = _after(record.ids, words.think if in_reasoning else words.end_think)
    for begin in (marked,) if record.reasoning else dict.fromkeys((marked, 0)):  # where the text of this phase begins
        for special in (False, True):
            found = _search(ids, before + begin, before + end, said, words, special, holds=bool(terms.stops))
            if found is not None:
                return Seam(found[0] - before, found[1], in_reasoning)
    return "text and ids differ"


def reasoning_tokens(prompt: Sequence[int], ids: Sequence[int], words: AnswerWords) -> int:
    """Tokens of reasoning among `ids`, those between the markers."""
    marks = {words.think, words.end_think} - {None}
    is_open = next((one == words.think for one in reversed(prompt) if one in marks), False)
    count = 0
    for one in ids:
        if one in marks:
            is_open = one == words.think
        else:
            count += is_open
    return count


def _before_call(record: Record, words: AnswerWords) -> int:
    """Where the first call begins, behind the reasoning."""
    begin = _after(record.ids, words.end_think)
    places = (place for place in range(begin, len(record.ids)) if record.ids[place] == words.tool_call)
    return next(places, len(record.ids))


def _after(ids: Sequence[int], marker: int | None) -> int:
    return next((place + 1 for place in range(len(ids) - 1, -1, -1) if ids[place] == marker), 0)


def _search(
    ids: Sequence[int], begin: int, end: int, said: str, words: AnswerWords, special: bool, *, holds: bool
) -> tuple[int, str] | None:
    """The last place up to `end` where the text from `begin` on is what was said, and what is held there: with stop
    strings, the end of the text is held back, else nothing may be."""
    base = max(begin, end - WINDOW_TOKENS)
    least = max(begin, base - MAX_HALF_TOKENS)
    first = words.text(ids, begin, base, special=special)
    while base > least and first.endswith(HALF):
        base -= 1
        first = words.text(ids, begin, base, special=special)
    common = min(max(len(first) - 1, 0), len(said))
    if first[:common] != said[:common]:
        return None
    first, said = first[common:], said[common:]
    for place in range(end, base - 1, -1):
        text = first + words.text(ids, base, place, special=special)
        if text.endswith(HALF):
            continue
        if text == said:
            return place, ""
        if holds and text.startswith(said):
            return place, text[len(said) :]
    return None


_MAX_BIAS = 100.0
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_BODY: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Finish:
    """Only these events are missing."""

    events: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Another pod gets `body`. `method`: `retry`, `ids` or `replay`. `prompt` are the ids of the client's prompt,
    `sent` those of prompt and kept tokens, as JSON. `reasoning`: kept tokens of reasoning."""

    method: str
    body: bytes
    prompt: list[int]
    sent: bytes = b""
    seam: Seam = field(default_factory=Seam)
    reasoning: int = 0


StreamPlan: TypeAlias = Continue | Finish | str
"""A string is the reason why the stream ends with an error."""


def plan(terms: Terms, record: Record, body: bytes, words: AnswerWords | None) -> StreamPlan:
    """How the stream goes on. `body` is the client's; `words`: None where no ids are asked for. Raises nothing."""
    try:
        prompt = ids_of(record.prompt) if record.prompt else []
    except ValueError:
        return "prompt ids"
    if record.is_finished:
        return _finish(terms, record, prompt, words, "")
    again = Continue(
        method="replay" if record.has_said else "retry",
        body=first_body(body, terms) if words is not None else body,
        prompt=prompt,
        sent=msgspec.json.encode(prompt),
    )
    if not record.has_said:
        return again
    found: StreamPlan = terms.no_ids
    if words is None or not prompt:
        found = "no ids"
    elif not found and terms.has_grammar and (record.content or record.calls):
        found = "grammar"
    elif not found:
        found = _from_ids(terms, record, prompt, body, words)
    return again if isinstance(found, str) and not terms.no_replay else found


def first_body(body: bytes, terms: Terms) -> bytes:
    """The client's body, with ids asked for. Of a repeated field, engines read the last."""
    asked = b',"return_token_ids":true'
    if terms.hides_reasoning:
        asked += b',"include_reasoning":true'
    return body.rstrip()[:-1] + asked + b"}"


def _finish(terms: Terms, record: Record, prompt: list[int], words: AnswerWords | None, finish: str) -> StreamPlan:
    is_known = bool(prompt and record.ids) and (words is not None or not record.reasoning)
    if terms.wants_usage and not record.has_usage and not is_known:
        return "usage"
    reasoning = reasoning_tokens(prompt, record.ids, words) if words is not None and record.reasoning else 0
    return Finish(last_events(record, terms, len(prompt), reasoning, finish) + DONE)


def _from_ids(terms: Terms, record: Record, prompt: list[int], body: bytes, words: AnswerWords) -> StreamPlan:
    """From the seam."""
    seam = find_seam(record, prompt, terms, words)
    if isinstance(seam, str):
        return seam
    if terms.no_replay and record.calls:
        return "tool call"
    if terms.no_replay and record.logprobs > seam.kept:
        return "half a character"
    if terms.max_tokens is not None and seam.kept >= terms.max_tokens:
        return "length" if seam.held else _finish(terms, record, prompt, words, "length")
    if not seam.kept:
        return "nothing to keep"
    sent = msgspec.json.encode([*prompt, *record.ids[: seam.kept]])
    return Continue(
        method="ids",
        body=_body_from(seam, terms, record, sent, body),
        prompt=prompt,
        sent=sent,
        seam=seam,
        reasoning=reasoning_tokens(prompt, record.ids[: seam.kept], words),
    )


def _body_from(seam: Seam, terms: Terms, record: Record, sent: bytes, body: bytes) -> bytes:
    """The client's body for a pod that goes on at the seam: ids instead of a prompt, limits lowered."""
    fields: dict[str, Any] = dict(_BODY.decode(first_body(body, terms)))
    ids = msgspec.Raw(sent)
    if terms.is_chat:
        fields["kv_transfer_params"] = {"prompt_token_ids": ids}
    else:
        fields["prompt"] = ids
    for name in _LIMITS:
        if name in fields and (limit := _number(fields[name])) is not None:
            fields[name] = max(limit - seam.kept, 0)
    fields.pop("truncate_prompt_tokens", None)
    if terms.frequency_penalty:
        fields["logit_bias"] = _bias(terms, record.ids[: seam.kept])
    return msgspec.json.encode(fields)


def _number(raw: msgspec.Raw) -> int | None:
    return msgspec.json.decode(raw, type=int | None, strict=False)


def _bias(terms: Terms, kept: Any) -> dict[str, float]:
    """What makes up for a frequency penalty that does not count the kept tokens: it is additive."""
    bias = defaultdict(float, terms.logit_bias)
    for token, count in Counter(kept).items():
        bias[str(token)] -= terms.frequency_penalty * count
    return {token: max(min(one, _MAX_BIAS), -_MAX_BIAS) for token, one in bias.items()}


# --- the usage of a continued answer: each token counts once ---


def added_up(usage: Mapping[str, Any], before: Continue) -> dict[str, Any]:
    """A later pod's usage, with the kept tokens as output: it counts them in its prompt, and where they close the
    reasoning, all of its own as reasoning. Raises `LookupError`, `TypeError` or `AttributeError` for one that is not a
    usage."""
    prompt, made = len(before.prompt), before.seam.kept + usage["completion_tokens"]
    found = {**usage, "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    if details := usage.get("completion_tokens_details"):
        new = int(details.get("reasoning_tokens") or 0) if before.seam.in_reasoning else 0
        found["completion_tokens_details"] = {**details, "reasoning_tokens": before.reasoning + new}
    details = usage.get("prompt_tokens_details") or {}
    if (cached := details.get("cached_tokens")) is not None:
        found["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, prompt)}
    return found


def last_events(record: Record, terms: Terms, prompt_tokens: int, reasoning: int, finish: str = "") -> bytes:
    """What is missing of an answer whose text is complete: the `finish` reason where that is missing, too, usage and
    `[DONE]`."""
    head = {
        "id": record.id,
        "object": "chat.completion.chunk" if terms.is_chat else "text_completion",
        "created": record.created,
        "model": record.model,
    }
    events = b""
    if finish:
        said: dict[str, Any] = {"delta": {}} if terms.is_chat else {"text": ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        events += written({**head, "choices": [choice]})
    if terms.wants_usage and not record.has_usage:
        made = len(record.ids)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + made,
            "completion_tokens": made,
            "prompt_tokens_details": None,
        }
        if terms.is_chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        events += written({**head, "choices": [], "usage": usage})
    return events
