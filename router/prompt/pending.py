"""A prompt on its way from a request to its tokens, and the remembered prompts of chats that it continues.

The prompt of a chat's first messages is stored by a digest of these messages when it is seen the second time, because
most chats are never continued. The least recently used prefixes are evicted first.

Threads: `PrefixCache.store` may run in any thread; everything else of a cache belongs to the event loop's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from sys import getsizeof
from typing import TypeAlias

import msgspec
import xxhash

from router.prompt.apis.conversion import Conversion
from router.prompt.media import MediaText
from router.prompt.pictures.picture_reader import PictureIdentities
from router.prompt.segments import Lookup, SegmentCache
from router.types import BlockHash, Generation, InferenceRequest

MAX_NEW_MESSAGES = 24
"""Boundaries that are looked up per chat: one step of an agent may have several calls."""
MAX_NEW_PLAIN = 3
"""The same for chats of roles and texts: a turn usually adds two messages."""
_SEEN_BYTES = 150
"""Size in CPython of an entry without a prefix: key and slot."""
_PREFIX_BYTES = 400
"""Size of an entry with a prefix, without the prefix's roles, tokens, hashes and text."""

Raw: TypeAlias = msgspec.Raw | bytes


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


class FoundPrefix(msgspec.Struct, frozen=True, gc=False):
    """A chat and its longest cached prefix. `seen`: a boundary of the chat was seen before."""

    messages: list[msgspec.Raw]
    boundaries: list[Boundary]
    prefix: CachedPrefix
    seen: bool
    cache: PrefixCache
    """The cache that the prefix is from. `clear` replaces it; later stores into it are lost."""
    key: str = ""
    """The field of the messages, if the chat has more than roles and texts."""

    @property
    def new_bytes(self) -> int:
        return sum(map(len, self.messages[self.prefix.messages :]))


class PendingPrompt(msgspec.Struct, gc=False):
    """A prompt between `Fingerprinter.open` and `finish`. `render` and `look_up` fill it in."""

    request: InferenceRequest
    generation: Generation
    seed: BlockHash
    segments: SegmentCache
    prompt: Lookup | array[int]
    """Its text, or the client's tokens; empty until it is rendered."""
    found: FoundPrefix | None = None
    conversion: type[Conversion] | None = None
    """How the body is converted to a chat."""
    identities: PictureIdentities | None = None
    prefix: CachedPrefix | None = None
    """The cached prefix, if the prompt is read incrementally: the text is the one behind it."""
    framed: bool = False
    media: MediaText | None = None
    """With pictures: what is known of them."""
    exact_pieces: int = 0
    """Number of pieces in front of the first picture whose tokens are unknown."""
    entry: CachedPrefix | None = None
    """What to store of the chat, without tokens and hashes."""
    entry_pieces: int = 0
    """Number of pieces behind the cached prefix, up to the last cut, that the entry has."""
    replaced: int = 0
    """The digest of the prefix that the entry continues, which is then dropped."""

    @property
    def cold(self) -> tuple[str, ...]:
        return self.prompt.cold if isinstance(self.prompt, Lookup) else ()

    @property
    def cold_characters(self) -> int:
        return sum(map(len, self.cold))

    def store_entry(self, tokens: array[int], hashes: array[int]) -> None:
        """Store the entry with these tokens, which end at the last cut."""
        assert self.entry is not None and self.found is not None
        kept = hashes[: len(tokens) // self.generation.block_size_tokens].tobytes()
        entry = msgspec.structs.replace(self.entry, tokens=tokens.tobytes(), seed=self.seed, hashes=kept)
        self.found.cache.store(self.found.boundaries[0].digest, entry, self.replaced)


def boundaries(messages: Sequence[Raw], context: bytes, seed: int, max_new: int = MAX_NEW_MESSAGES) -> list[Boundary]:
    """The last boundaries of a chat, its end first. `context`: all else that the prompt depends on.

    Digests are XXH3-128 with a secret `seed`: a client that does not know it cannot make two chats that share one, and
    would gain only a wrong guess of what is cached."""
    digest = xxhash.xxh3_128(context, seed=seed & (2**64 - 1))
    first = max(len(messages) - max_new, 1)
    found = []
    for number, message in enumerate(messages, 1):
        digest.update(message)  # a JSON object, which shows where it ends
        if number >= first:
            found.append(Boundary(number, digest.intdigest()))
    return found[::-1]


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
