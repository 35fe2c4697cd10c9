"""Renders chats without the template where the template only repeats the contents of messages.

For one sequence of roles, most templates print fixed text around the contents, which are stripped or unchanged. A
skeleton is that fixed text. It is found by rendering placeholders. It is not exact for every content: a template may
handle `</think>` inside a content differently. So all words in the template's source are tried as contents. A word that
changes the output is a guard word; chats that contain one are rendered by the template. What these trials miss, the
comparison in `frontends/prompt_readers.py` finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TypeAlias

import msgspec
import xxhash

from router.errors import MalformedRequest
from router.prompt.conversation import BILLING_HEADER, Unrenderable
from router.prompt.template import ChatTemplate

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
