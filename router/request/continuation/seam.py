"""Where may another pod go on?

At the last token at which the client has all of the text so far and nothing more, no parser holds anything, and no
character is half written. A wrong seam is worse than none: where kept ids end inside a character, vLLM sends the whole
prompt to the client (docs/continuation.md#the-seam).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.request.continuation.answer_words import HALF, MAX_HALF_TOKENS, AnswerWords
from router.request.continuation.record import Record
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
