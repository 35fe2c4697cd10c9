"""Caches the tokens of text segments, so that a shared prefix is encoded only once.

Text is cut at special tokens into segments (see `Cuts`). Each segment's tokens are cached under a digest of its
text, seeded by the segment before it and by a secret: a client that does not know the secret cannot make two texts with
one digest, and would gain only a wrong guess of what is cached. A path of segments is a known prefix; each segment also
carries the hashes of the blocks that end inside it. The least recently used segments are evicted first; a segment whose
parent was evicted is never found, and is evicted later.

Threads: `look_up` belongs to the event loop's thread. `complete` and `keep` may run in any thread: the first only
encodes, the second puts new segments into a queue that the next `look_up` empties.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any
from unicodedata import category
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from router.errors import MalformedRequest
from router.hashing import TOKEN_BYTES, hash_array, hash_rest, salt_seed, token_array
from router.prompt.samples import TEXTS, samples
from router.prompt.tokenizer import REFERENCE, Tokenizer
from router.types import BlockHash

NO_TOKENS = token_array()
_CACHE_UTF8 = msgspec.msgpack.Encoder().encode
"""Encodes a string, and CPython keeps its UTF-8 inside it: `str.encode` and the tokenizer then only copy it."""
SEGMENT_BYTES = 280
"""Size of a segment in CPython without its tokens and hashes: key, slot, object headers."""
_FIRST_ID = 4
"""Smaller ids are roots: one per backend, with and without the frame of special tokens."""


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """Hashes of the blocks that end in a segment, as `hashing.hash_array` lays them out, for a generation's seed."""

    seed: BlockHash
    hashes: bytes


class Segment(msgspec.Struct, gc=False, eq=False):
    """The tokens of one piece of text in one place, as `hashing.token_array` lays them out.

    All fields are bytes and numbers: thousands of segments are kept, and the garbage collector would walk over other
    objects. `sealed` belongs to the last generation that used the segment, and is replaced as a whole. `id` and
    `size_bytes` are 0 until the segment is in the cache."""

    tokens: bytes
    sealed: Sealed | None = None
    id: int = 0
    size_bytes: int = 0

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """One text: its known leading segments, and the pieces that must be encoded."""

    text: str
    root: int
    known: tuple[Segment, ...]
    cold: tuple[str, ...]
    special_tokens: bool
    """The frame depends on the text: both are encoded together, as one piece."""
    head: array[int]
    tail: array[int]
    """Tokens before and after those of the segments (the frame, if requested)."""


class SegmentCache:
    """Tokens of recent texts, by segment."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int, seed: int = 0) -> None:
        self._seed = seed
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._fresh: deque[tuple[Lookup, list[Segment]]] = deque()
        self._next_id = _FIRST_ID
        self.cuts = find_cuts(tokenizer)
        self._frame = _frame(tokenizer)
        self.bytes = 0
        """Bytes held, estimated; never above `cache_bytes` after a `look_up`."""

    def __len__(self) -> int:
        return len(self._segments)

    def pieces(self, text: str, *, framed: bool = False) -> list[str]:
        """The pieces of `text`, each of which is encoded alone. Safe in any thread. `MalformedRequest` for a lone
        surrogate, which no tokenizer can encode."""
        pieces = [text] if framed and self._frame is None else self.cuts.pieces(text)
        try:
            for piece in pieces:
                _CACHE_UTF8(piece)
        except UnicodeEncodeError as error:
            raise MalformedRequest(f"the prompt contains a lone surrogate: {error}") from error
        return pieces

    def look_up(
        self, text: str, *, framed: bool = False, pieces: Sequence[str] | None = None, salt: str = ""
    ) -> Lookup:
        """The known segments of `text`, and its other pieces. With `framed`, the tokenizer's special tokens are put
        around the text. `pieces`: the result of `pieces`, which is else called here. Texts with another `salt` are
        unknown: that a text is known shows in the time of its request."""
        self._insert_fresh()
        whole = framed and self._frame is None
        head, tail = self._frame if framed and self._frame else (token_array(), token_array())
        if pieces is None:
            pieces = self.pieces(text, framed=framed)
        root = (2 * (self._tokenizer.backend == REFERENCE) + framed) ^ salt_seed(salt)
        known = self._follow(root, pieces)
        return Lookup(text, root, known, tuple(pieces[len(known) :]), whole, head, tail)

    def complete(self, lookup: Lookup) -> list[Segment]:
        """All segments of a text that was looked up; encodes the cold ones. Safe in any thread."""
        if lookup.special_tokens and lookup.cold:
            return [Segment(self._tokenizer.encode(lookup.text, add_special_tokens=True).tobytes())]
        return [*lookup.known, *[Segment(tokens.tobytes()) for tokens in self._tokenizer.encode_batch(lookup.cold)]]

    def keep(self, lookup: Lookup, segments: list[Segment]) -> None:
        """Cache what `complete` encoded, from the next `look_up` on. Safe in any thread."""
        if lookup.cold:
            self._fresh.append((lookup, segments[len(lookup.known) :]))

    def _follow(self, root: int, pieces: Sequence[str]) -> tuple[Segment, ...]:
        """The longest known path, marked as used: the end first, so that ends are evicted before their parents."""
        known: list[Segment] = []
        keys: list[int] = []
        parent = root
        for piece in pieces:
            key = self._key(parent, piece)
            segment = self._segments.get(key)
            if segment is None:
                break
            known.append(segment)
            keys.append(key)
            parent = segment.id
        for key in reversed(keys):
            self._segments.move_to_end(key)
        return tuple(known)

    def _insert_fresh(self) -> None:
        while self._fresh:
            lookup, segments = self._fresh.popleft()
            parent = lookup.known[-1].id if lookup.known else lookup.root
            for piece, segment in zip(lookup.cold, segments, strict=True):
                parent = self._insert(self._key(parent, piece), segment)
        while self.bytes > self._cache_bytes:
            self.bytes -= self._segments.popitem(last=False)[1].size_bytes

    def _key(self, parent: int, piece: str) -> int:
        return xxhash.xxh3_128_intdigest(piece.encode(), self._seed ^ parent)

    def _insert(self, key: int, segment: Segment) -> int:
        """Insert a segment unless another request already has; returns the id for its children."""
        kept = self._segments.setdefault(key, segment)
        if kept is segment:
            segment.id = self._next_id
            hashes = segment.sealed.hashes if segment.sealed else b""
            segment.size_bytes = SEGMENT_BYTES + len(segment.tokens) + len(hashes)
            self._next_id += 1
            self.bytes += segment.size_bytes
        return kept.id


def all_cold(text: str, pieces: list[str]) -> Lookup:
    """A text that was not looked up, or that continues one which ended at a cut and is cached elsewhere: all its pieces
    must be encoded."""
    return Lookup(text, 0, (), tuple(pieces), False, NO_TOKENS, NO_TOKENS)


def _frame(tokenizer: Tokenizer) -> tuple[array[int], array[int]] | None:
    """The tokens that `add_special_tokens` puts before and after any text; None where it does something else."""
    bare = tokenizer.encode_batch(TEXTS)
    framed = tokenizer.encode_batch(TEXTS, add_special_tokens=True)
    probe = TEXTS.index("a")
    width = len(bare[probe])
    for start in range(len(framed[probe]) - width + 1):
        head, tail = framed[probe][:start], framed[probe][start + width :]
        if all(head + inner + tail == outer for inner, outer in zip(bare, framed, strict=True)):
            return head, tail
    return None


def hash_path(tokens: array[int], segments: Sequence[Segment], seed: BlockHash, block_size_tokens: int) -> array[int]:
    """Hashes of the full blocks in `tokens`: those of known segments, then computed ones, which are stored in the other
    segments. A segment may carry any blocks that end before it does: the count omits the frame's tokens in front, so a
    block more may be left to the next segment."""
    hashes = hash_array()
    known = 0
    for segment in segments:
        sealed = segment.sealed
        if sealed is None or sealed.seed != seed:
            break
        hashes.frombytes(sealed.hashes)
        known += 1
    start = len(hashes)
    hashes = hash_rest(hashes, tokens[start * block_size_tokens :], block_size_tokens, seed)
    end_tokens = sum([segment.token_count for segment in segments[:known]])
    for segment in segments[known:]:
        end_tokens += segment.token_count
        stop = end_tokens // block_size_tokens
        segment.sealed = Sealed(seed, hashes[start:stop].tobytes())
        start = stop
    return hashes


# --- places to cut at ---


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
    """Places where a text can be cut so that its pieces encode to the tokens of the whole: only in front of an added
    token at which the tokenizer itself always splits, one that is matched before normalization, takes no neighbouring
    whitespace, and cannot overlap with another added token. Every piece starts with that token, so rules for the start
    of a text (Metaspace `first`, ...) make no difference. Cutting goes from left to right and ignores the text behind
    a cut, so a text and its continuation share all pieces but the last. All samples are checked; a tokenizer that fails
    on one is not cut at all."""

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
