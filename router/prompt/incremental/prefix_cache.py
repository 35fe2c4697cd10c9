"""Remembers the prompts of the first messages of chats, by a digest of these messages.

A prefix is stored when it is seen the second time, because most chats are never continued. The least recently used
prefixes are evicted first.

Threads: `store` may run in any thread; everything else belongs to the event loop's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from sys import getsizeof

import msgspec

from router.types import BlockHash

_SEEN_BYTES = 150
"""Size in CPython of an entry without a prefix: key and slot."""
_PREFIX_BYTES = 400
"""Size of an entry with a prefix, without the prefix's roles, tokens, hashes and text."""


class Boundary(msgspec.Struct, frozen=True, gc=False):
    """A place between two messages: the number of messages before it, and their digest."""

    messages: int
    digest: int


class CachedPrefix(msgspec.Struct, frozen=True, gc=False):
    """The prompt of a chat's first messages, encoded up to the last place where its text may be cut."""

    messages: int = 0
    roles: tuple[str, ...] = ()
    """Roles of the messages of a chat with only roles and texts."""
    skeleton: int = 0
    """`TemplateSkeleton.prefixes` at this boundary."""
    samples: bytes = b""
    """Some messages of any other chat, encoded (`short_chats.py`)."""
    head: int = 0
    head_digest: int = 0
    """Characters, and a digest of them, that the whole prompt starts with and short chats as well."""
    tokens: bytes = b""
    """As `hashing.token_array` lays them out."""
    seed: BlockHash = 0
    hashes: bytes = b""
    """Hashes of the full blocks in `tokens`, chained from `seed`, as `hashing.hash_array` lays them out."""
    rest: str = ""
    """The text after the cut, which is not encoded."""


EMPTY_PREFIX = CachedPrefix()


class PrefixCache:
    """The prefixes of one model's chats."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[int, CachedPrefix | None] = OrderedDict()
        self._stored: deque[tuple[int, CachedPrefix, int]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, boundaries: Sequence[Boundary]) -> CachedPrefix | None:
        """The longest stored prefix. `EMPTY_PREFIX` if a boundary was seen before but has no prefix yet. None for a new
        chat; its longest boundary is then marked as seen."""
        self._take_stored()
        seen = False
        for boundary in boundaries:
            if boundary.digest in self._prefixes:
                seen = True
                self._prefixes.move_to_end(boundary.digest)
                prefix = self._prefixes[boundary.digest]
                if prefix is not None:
                    return prefix
        if seen:
            return EMPTY_PREFIX
        if boundaries:
            self._put(boundaries[0].digest, None)
        return None

    def store(self, digest: int, prefix: CachedPrefix, replaced: int = 0) -> None:
        """Store a prefix, and drop the one that it continues, `replaced`. The next `find` can return it."""
        self._stored.append((digest, prefix, replaced))

    def _take_stored(self) -> None:
        while self._stored:
            digest, prefix, replaced = self._stored.popleft()
            if replaced in self._prefixes:
                self.bytes -= _size_bytes(self._prefixes.pop(replaced))
            self._put(digest, prefix)

    def _put(self, digest: int, prefix: CachedPrefix | None) -> None:
        if digest in self._prefixes:
            self.bytes -= _size_bytes(self._prefixes.pop(digest))
        self._prefixes[digest] = prefix
        self.bytes += _size_bytes(prefix)
        while self.bytes > self._max_bytes:
            self.bytes -= _size_bytes(self._prefixes.popitem(last=False)[1])


def _size_bytes(prefix: CachedPrefix | None) -> int:
    if prefix is None:
        return _SEEN_BYTES
    texts = getsizeof(prefix.rest) + len(prefix.samples)
    return _PREFIX_BYTES + getsizeof(prefix.roles) + len(prefix.tokens) + len(prefix.hashes) + texts
