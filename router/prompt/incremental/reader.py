"""Reads a chat's prompt from a cached prefix and the messages after it. A new chat has the empty prefix.

Returns None for chats that it cannot read; `fingerprint.py` then reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.hashing import TOKEN_BYTES, hash_array, hash_rest, token_array
from router.prompt.conversation import plain_messages
from router.prompt.incremental.prefix_cache import EMPTY_PREFIX, Boundary, CachedPrefix, PrefixCache
from router.prompt.incremental.skeleton import MAX_MESSAGES, Skeletons
from router.prompt.segments import Lookup, SegmentCache, all_cold
from router.prompt.template import ChatTemplate
from router.types import BlockHash, Generation, PromptPrefix

_ONLY_MESSAGES = {"messages"}


class PendingEntry(msgspec.Struct, frozen=True, gc=False):
    """The prefix to store when its tokens are known: the chat without its last message."""

    cache: PrefixCache
    digest: int
    roles: tuple[str, ...]
    skeleton: int
    text: str
    """The text behind the cached prefix, without the last message's content."""


class FoundPrefix(msgspec.Struct, frozen=True, gc=False):
    """A chat and its longest cached prefix. `seen`: a boundary of the chat was seen before."""

    messages: list[msgspec.Raw]
    boundaries: list[Boundary]
    prefix: CachedPrefix
    seen: bool
    cache: PrefixCache
    """The cache that the prefix is from. `clear` replaces it; later stores into it are lost."""

    @property
    def new_bytes(self) -> int:
        """Size of the messages behind the prefix."""
        return sum(map(len, self.messages[len(self.prefix.roles) :]))


class IncrementalPrompt(msgspec.Struct, gc=False):
    """A prompt between `render` and `finish`: a cached prefix, and the text behind it."""

    generation: Generation
    seed: BlockHash
    prefix: CachedPrefix
    lookup: Lookup
    entry: PendingEntry | None

    @property
    def text(self) -> str:
        """The text behind the prefix."""
        return self.lookup.text

    @property
    def cold_characters(self) -> int:
        """How much text must still be encoded."""
        return self.lookup.cold_characters


class IncrementalReader:
    """Reads the chats of one model. Threads: `render` and `finish` may run in any; the other methods run only in the
    event loop's."""

    def __init__(self, template: ChatTemplate, *, cache_bytes: int, seed: int) -> None:
        self._cache_bytes = cache_bytes
        self._seed = seed
        self._skeletons = Skeletons(template)
        self.enabled = self._skeletons.enabled
        """False if the template changes contents, and after `disable`."""
        self.cache = PrefixCache(seed, cache_bytes)

    def disable(self) -> None:
        """Return None from now on."""
        self.enabled = False
        self.clear()

    def clear(self) -> None:
        """Forget all prefixes: the tokenizer has changed."""
        self.cache = PrefixCache(self._seed, self._cache_bytes)

    def find(self, body: Mapping[str, Any], salt: str) -> FoundPrefix | None:
        """The chat and its cached prefix of this salt; None if the whole prompt must be read."""
        if not self.enabled or body.keys() != _ONLY_MESSAGES:
            return None
        messages = body["messages"]
        if not (isinstance(messages, list) and messages and isinstance(messages[0], msgspec.Raw)):
            return None
        if len(messages) > MAX_MESSAGES:
            return None
        boundaries = self.cache.boundaries(messages, salt)
        prefix = self.cache.find(boundaries)
        return FoundPrefix(
            messages, boundaries, EMPTY_PREFIX if prefix is None else prefix, prefix is not None, self.cache
        )

    def render(
        self, found: FoundPrefix, generation: Generation, seed: BlockHash, segments: SegmentCache
    ) -> IncrementalPrompt | None:
        """The prompt, all of whose text must be encoded unless it is looked up; None if the whole prompt must be read.
        Safe in any thread. `MalformedRequest` as from `SegmentCache.pieces`."""
        prefix, messages = found.prefix, found.messages
        first = len(prefix.roles)
        new = plain_messages(messages[first:] if first else messages)
        if not new:
            return None
        roles = prefix.roles + tuple([message.role for message in new])
        skeleton = self._skeletons.find(roles)
        if skeleton is None:
            return None
        if first and skeleton.prefixes[first] != prefix.skeleton:  # new messages change the old text
            prefix, first, new = EMPTY_PREFIX, 0, plain_messages(messages)
            if new is None:
                return None
        contents = [message.content for message in new]
        if not self._skeletons.can_fill(contents):
            return None
        parts = skeleton.fill(contents, first)
        entry = None
        if found.seen and len(new) > 1:
            last = found.boundaries[0]
            text = prefix.rest + "".join(parts[:-2])
            entry = PendingEntry(found.cache, last.digest, roles[:-1], skeleton.prefixes[last.messages], text)
        text = prefix.rest + "".join(parts)
        return IncrementalPrompt(
            generation, seed, prefix, all_cold(text, segments.pieces(text), generation.salt), entry
        )

    def look_up(self, rendered: IncrementalPrompt, segments: SegmentCache) -> None:
        """Look up the segments of a whole prompt. What follows a cached prefix is new."""
        if rendered.prefix is EMPTY_PREFIX:
            rendered.lookup = segments.look_up(
                rendered.text, pieces=rendered.lookup.cold, salt=rendered.generation.salt
            )

    def finish(self, pending: IncrementalPrompt, segments: SegmentCache) -> PromptPrefix:
        """Encode the new text and hash the new blocks."""
        prefix, seed, block = pending.prefix, pending.seed, pending.generation.block_size_tokens
        encoded = segments.complete(pending.lookup)
        if prefix is EMPTY_PREFIX:
            segments.keep(pending.lookup, encoded)
        tokens = token_array()
        tokens.frombytes(prefix.tokens)
        for segment in encoded:
            tokens.frombytes(segment.tokens)
        known = hash_array(prefix.hashes if prefix.seed == seed else b"")
        hashes = hash_rest(known, tokens[len(known) * block :], block, seed)
        if pending.entry is not None:
            entry = pending.entry
            cut = segments.cuts.pieces(entry.text)[:-1]
            count = len(prefix.tokens) // TOKEN_BYTES + sum([segment.token_count for segment in encoded[: len(cut)]])
            stored = CachedPrefix(
                roles=entry.roles,
                skeleton=entry.skeleton,
                tokens=tokens[:count].tobytes(),
                seed=seed,
                hashes=hashes[: count // block].tobytes(),
                rest=entry.text[sum(map(len, cut)) :],
            )
            entry.cache.store(entry.digest, stored)
        return PromptPrefix(pending.generation, tokens, hashes)
