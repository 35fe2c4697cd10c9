"""Finds a stop string that begins before the seam and ends after it: the later pod cannot see its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.request.continuation.answer_words import HALF, MAX_HALF_TOKENS, AnswerWords
from router.request.continuation.terms import MAX_STOP_CHARACTERS


class Stopped(NamedTuple):
    stop: str
    begin: int
    """Where it begins in the kept text and the new one together."""
    tokens: int
    """New tokens up to the one that completes it."""
    text: str
    """Their text."""


class StopWatch:
    """`ids` are the last ones of prompt and kept tokens, `kept` is the text of the latter. Each token is decoded once,
    and only `MAX_STOP_CHARACTERS` of them."""

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
