"""What does the router ask of an index, wherever it lives?

One protocol; `local.py` answers from memory. A match is never an error: a store that cannot answer says `degraded`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.types import Generation, KvEvent, PodId, PrefixMatch, PromptPrefix


class PrefixStore(Protocol):
    """Who holds which blocks."""

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty. Its events are hashed under `generation`."""

    def forget(self, pod: PodId) -> None:
        """Drop everything of `pod`."""

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Take over what `pod` announced, in order."""

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        """`prefix` was just dispatched to `pod`: it counts as held there for `ttl_s`."""

    def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        """Who holds how much of `prefix`."""

    def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        """Leading blocks that `pod` itself has announced, predictions aside."""

    def refused(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""
