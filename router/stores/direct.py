"""How does a router answer by asking Redis, prompt by prompt?

One round trip for a whole prompt: a script walks every holder's blocks and stops at the first that is missing. For
routers that should not keep a copy of a large index. A question that is not answered within the deadline is answered
from what this router knows itself, marked as degraded; then Redis is left alone for a while, so that the next request
does not wait as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from router.cancellation import mind_cancellation
from router.index.holders import HolderId, HolderName, Holders, KnownHolder
from router.stores.connection import Connection
from router.stores.local import LocalStore
from router.stores.schema import HolderRow, Keys, pack_blocks, scope_of
from router.stores.scripts import WALK
from router.types import (
    BlockHash,
    BlocksByTier,
    Generation,
    KvEvent,
    Pod,
    PodId,
    PrefixMatch,
    PromptPrefix,
    Tier,
)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Question:
    """What to ask of a generation's holders, as the registry had them last: all but the prompt."""

    holders: Sequence[HolderName]
    keys: Sequence[str]
    args: Sequence[str]


class DirectStore:
    """A `PrefixStore` over a local one. `feeds/registry.py` keeps the list of holders fresh."""

    def __init__(self, connection: Connection, keys: Keys, local: LocalStore, *, deadline_s: float) -> None:
        self.holders = Holders()
        self._connection = connection
        self._keys = keys
        self._local = local
        self._deadline_s = deadline_s
        self._questions: dict[Generation, _Question] = {}
        self._pause_s = 0.0
        self._ask_again_s = 0.0
        self._lost = False

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory: this router's own."""
        return self._local.block_holders

    def lost(self) -> None:
        """The registry does not answer: who should be asked about is not known any longer."""
        self._lost = True

    def found(self) -> None:
        """It answers."""
        self._lost = False

    def list_holders(self, generation: Generation, rows: Mapping[HolderId, HolderRow], now_s: float) -> None:
        """All holders of one generation, as the registry has them now."""
        for known in self.holders:
            if known.generation == generation and known.id not in rows:
                self.holders.drop(known.name)
        scope = scope_of(generation)
        names: list[HolderName] = []
        keys: list[str] = []
        args: list[str] = []
        for holder, row in rows.items():
            known = KnownHolder(
                id=holder,
                generation=generation,
                facts=row.facts,
                epoch=row.epoch,
                seq=row.seq,
                heard_s=now_s,
                complete=row.complete,
            )
            self.holders.put(known)
            tiers = [tier for tier, blocks in zip(Tier, row.blocks, strict=True) if blocks]
            if tiers:
                names.append(known.name)
                keys.append(self._keys.holder(scope, holder))
                keys += [self._keys.blocks(scope, holder, row.epoch, tier) for tier in tiers]
                args += [str(row.epoch), "".join(str(int(tier)) for tier in tiers)]
        self._questions[generation] = _Question(names, keys, args)

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._local.add_holder(pod, generation)
        self.holders.bind(pod, generation)

    def forget(self, pod: PodId) -> None:
        self._local.forget(pod)
        self.holders.unbind(pod)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        self._local.apply(pod, events)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        self._local.caught_up(pod, complete=complete)

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        self._local.record(pod, prefix, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        known = await self._ask(prefix, now_s)
        blocks = self._local.blocks(prefix, now_s, known)
        return PrefixMatch(blocks, degraded=self._lost or known is None)

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        known = await self._ask(prefix, self._ask_again_s) or {}
        return max(sum(known.get(pod, (0,))), self._local.announced_blocks(pod, prefix))

    def announces(self, pod: PodId) -> bool:
        """While Redis answers."""
        return self.holders.publisher_of(pod) is not None and not self._pause_s and not self._lost

    def refused(self, pod: PodId) -> str:
        return self._local.refused(pod)

    async def _ask(self, prefix: PromptPrefix, now_s: float) -> dict[PodId, BlocksByTier] | None:
        """What Redis says; None if it does not, or is not asked because it did not lately."""
        if now_s < self._ask_again_s:
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                walks = [await self.runs(generation, hashes) for generation, hashes in self.holders.hashes(prefix)]
        except (RedisError, OSError, TimeoutError):
            mind_cancellation()
            self._pause_s = min(max(self._pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._ask_again_s = now_s + self._pause_s
            return None
        self._pause_s = self._ask_again_s = 0.0
        return self.holders.by_pod(dict(walk) for walk in walks)

    async def runs(self, generation: Generation, hashes: Sequence[BlockHash]) -> list[tuple[HolderName, BlocksByTier]]:
        """The leading run of every listed holder that has the first block. Raises `redis.RedisError`."""
        ask = self._questions.get(generation)
        if ask is None or not ask.holders or not hashes:
            return []
        counts = await self._connection.read_script(WALK, ask.keys, (pack_blocks(hashes), *ask.args))
        return [(name, run) for name, run in zip(ask.holders, _fours(counts), strict=True) if any(run)]


def _fours(counts: Sequence[int]) -> Iterator[BlocksByTier]:
    for at in range(0, len(counts), 4):
        gpu, cpu, disk, remote = counts[at : at + 4]
        yield gpu, cpu, disk, remote
