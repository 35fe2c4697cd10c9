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
from router.prompt.incremental.short_chats import ChatSample, Render
from router.prompt.incremental.skeleton import MAX_MESSAGES, Skeletons, varies
from router.prompt.pending import (
    EMPTY_PREFIX,
    MAX_NEW_PLAIN,
    CachedPrefix,
    FoundPrefix,
    PendingPrompt,
    PrefixCache,
    boundaries,
)
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
    """Reads the chats of one model. Threads: `render`, `continue_chat` and `enter` may run in any; the other methods
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
        found = boundaries(messages[:-1], b"plain", self._seed ^ salt_seed(salt), MAX_NEW_PLAIN)
        prefix = self.cache.find(found)
        return FoundPrefix(messages, found, prefix or EMPTY_PREFIX, prefix is not None, self.cache)

    def render(self, pending: PendingPrompt) -> bool:
        """Whether the prompt is rendered, all of whose text must be encoded unless it is looked up; else the whole
        prompt must be read. Safe in any thread. `MalformedRequest` as from `SegmentCache.pieces`."""
        found = pending.found
        assert found is not None
        prefix, messages = found.prefix, found.messages
        first = prefix.messages
        new = plain_messages(messages[first:] if first else messages)
        if not new:
            return False
        roles = prefix.roles + tuple([message.role for message in new])
        skeleton = self._skeletons.find(roles)
        if skeleton is None:
            return False
        if first and skeleton.prefixes[first] != prefix.skeleton:  # new messages change the old text
            prefix, first, new = EMPTY_PREFIX, 0, plain_messages(messages)
            if new is None:
                return False
        contents = [message.content for message in new]
        if not self._skeletons.can_fill(contents):
            return False
        parts = skeleton.fill(contents, first)
        text = prefix.rest + "".join(parts)
        pending.prompt, pending.prefix = all_cold(text, pending.segments.pieces(text)), prefix
        if found.seen and len(new) > 1:
            last, known = found.boundaries[0], pending.segments.cuts.pieces(prefix.rest + "".join(parts[:-2]))
            pending.entry = CachedPrefix(
                last.messages, roles[:-1], skeleton.prefixes[last.messages], rest="".join(known[-1:])
            )
            pending.entry_pieces = len(known) - 1
        return True

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
        found = boundaries(stripped, context, self._seed)
        prefix = self.cache.find(found)
        return FoundPrefix(messages, found, prefix or EMPTY_PREFIX, prefix is not None, self.cache, key)

    def continue_chat(self, pending: PendingPrompt, text_of: TextOf) -> bool:
        """Whether the prompt of a chat with a cached prefix is rendered; else the whole prompt must be read. `text_of`
        renders the same request with other fields."""
        found = pending.found
        fields = short_chats.with_one_tool(pending.request.prompt)
        if found is None or found.prefix is EMPTY_PREFIX or fields is None:
            return False
        prefix, messages = found.prefix, found.messages
        samples = short_chats.SAMPLES.decode(prefix.samples)
        ended = short_chats.prompt_end(_renderer(text_of, fields, found.key), samples, messages[prefix.messages :])
        if ended is None or not short_chats.continues(prefix, ended):
            return False
        text = prefix.rest[: len(prefix.rest) - ended.removed] + ended.added
        pieces = pending.segments.pieces(text)
        pending.prompt, pending.prefix = all_cold(text, pieces), prefix
        at = next(boundary for boundary in found.boundaries if boundary.messages == prefix.messages)
        if at is not found.boundaries[0]:
            samples = short_chats.samples_of(messages, prefix.messages, samples) or ()
            pending.replaced = at.digest
            _enter(pending, samples, (prefix.head, prefix.head_digest), pieces)
        return True

    def enter(self, pending: PendingPrompt, text_of: TextOf, text: str, pieces: Sequence[str]) -> None:
        """Set what to store of a chat that was rendered whole as `text`."""
        found = pending.found
        if found is None or not found.key or not found.seen:
            return
        fields = short_chats.with_one_tool(pending.request.prompt)
        samples = short_chats.samples_of(found.messages, 0, ())
        if fields is None or not samples:
            return
        short = short_chats.render_samples(_renderer(text_of, fields, found.key), samples)
        if short is not None:
            _enter(pending, samples, short_chats.head_of(short, text), pieces)


def _renderer(text_of: TextOf, fields: Mapping[str, Any], key: str) -> Render:
    return lambda messages: text_of({**fields, key: list(messages)})


def _enter(pending: PendingPrompt, samples: Sequence[ChatSample], head: tuple[int, int], pieces: Sequence[str]) -> None:
    """Set what to store of a whole chat, of which `pieces` follow its cached prefix; nothing without samples."""
    if samples and pending.found is not None:
        encoded, rest = msgspec.msgpack.encode(samples), "".join(pieces[-1:])
        pending.entry = CachedPrefix(
            len(pending.found.messages), samples=encoded, head=head[0], head_digest=head[1], rest=rest
        )
        pending.entry_pieces = len(pieces) - 1
