"""Sinks of the events of engines and tiers: one that records what it gets, and one that is an index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.index.holder_blocks import HashResolver, HolderBlocks
from router.types import BlocksCleared, BlocksRemoved, Generation, KvEvent, Tier
from tests.kit.deadlines import DEADLINE_S


class RecordingSink:
    """Records its calls and lets a test wait for them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        """Each call, in words."""
        self.lives: list[list[int]] = [[]]
        """Blocks that were removed, by life of the holder: a test's numbers for its messages."""
        self.complete: bool | None = None
        self.events = 0
        self._news = asyncio.Event()

    def apply(self, pod: str, events: tuple[KvEvent, ...]) -> None:
        self.lives[-1] += [event.block_hashes[0] for event in events if isinstance(event, BlocksRemoved)]
        for event in events:
            self._say(f"{type(event).__name__} {len(getattr(event, 'block_hashes', ()))}")

    def applied(self, pod: str, events: int) -> None:
        self.events += events

    def restarted(self, pod: str) -> None:
        self.lives.append([])
        self._say("restarted")

    def stream_state(self, pod: str, *, complete: bool) -> None:
        self.complete = complete
        self._say(f"complete={complete}")

    def gone(self, holder: str) -> None:
        self._say("gone")

    def _say(self, what: str) -> None:
        self.said.append(what)
        self._news.set()

    async def until(self, true: Callable[[RecordingSink], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not true(self):
                self._news.clear()
                await self._news.wait()


class IndexSink:
    """Applies events as an index does and records the other calls. `resolve_hash`: the blocks of a chunk that a pod
    has announced."""

    def __init__(self, generation: Generation, resolve_hash: HashResolver | None = None) -> None:
        self._generation, self._resolve_hash = generation, resolve_hash
        self.holders: dict[str, HolderBlocks] = {}
        self.complete: dict[str, bool] = {}
        self.lives: list[str] = []

    def apply(self, pod: str, events: tuple[KvEvent, ...]) -> None:
        for event in events:
            assert not isinstance(event, BlocksCleared)
            self.holders[pod].apply(event)

    def restarted(self, pod: str) -> None:
        self.lives.append(pod)
        self.holders[pod] = HolderBlocks(self._generation, resolve_hash=self._resolve_hash)

    def stream_state(self, pod: str, *, complete: bool) -> None:
        self.complete[pod] = complete

    def gone(self, holder: str) -> None:
        del self.holders[holder], self.complete[holder]

    def held(self, holder: str, tier: Tier) -> set[int]:
        """Blocks of a holder; empty if it is unknown."""
        return set(self.holders[holder].held().get(tier, ())) if holder in self.holders else set()
