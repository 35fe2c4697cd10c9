"""Finds places where a text can be cut so that its pieces encode to the tokens of the whole.

A cut is possible only in front of an added token at which the tokenizer itself always splits: one that is matched
before normalization, takes no neighbouring whitespace, and cannot overlap with another added token. Every piece starts
with that token, so rules for the start of a text (Metaspace `first`, ...) make no difference. All samples are checked;
a tokenizer that fails on one is not cut at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any
from unicodedata import category
from weakref import WeakKeyDictionary

from router.prompt.samples import samples
from router.prompt.tokenizer import Tokenizer

SHORTEST_PIECE = 128
"""Minimum length of a piece in characters: limits the pieces of a text full of special tokens."""
HEADS_TRIED = 32
"""False matches of `head` in one text before the pattern takes over."""
GROWTH = 128
"""A piece is at least 1/128 as long as the text before it: a text of n characters has O(log n) pieces."""
SEARCHED = 1 << 14
"""Characters that the pattern searches at once, because a search cannot be interrupted."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Places to cut at. Cutting goes from left to right and ignores the text behind a cut, so a text and its
    continuation share all pieces but the last."""

    pattern: re.Pattern[str] | None
    head: str = ""
    longest: int = 0

    def pieces(self, text: str, shortest: int = SHORTEST_PIECE) -> list[str]:
        """`text` in order, no piece empty; all but the last have at least `shortest` characters."""
        pieces = []
        start = 0
        while (cut := self._next(text, start + max(shortest, start // GROWTH))) >= 0:
            pieces.append(text[start:cut])
            start = cut
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def safe_end(self, text: str, end: int) -> int:
        """The last place up to `end` where the tokens of what is in front do not depend on what follows; 0 if there is
        none."""
        if self.pattern is None or self.pattern.match(text, end):
            return end if self.pattern is not None else 0
        return sum(map(len, self.pieces(text[:end], shortest=1)[:-1]))

    def _next(self, text: str, start: int) -> int:
        """The first possible cut from `start` on; -1 where there is none. In text with few heads, `find` is many times
        faster than the pattern."""
        if self.pattern is None:
            return -1
        for _ in range(HEADS_TRIED if self.head else 0):
            at = text.find(self.head, start)
            if at < 0 or self.pattern.match(text, at):
                return at
            start = at + 1
        while start < len(text):
            found = self.pattern.search(text, start, start + SEARCHED + self.longest)
            if found:
                return found.start()
            start += SEARCHED
        return -1


_found: WeakKeyDictionary[Tokenizer, tuple[str, Cuts]] = WeakKeyDictionary()
"""Backend and cuts of each tokenizer that is in use."""


def find_cuts(tokenizer: Tokenizer) -> Cuts:
    """The cuts of this tokenizer, checked on samples; none where they are not exact. They are found once for each
    tokenizer and backend, which takes 80 ms."""
    backend, known = tokenizer.backend, _found.get(tokenizer)
    if known is None or known[0] != backend:
        known = _found[tokenizer] = backend, _find_cuts(tokenizer)
    return known[1]


def _find_cuts(tokenizer: Tokenizer) -> Cuts:
    added = [token.content for token in tokenizer.added_tokens]
    alone = _without_overlaps(added)
    words = [token.content for token in tokenizer.added_tokens if token.content in alone and _splits(token, tokenizer)]
    if not words:
        return Cuts(None)
    cuts = Cuts(re.compile(_any_of(sorted(words))), _common_prefix(words), max(map(len, words)))
    texts = samples(added)
    for text, whole in zip(texts, tokenizer.encode_batch(texts), strict=True):
        pieces = tokenizer.encode_batch(cuts.pieces(text, shortest=1))
        if list(chain.from_iterable(pieces)) != whole.tolist():
            return Cuts(None)
    return cuts


def _splits(token: Any, tokenizer: Tokenizer) -> bool:
    """Whether this token is always matched before normalization and leaves its neighbours unchanged.

    Its outer characters must be punctuation or symbols, so that a neighbour which strips whitespace or matches only
    whole words cannot reach across the cut."""
    if token.lstrip or token.rstrip or token.single_word or (token.normalized and tokenizer.normalizes):
        return False
    ends = (category(token.content[0]), category(token.content[-1]))
    return all(kind[0] in "PS" and kind != "Pc" for kind in ends)


def _without_overlaps(words: Iterable[str]) -> set[str]:
    """Those of `words` that match wherever they occur in a text: none contains or is contained in another, or can
    share its first or last characters with another or with itself."""
    known = set(words)
    heads = {word[:end] for word in known for end in range(1, len(word))}
    tails = {word[start:] for word in known for start in range(1, len(word))}
    shared = heads & tails
    inner = {word: _inside(word) & known for word in known}
    nested = {other for others in inner.values() for other in others}

    def alone(word: str) -> bool:
        ends = {word[:i] for i in range(1, len(word))} | {word[i:] for i in range(1, len(word))}
        return not (inner[word] or word in nested or ends & shared)

    return {word for word in known if alone(word)}


def _inside(word: str) -> set[str]:
    return {word[i:j] for i in range(len(word)) for j in range(i + 1, len(word) + 1)} - {word}


def _any_of(words: Iterable[str]) -> str:
    """A pattern for exactly these sorted words, none a prefix of another, in the form of a trie: one step per character
    instead of one attempt per word."""
    words = list(words)
    head = _common_prefix(words)
    if len(words) == 1:
        return re.escape(head)
    groups = groupby((word[len(head) :] for word in words), key=lambda rest: rest[0])
    return re.escape(head) + "(?:" + "|".join(_any_of(group) for _, group in groups) + ")"


def _common_prefix(words: Sequence[str]) -> str:
    first, last = min(words), max(words)
    return next((first[:i] for i, letter in enumerate(first) if last[i : i + 1] != letter), first)
