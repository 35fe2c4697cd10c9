"""Reads a chat's prompt from a cached prefix and the messages after it. A new chat has the empty prefix.

Returns None for chats that it cannot read; `fingerprint.py` then reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from router.hashing import TOKEN_BYTES, hash_array, hash_rest, token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import plain_messages
from router.prompt.incremental.prefix_cache import EMPTY_PREFIX, CachedPrefix, PrefixCache
from router.prompt.incremental.short_chats import (
    ChatSample,
    Render,
    boundaries,
    can_continue,
    context_of,
    continues,
    decoded_samples,
    encoded_samples,
    head_of,
    prompt_end,
    render_samples,
    samples_of,
    with_one_tool,
)
from router.prompt.incremental.skeleton import MAX_MESSAGES, Skeletons, varies
from router.prompt.prompt_stages import FoundPrefix, IncrementalPrompt, OpenedPrompt, PendingEntry
from router.prompt.segments import SegmentCache, all_cold
from router.prompt.template import ChatTemplate
from router.types import InferenceRequest, PromptPrefix

MIN_BYTES = 32 * 1024
"""Shorter chats that have more than roles and texts are rendered whole."""
MAX_BYTES = 2 * 1024 * 1024
MOST_MESSAGES = 2048
MAX_CONTEXT_BYTES = 512 * 1024
"""Chats with larger system prompts and tools are rendered whole: to look them up would hold the event loop."""
_ONLY_MESSAGES = {"messages"}


TextOf: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""The prompt's text, from the fields of a request; None where it has none."""


class IncrementalReader:
    """Reads the chats of one model. Threads: `render` and `finish` may run in any; the other methods run only in the
    event loop's."""

    def __init__(self, template: ChatTemplate, *, cache_bytes: int, seed: int) -> None:
        self._cache_bytes = cache_bytes
        self._seed = seed
        self._skeletons = Skeletons(template)
        self.enabled = self._skeletons.enabled
        """False if the template changes contents, and after `disable`."""
        self._continues = not varies(template.source) and can_continue(template.render)
        self.cache = PrefixCache(seed, cache_bytes)

    def disable(self) -> None:
        self.enabled = self._continues = False
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

    def render(self, opened: OpenedPrompt) -> IncrementalPrompt | None:
        """The prompt, all of whose text must be encoded unless it is looked up; None if the whole prompt must be read.
        Safe in any thread. `MalformedRequest` as from `SegmentCache.pieces`."""
        found = opened.found
        assert found is not None
        prefix, messages = found.prefix, found.messages
        first = prefix.messages
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
            known = CachedPrefix(last.messages, roles[:-1], skeleton.prefixes[last.messages])
            entry = PendingEntry(found.cache, last.digest, known, text)
        text = prefix.rest + "".join(parts)
        return _incremental(opened, prefix, text, entry)

    def find_chat(self, request: InferenceRequest, conversion: type[Conversion] | None) -> FoundPrefix | None:
        """A long chat of any kind and its cached prefix; None if the whole prompt must be read."""
        if not self._continues or not MIN_BYTES <= len(request.body) <= MAX_BYTES:
            return None
        if not request.endpoint.api.is_chat:
            return None
        key = request.endpoint.api.items
        messages = request.prompt.get(key)
        if not (isinstance(messages, list) and messages and isinstance(messages[0], msgspec.Raw)):
            return None
        if len(messages) > MOST_MESSAGES:
            return None
        name = request.endpoint.value if conversion is None else conversion.__name__
        drops_billing = conversion is not None and conversion.drops_billing
        context = context_of(request.prompt, key, (name, request.salt), drops_billing)
        if len(context) > MAX_CONTEXT_BYTES:
            return None
        found = boundaries(messages, context, self._seed)
        prefix = self.cache.find(found)
        return FoundPrefix(messages, found, prefix or EMPTY_PREFIX, prefix is not None, self.cache, key)

    def continue_chat(self, opened: OpenedPrompt, text_of: TextOf) -> IncrementalPrompt | None:
        """The prompt of a chat with a cached prefix; None if the whole prompt must be read. `text_of` renders the same
        request with other fields."""
        found = opened.found
        fields = with_one_tool(opened.request.prompt)
        if found is None or found.prefix is EMPTY_PREFIX or fields is None:
            return None
        prefix, messages = found.prefix, found.messages
        samples = decoded_samples(prefix.samples)
        ended = prompt_end(_renderer(text_of, fields, found.key), samples, messages[prefix.messages :])
        if ended is None or not continues(prefix, ended):
            return None
        text = prefix.rest[: len(prefix.rest) - ended.removed] + ended.added
        at = next(boundary for boundary in found.boundaries if boundary.messages == prefix.messages)
        entry = None
        if at is not found.boundaries[0]:
            samples = samples_of(messages, prefix.messages, samples) or ()
            entry = _entry(found, samples, (prefix.head, prefix.head_digest), text, at.digest)
        return _incremental(opened, prefix, text, entry)

    def entry_of(self, opened: OpenedPrompt, text_of: TextOf, text: str, rest: str) -> PendingEntry | None:
        """What to store of a chat that was rendered whole as `text`, which has `rest` behind its last cut."""
        found = opened.found
        if found is None or not found.key or not found.seen:
            return None
        fields, samples = with_one_tool(opened.request.prompt), samples_of(found.messages, 0, ())
        if fields is None or not samples:
            return None
        short = render_samples(_renderer(text_of, fields, found.key), samples)
        return None if short is None else _entry(found, samples, head_of(short, text), rest)

    def finish(self, pending: IncrementalPrompt, segments: SegmentCache) -> PromptPrefix:
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
            entry.store(tokens[:count], hashes, seed, block, entry.text[sum(map(len, cut)) :])
        return PromptPrefix(pending.generation, tokens, hashes)


def _incremental(
    opened: OpenedPrompt, prefix: CachedPrefix, text: str, entry: PendingEntry | None
) -> IncrementalPrompt:
    lookup = all_cold(text, opened.segments.pieces(text), opened.generation.salt)
    return IncrementalPrompt(opened.generation, opened.seed, prefix, lookup, entry, opened.conversion)


def _renderer(text_of: TextOf, fields: Mapping[str, Any], key: str) -> Render:
    return lambda messages: text_of({**fields, key: list(messages)})


def _entry(
    found: FoundPrefix, samples: Sequence[ChatSample], head: tuple[int, int], text: str, replaced: int = 0
) -> PendingEntry | None:
    """What to store of a whole chat whose `text` follows its cached prefix; None without samples."""
    if not samples:
        return None
    encoded = encoded_samples(samples)
    known = CachedPrefix(len(found.messages), samples=encoded, head=head[0], head_digest=head[1])
    return PendingEntry(found.cache, found.boundaries[0].digest, known, text, replaced)
