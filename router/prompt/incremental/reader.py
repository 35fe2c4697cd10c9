"""Reads a chat's prompt from a cached prefix and the messages after it. A new chat has the empty prefix.

Returns None for chats that it cannot read; `fingerprint.py` then reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from router.hashing import salt_seed
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import plain_messages
from router.prompt.incremental import short_chats
from router.prompt.incremental.prefix_cache import EMPTY_PREFIX, CachedPrefix, PrefixCache
from router.prompt.incremental.short_chats import ChatSample, Render
from router.prompt.incremental.skeleton import MAX_MESSAGES, Skeletons, varies
from router.prompt.prompt_stages import FoundPrefix, OpenedPrompt, PendingEntry, PendingPrompt
from router.prompt.segments import all_cold
from router.prompt.template import ChatTemplate
from router.types import InferenceRequest

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
    """Reads the chats of one model. Threads: `render`, `continue_chat` and `entry_of` may run in any; the other methods
    run only in the event loop's."""

    def __init__(self, template: ChatTemplate, *, cache_bytes: int, seed: int) -> None:
        self._cache_bytes = cache_bytes
        self._seed = seed
        self._skeletons = Skeletons(template)
        self.enabled = self._skeletons.enabled
        """False if the template changes contents, and after `disable`."""
        self._continues = not varies(template.source) and short_chats.can_continue(template.render)
        self.cache = PrefixCache(cache_bytes)

    def disable(self) -> None:
        self.enabled = self._continues = False
        self.clear()

    def clear(self) -> None:
        """Forget all prefixes: the tokenizer has changed."""
        self.cache = PrefixCache(self._cache_bytes)

    def find(self, body: Mapping[str, Any], salt: str) -> FoundPrefix | None:
        """The chat and its cached prefix of this salt; None if the whole prompt must be read. Chats with another salt
        have other prefixes: that one is known shows in the time of its request."""
        if not self.enabled or body.keys() != _ONLY_MESSAGES:
            return None
        messages = body["messages"]
        if not (isinstance(messages, list) and messages and isinstance(messages[0], msgspec.Raw)):
            return None
        if len(messages) > MAX_MESSAGES:
            return None
        found = short_chats.boundaries(messages[:-1], b"plain", self._seed ^ salt_seed(salt), short_chats.MAX_NEW_PLAIN)
        prefix = self.cache.find(found)
        return FoundPrefix(messages, found, prefix or EMPTY_PREFIX, prefix is not None, self.cache)

    def render(self, opened: OpenedPrompt) -> PendingPrompt | None:
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
            last, pieces = found.boundaries[0], opened.segments.cuts.pieces(prefix.rest + "".join(parts[:-2]))
            known = CachedPrefix(last.messages, roles[:-1], skeleton.prefixes[last.messages], rest="".join(pieces[-1:]))
            entry = PendingEntry(found.cache, last.digest, known, len(pieces) - 1)
        text = prefix.rest + "".join(parts)
        return _incremental(opened, prefix, text, opened.segments.pieces(text), entry)

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
        context = short_chats.context_of(request.prompt, key, (name, request.salt), drops_billing)
        if len(context) > MAX_CONTEXT_BYTES:
            return None
        stripped = [short_chats.without_cache_control(bytes(message)) for message in messages]
        found = short_chats.boundaries(stripped, context, self._seed)
        prefix = self.cache.find(found)
        return FoundPrefix(messages, found, prefix or EMPTY_PREFIX, prefix is not None, self.cache, key)

    def continue_chat(self, opened: OpenedPrompt, text_of: TextOf) -> PendingPrompt | None:
        """The prompt of a chat with a cached prefix; None if the whole prompt must be read. `text_of` renders the same
        request with other fields."""
        found = opened.found
        fields = short_chats.with_one_tool(opened.request.prompt)
        if found is None or found.prefix is EMPTY_PREFIX or fields is None:
            return None
        prefix, messages = found.prefix, found.messages
        samples = short_chats.SAMPLES.decode(prefix.samples)
        ended = short_chats.prompt_end(_renderer(text_of, fields, found.key), samples, messages[prefix.messages :])
        if ended is None or not short_chats.continues(prefix, ended):
            return None
        text = prefix.rest[: len(prefix.rest) - ended.removed] + ended.added
        pieces = opened.segments.pieces(text)
        at = next(boundary for boundary in found.boundaries if boundary.messages == prefix.messages)
        entry = None
        if at is not found.boundaries[0]:
            samples = short_chats.samples_of(messages, prefix.messages, samples) or ()
            entry = _entry(found, samples, (prefix.head, prefix.head_digest), pieces, at.digest)
        return _incremental(opened, prefix, text, pieces, entry)

    def entry_of(self, opened: OpenedPrompt, text_of: TextOf, text: str, pieces: Sequence[str]) -> PendingEntry | None:
        """What to store of a chat that was rendered whole as `text`."""
        found = opened.found
        if found is None or not found.key or not found.seen:
            return None
        fields, samples = (
            short_chats.with_one_tool(opened.request.prompt),
            short_chats.samples_of(found.messages, 0, ()),
        )
        if fields is None or not samples:
            return None
        short = short_chats.render_samples(_renderer(text_of, fields, found.key), samples)
        return None if short is None else _entry(found, samples, short_chats.head_of(short, text), pieces)


def _incremental(
    opened: OpenedPrompt, prefix: CachedPrefix, text: str, pieces: list[str], entry: PendingEntry | None
) -> PendingPrompt:
    lookup = all_cold(text, pieces)
    return PendingPrompt(opened.generation, opened.seed, lookup, prefix, entry=entry, conversion=opened.conversion)


def _renderer(text_of: TextOf, fields: Mapping[str, Any], key: str) -> Render:
    return lambda messages: text_of({**fields, key: list(messages)})


def _entry(
    found: FoundPrefix, samples: Sequence[ChatSample], head: tuple[int, int], pieces: Sequence[str], replaced: int = 0
) -> PendingEntry | None:
    """What to store of a whole chat, of which `pieces` follow its cached prefix; None without samples."""
    if not samples:
        return None
    encoded, rest = msgspec.msgpack.encode(samples), "".join(pieces[-1:])
    known = CachedPrefix(len(found.messages), samples=encoded, head=head[0], head_digest=head[1], rest=rest)
    return PendingEntry(found.cache, found.boundaries[0].digest, known, len(pieces) - 1, replaced)
