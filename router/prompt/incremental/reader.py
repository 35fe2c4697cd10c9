"""Reads a chat's prompt from a cached prefix and the messages after it. A new chat has the empty prefix.

`fingerprint.py` reads the whole prompt of chats that it cannot read. Chats are rendered without the template where the
template only repeats the contents of messages: for one sequence of roles, most templates print fixed text around the
contents, which are stripped or unchanged. A skeleton is that fixed text. It is found by rendering placeholders. It is
not exact for every content: a template may handle `</think>` inside a content differently. So all words in the
template's source are tried as contents. A word that changes the output is a guard word; chats that contain one are
rendered by the template. What these trials miss, the comparison in `frontends/prompt_readers.py` finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, TypeAlias

import msgspec
import xxhash

from router.errors import MalformedRequest
from router.hashing import salt_seed
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import BILLING_HEADER, Unrenderable, plain_messages
from router.prompt.incremental import short_chats
from router.prompt.incremental.short_chats import ChatSample, Render
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

MAX_MESSAGES = 256
"""Longer chats have no skeleton, because it would take too much memory."""
SKELETONS = 1024

Strip: TypeAlias = str | None
"""Characters stripped from one side of a content, as in `str.lstrip`: None is all whitespace, "" is nothing."""

_PLACEHOLDER = "\uf8ff{}\uf8fe"
_PLACEHOLDERS = re.compile(_PLACEHOLDER.format(r"(\d+)"))
_EDGES = ("\n \n", " \n ")
"""Whitespace put around placeholders. With two variants, the result shows which strip was applied."""
_STRIPS: tuple[Strip, ...] = ("", None, "\n")
_QUOTED = re.compile(r"""'([^'\n]{1,64})'|"([^"\n]{1,64})\"""")
_TESTED = re.compile(
    r"""(?:starts|ends)with\(\s*(?:'([^'\n]+)'|"([^"\n]+)")"""
    r"""|(?:'([^'\n]*[^\w'\n][^'\n]*)'|"([^"\n]*[^\w"\n][^"\n]*)")\s+(?:not\s+)?in\b"""
)
"""Words that templates compare with contents. A word of letters before `in` is a field name, and is not matched."""
_VARIES = re.compile(r"strftime_now|now\(|\brandom\b")


def varies(source: str) -> bool:
    """Whether a template can render the same chat differently."""
    return _VARIES.search(source) is not None


_TRIED_ROLES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)
_TRIED_MESSAGES = max(map(len, _TRIED_ROLES))
_TRIED_CONTENTS = (
    *("x", "1", " x\n", "\n\nx\ty  ", "[1, 2]", '{"a": "b"}', "<b>&amp;</b>", "İx ß \u2028 y"),
    *("two words", "three\nlines\nhere", "long " * 5_000),
)


class TemplateSkeleton(msgspec.Struct, frozen=True, gc=False):
    """The text of a chat: `literals[0]`, content, `literals[1]`, content, ..., `literals[-1]`."""

    literals: tuple[str, ...]
    strips: tuple[tuple[Strip, Strip], ...]
    """Left and right, by content."""
    prefixes: tuple[int, ...]
    """`prefixes[n]` is a digest of everything before content n. Skeletons with equal digests print equal text before
    content n."""

    def fill(self, contents: Sequence[str], first: int = 0) -> list[str]:
        """The text from content number `first` on, as contents and literals in turn. `contents[0]` is that content.
        With `first` 0, the literal before it is included."""
        parts = [] if first else [self.literals[0]]
        for content, (left, right), literal in zip(
            contents, self.strips[first:], self.literals[first + 1 :], strict=True
        ):
            parts += (content.lstrip(left).rstrip(right), literal)
        return parts


class Skeletons:
    """The skeletons of one template, by sequence of roles. `enabled` is False where the template has none."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._guard_words: tuple[str, ...] = ()
        self.find = lru_cache(SKELETONS)(self._trace)
        self.enabled = not varies(template.source) and self._try_out()

    def can_fill(self, contents: Iterable[str]) -> bool:
        """False where a content is empty or contains a guard word."""
        words = self._guard_words
        for content in contents:
            if not content or content.isspace():
                return False
            for word in words:
                if word in content:
                    return False
        return True

    def _trace(self, roles: tuple[str, ...]) -> TemplateSkeleton | None:
        if len(roles) > MAX_MESSAGES:
            return None
        texts = []
        for edge in _EDGES:
            text = self._render(roles, [edge + _PLACEHOLDER.format(i) + edge for i in range(len(roles))])
            pieces = _PLACEHOLDERS.split(text or "")
            if pieces[1::2] != [str(i) for i in range(len(roles))]:
                return None
            texts.append(pieces[::2])
        return _skeleton(list(zip(*texts, strict=True)))

    def _render(self, roles: Sequence[str], contents: Sequence[str]) -> str | None:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._template.render({"messages": messages})
        except (MalformedRequest, Unrenderable):
            return None

    def _try_out(self) -> bool:
        """Find the guard words. False if the skeletons are wrong for ordinary contents."""
        skeletons = {roles: found for roles in _TRIED_ROLES if (found := self._trace(roles))}
        neutral = [_TRIED_CONTENTS[start:] + _TRIED_CONTENTS[:start] for start in range(len(_TRIED_CONTENTS))]
        if not skeletons or not all(self._agrees(skeletons, contents) for contents in neutral):
            return False
        source = self._template.source + json.dumps(self._template.default_kwargs, default=str)
        words = {word for quoted in _QUOTED.findall(source) for word in quoted if word and not word.isspace()}
        guarded = {word for tested in _TESTED.findall(source) for word in tested if word and not word.isspace()}
        for word in words.union(("system", "user", "assistant", BILLING_HEADER)) - guarded:
            forms = [(form,) * _TRIED_MESSAGES for form in (word, f"{word}x", f"x{word}", f"x{word}y")]
            if not all(self._agrees(skeletons, contents) for contents in forms):
                guarded.add(word)
        self._guard_words = tuple(sorted(guarded))
        return True

    def _agrees(self, skeletons: Mapping[tuple[str, ...], TemplateSkeleton], contents: Sequence[str]) -> bool:
        return all(
            "".join(skeleton.fill(contents[: len(roles)])) == self._render(roles, contents[: len(roles)])
            for roles, skeleton in skeletons.items()
        )


def _skeleton(between: Sequence[Sequence[str]]) -> TemplateSkeleton | None:
    """From the texts between placeholders, in one variant for each of `_EDGES`. None for a strip not in `_STRIPS`."""
    last = len(between) - 1
    found = [_without_edges(texts, place > 0, place < last) for place, texts in enumerate(between)]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    stored: dict[str, str] = {}  # equal literals of a long chat are stored once
    literals = [stored.setdefault(literal, literal) for literal, _, _ in known]
    strips = [(left, right) for (_, _, left), (_, right, _) in pairwise(known)]
    return TemplateSkeleton(tuple(literals), tuple(strips), _prefixes(literals, strips))


def _without_edges(texts: Sequence[str], has_right: bool, has_left: bool) -> tuple[str, Strip, Strip] | None:
    """(the literal, right strip of the content before it, left strip of the content after it)."""
    for right, left in product(_STRIPS if has_right else (None,), _STRIPS if has_left else (None,)):
        literals = set()
        for text, edge in zip(texts, _EDGES, strict=True):
            before, after = edge.rstrip(right), edge.lstrip(left)
            fits = len(text) >= len(before + after) and text.startswith(before) and text.endswith(after)
            literals.add(text[len(before) : len(text) - len(after)] if fits else None)
        if len(literals) == 1 and (literal := literals.pop()) is not None:
            return literal, right, left
    return None


def _prefixes(literals: Sequence[str], strips: Sequence[tuple[Strip, Strip]]) -> tuple[int, ...]:
    parts = [literals[0], *zip(strips, literals[1:], strict=True)]
    digest = 0
    return tuple([digest := xxhash.xxh3_64_intdigest(msgspec.json.encode(part), digest) for part in parts])


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
