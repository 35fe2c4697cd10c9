"""What does the router ask of an index, wherever it lives?

One protocol. `local.py` answers from what this router heard itself; `replica.py` adds the cluster's index, copied into
memory. A match is never an error: a store that cannot answer says `degraded`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.types import Generation, KvEvent, Pod, PodId, PrefixMatch, PromptPrefix


class PrefixStore(Protocol):
    """Who holds which blocks."""

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty as far as this router heard itself. Its events are hashed under
        `generation`."""

    def forget(self, pod: PodId) -> None:
        """The pod is gone, with everything it had."""

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Take over what `pod` announced to this router, in order."""

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All that `pod` had announced before was told, or is lost for good."""

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        """`prefix` was just dispatched to `pod`: it counts as held there for `ttl_s`."""

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        """Who holds how much of `prefix`. Never raises, and never waits longer than the store's deadline."""

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        """Leading blocks that `pod` itself has announced, predictions aside."""

    def announces(self, pod: PodId) -> bool:
        """Does anybody publish what this pod holds, other than to this router alone?"""

    def refused(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""
