"""Which prefixes save the most, among the recorded decisions?

Requests have a prefix in common if they have the same affinity key: the hash of a block shortly beyond what all traffic
shares. Computed from the decisions in memory when it is asked for; nothing is recorded for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from os.path import commonprefix

import msgspec

from router.errors import shortened
from router.observe.ended import Ended, RecordedDecision

MAX_PREFIXES = 20
MAX_NAME_CHARACTERS = 128


class HotPrefix(msgspec.Struct, omit_defaults=True):
    """Requests of one model with a prefix in common. Times are Unix times of their arrival; `length_tokens` and
    `holders` are what pods held at the last of them: of the longest holder, and the number of pods with any of it."""

    key: str
    model: str
    requests: int = 0
    hits: int = 0
    """Requests that found at least one block in the cache of their pod."""
    saved_tokens: int = 0
    prompt_tokens: int = 0
    length_tokens: int = 0
    holders: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    text: str = ""
    """What the beginnings of their prompts have in common; only where receipts keep prompts."""


class PrefixTally:
    def __init__(self) -> None:
        self._found: dict[tuple[str, int], HotPrefix] = {}
        self._last: dict[tuple[str, str], RecordedDecision] = {}
        """The latest decision of each, by model and key."""

    def add(self, kept: RecordedDecision, ended: Ended | None) -> None:
        """Add a decision if its request was served, and its prompt is known. O(1)."""
        facts = kept.scene
        if ended is None or ended.served is None or ended.result != "ok" or not facts.key:
            return
        cached = ended.served.cached_tokens if ended.cached_tokens is None else ended.cached_tokens
        prefix = self._prefix(facts.adapter or facts.model, facts.key, kept.at_s)
        prefix.requests += 1
        prefix.hits += cached > 0
        prefix.saved_tokens += cached
        prefix.prompt_tokens += ended.prompt_tokens
        prefix.first_s = min(prefix.first_s, kept.at_s)
        prefix.text = _common(prefix.text, kept.excerpt)
        if kept.at_s >= prefix.last_s:
            prefix.last_s = kept.at_s
            self._last[prefix.model, prefix.key] = kept

    def hottest(self) -> list[HotPrefix]:
        """The prefixes that saved the most tokens, with what pods hold of them. O(prefixes + holders)."""
        found = hottest(self._found.values())
        for prefix in found:
            facts = self._last[prefix.model, prefix.key].scene
            held = [sum(blocks) for blocks in facts.match.values() if any(blocks)]
            prefix.length_tokens, prefix.holders = max(held, default=0) * facts.block_size_tokens, len(held)
        return found

    def _prefix(self, model: str, key: int, at_s: float) -> HotPrefix:
        known = self._found.get((model, key))
        if known is None:
            name = shortened(model, MAX_NAME_CHARACTERS)
            known = self._found[model, key] = HotPrefix(f"{key:016x}", name, first_s=at_s)
        return known


def hottest(prefixes: Iterable[HotPrefix]) -> list[HotPrefix]:
    """Those that saved the most, first; those that saved nothing are left out."""
    saving = (one for one in prefixes if one.saved_tokens)
    return sorted(saving, key=attrgetter("saved_tokens"), reverse=True)[:MAX_PREFIXES]


def _common(one: str, other: str) -> str:
    """What two texts begin with; an empty one is unknown."""
    return commonprefix((one, other)) if one and other else one or other
