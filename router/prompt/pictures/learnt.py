"""Keeps the tokens that engines put in place of pictures, for models whose formula is not known here.

A picture is wanted once it was seen twice: most come only once, and to ask an engine makes it process the picture.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from router.hashing import TOKEN_BYTES, token_array

MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of the tokens of all pictures of a model; those that were learnt first are dropped."""
MAX_SEEN = 4096
"""Pictures that were seen once, and as many that could not be learnt."""
MAX_ASKED = 8
"""Pictures that wait for `next_wanted`: further ones replace them."""
MAX_BASE64_CHARACTERS = 4 * 1024 * 1024
"""A larger picture is not learnt: it would have to be sent once more."""
MAX_FAILURES = 2
"""This many failures and no success: the engine does not replace the placeholder alone, or takes no pictures."""
EAGER = 8
"""The first pictures are wanted at once: those of the self-test."""


class Wanted(NamedTuple):
    """A picture whose tokens are unknown, and the weights of the engine that identifies it so."""

    identifier: str
    weights: str
    base64: str
    """Its file. Not its URL: a client could write one that engines refuse, for a picture that others have, too."""


class LearntPictures:
    """The tokens of pictures by identifier. `tokens` may be called in any thread, all else in one."""

    def __init__(self) -> None:
        self._tokens: dict[str, array[int]] = {}
        self._bytes = 0
        self._asked: deque[Wanted] = deque(maxlen=MAX_ASKED)
        self._seen: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._failures = 0

    @property
    def gave_up(self) -> bool:
        return not self._tokens and self._failures >= MAX_FAILURES

    def tokens(self, wanted: Wanted) -> array[int] | None:
        """The tokens of a picture; None while they are unknown."""
        found = self._tokens.get(wanted.identifier)
        if found is None and len(wanted.base64) <= MAX_BASE64_CHARACTERS:
            self._asked.append(wanted)
        return found

    def next_wanted(self) -> Wanted | None:
        """A picture whose tokens an engine should be asked for."""
        while self._asked:
            wanted = self._asked.popleft()
            if self.gave_up or wanted.identifier in self._tokens or wanted.identifier in self._failed:
                continue
            if wanted.identifier in self._seen or len(self._tokens) < EAGER:
                return wanted
            _add(self._seen, wanted.identifier)
        return None

    def learn(self, wanted: Wanted, ours: Sequence[int], engine: Sequence[int] | None, placeholder: int) -> None:
        """Learn from the engine's tokens of a prompt with this picture alone. `ours`: those with the placeholder."""
        found = replacement(ours, engine, placeholder) if engine is not None else None
        if found is None:
            self._failures += 1
            _add(self._failed, wanted.identifier)
            return
        self._forget(wanted.identifier)
        self._tokens[wanted.identifier] = found
        self._bytes += len(found) * TOKEN_BYTES
        self._seen.pop(wanted.identifier, None)
        while self._bytes > MAX_BYTES:
            self._forget(next(iter(self._tokens)))

    def _forget(self, identifier: str) -> None:
        self._bytes -= len(self._tokens.pop(identifier, ())) * TOKEN_BYTES


def _add(kept: dict[str, None], identifier: str) -> None:
    kept[identifier] = None
    if len(kept) > MAX_SEEN:
        del kept[next(iter(kept))]


def replacement(ours: Sequence[int], engine: Sequence[int], placeholder: int) -> array[int] | None:
    """What the engine put in place of the only `placeholder` in `ours`; None where anything else differs."""
    before, tokens = token_array(ours), token_array(engine)
    if before.count(placeholder) != 1:
        return None
    at = before.index(placeholder)
    behind = len(before) - at - 1
    end = len(tokens) - behind
    if end <= at or tokens[:at] != before[:at] or tokens[end:] != before[at + 1 :]:
        return None
    return tokens[at:end]
