"""Which messages of this chat were there before, and what do their prompts begin with?

A conversation's next request repeats the last one, to the byte, and goes on. So a body is looked up by digests of what
stands in front of its last messages; where one is known, only what follows has to be decoded, put into the template's
form, cut, encoded and hashed, however long the conversation is. Two bodies must have begun alike before anything is
remembered: most prompts that share nothing with others never come back. This file never decodes a message.

Threads: `keep` may run in any; all else is for the event loop's.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, deque

import msgspec
import xxhash

from router.types import CachedPrefix, Mark

BYTES = 64 * 1024 * 1024
BOUNDARIES = 4
"""So many beginnings of a body are looked up: a turn usually adds two messages, or three where one was only seen."""
SHORT_BYTES = 4096
"""A body no longer than this is looked through to its beginning."""
_SEEN_BYTES = 150
"""What one beginning costs in CPython: key and entry."""
_KNOWN_BYTES = 560
"""The same with all that is known of it, besides head, roles, tokens, hashes and rest."""
_PIECE_BYTES = 150
"""A piece besides its tokens."""
_ROLE_BYTES = 8
"""A reference: the words are everybody's."""
_OPENS = b'{"role":'
_NAME = b'"messages"'
_MESSAGES = re.compile(_NAME + rb"\s{0,9}:\s{0,9}\[\s{0,99}")
_NAME_MESSAGES = (_NAME, b"\\u006", b"\\u007")
"""One of these stands in whatever names the messages, also with escaped letters."""
_UNREADABLE = (msgspec.DecodeError, RecursionError)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_BETWEEN = (b",", b", ")
"""What clients write between two messages."""


class EarlierTurns:
    """Beginnings of bodies, of all models together; the least recently used go when the bytes run out.

    Digests are XXH3-128 with a secret `seed`: whoever does not know it will hardly make two bodies that are taken for
    one another, and would win no more than a wrong guess of what is cached."""

    def __init__(self, seed: int, most_bytes: int = BYTES) -> None:
        self.seed = seed
        self._most_bytes = most_bytes
        self._known: OrderedDict[int, CachedPrefix | None] = OrderedDict()
        self._left: deque[tuple[int, bytes, int, CachedPrefix, int]] = deque()
        self.bytes = 0
        """Held now, by estimate."""
        self.age = 0
        """How often everything was forgotten: what was begun before is not remembered any more."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, body: bytes) -> tuple[CachedPrefix | None, int, Mark | None]:
        """(the longest beginning that is known, where the first message after it begins, what to remember).

        Looks at the last messages only, and, of a long body, at its later half. Nothing is known of a body that names
        its messages again behind that: the last ones so named count, and may be others."""
        self._take_in()
        view, furthest = memoryview(body), min(len(body) // 2, max(len(body) - SHORT_BYTES, 0))
        mark: tuple[int, int] | None = None
        seen = False
        at = len(body)
        for _ in range(BOUNDARIES):
            at = body.rfind(_OPENS, furthest, at)
            end = _end_before(body, at) if at > 0 else 0
            if not end:
                break
            digest = xxhash.xxh3_128_intdigest(view[:end], self.seed)
            if digest in self._known:
                self._known.move_to_end(digest)
                earlier, seen = self._known[digest], True
                if earlier is not None:
                    if _named_again(body, at):
                        return None, 0, None
                    return earlier, at, Mark(mark[0], at, mark[1], earlier.head) if mark else None
            mark = mark or (digest, end)
        if mark is None:
            return None, 0, None
        if not seen:
            self._put(mark[0], None)
            return None, 0, None
        head = b"" if _named_again(body, mark[1]) else _head(body, mark[1])
        return None, 0, Mark(mark[0], len(head), mark[1], head) if head else None

    def keep(self, mark: Mark, body: bytes, messages: int, earlier: CachedPrefix, age: int) -> None:
        """Remember what that beginning of `body` holds, which has so many messages from `mark.start` on. Safe in any
        thread: it is taken in before anything is looked up again."""
        self._left.append((mark.digest, body[mark.start : mark.end], messages, earlier, age))

    def _take_in(self) -> None:
        while self._left:
            digest, listed, messages, earlier, age = self._left.popleft()
            if age == self.age and _message_count(listed) == messages:
                self._put(digest, earlier)

    def holds(self, earlier: CachedPrefix) -> bool:
        """Is it remembered still?"""
        return self._known.get(earlier.digest) is earlier

    def drop(self, earlier: CachedPrefix) -> None:
        """It is not of use any more."""
        if self.holds(earlier):
            self._put(earlier.digest, None)

    def clear(self) -> None:
        """Forget everything."""
        self.age += 1
        self._known.clear()
        self.bytes = 0

    def _put(self, digest: int, earlier: CachedPrefix | None) -> None:
        if digest in self._known:
            self._let_go(self._known.pop(digest))
        self._known[digest] = earlier
        self.bytes += _size_bytes(earlier)
        piece = earlier.piece if earlier else None
        while piece is not None:
            piece.users += 1
            if piece.users > 1:  # it holds those before it
                break
            self.bytes += _PIECE_BYTES + len(piece.tokens)
            piece = piece.before
        while self.bytes > self._most_bytes:
            self._let_go(self._known.popitem(last=False)[1])

    def _let_go(self, earlier: CachedPrefix | None) -> None:
        self.bytes -= _size_bytes(earlier)
        piece = earlier.piece if earlier else None
        while piece is not None:
            piece.users -= 1
            if piece.users:
                break
            self.bytes -= _PIECE_BYTES + len(piece.tokens)
            piece = piece.before


def _size_bytes(earlier: CachedPrefix | None) -> int:
    if earlier is None:
        return _SEEN_BYTES
    flat = len(earlier.head) + len(earlier.tail) + len(earlier.hashes)
    return _KNOWN_BYTES + flat + _ROLE_BYTES * len(earlier.roles) + sys.getsizeof(earlier.rest)


def _head(body: bytes, end: int) -> bytes:
    """What stands in front of the first of the body's own messages, not of others inside some field, nor of a list
    whose name only ends so; empty where it is not found at once."""
    at = body.find(_NAME, 0, end)
    opened = _MESSAGES.match(body, at, end) if at > 0 and body[at - 1 : at] != b"\\" else None
    head = body[: opened.end()] if opened else b""
    try:
        _OBJECT.decode(head + b"]}")
    except _UNREADABLE:
        return b""
    return head


def _named_again(body: bytes, at: int) -> bool:
    """Might there be another list of messages behind that place?"""
    return any(body.find(name, at) >= 0 for name in _NAME_MESSAGES)


def _message_count(listed: bytes) -> int:
    """How many messages stand there; -1 where there is anything else between them, which could be what nobody may miss
    in a body."""
    try:
        return len(_ELEMENTS.decode(b"[" + listed + b"]"))
    except _UNREADABLE:
        return -1


def _end_before(body: bytes, at: int) -> int:
    """Where the message ends that the one at `at` follows; 0 where it is the first."""
    for between in _BETWEEN:
        if body.endswith(b"}" + between, 0, at):
            return at - len(between)
    return 0
