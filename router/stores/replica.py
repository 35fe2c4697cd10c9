"""How does a router answer from its own copy of the cluster's index?

Lookups are in memory and never wait for Redis. `feeds/kv_redis.py` keeps the copy up to date and says how well that
goes: while it cannot, the last known copy is served, marked as degraded and with its age, and is given up when it is
too old to mean anything. What this router heard and sent itself counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from router.index.cluster import ClusterIndex
from router.stores.local import LocalStore
from router.types import Generation, KvEvent, Pod, PodId, PrefixMatch, PromptPrefix

FRESH_S = 3.0
"""A copy that was in contact this lately is up to date: the log is asked again after a second at the latest."""


class ReplicaStore:
    """A `PrefixStore` over a local one. `max_age_s` bounds how old a copy may be that is still served."""

    def __init__(self, index: ClusterIndex, local: LocalStore, *, max_age_s: float) -> None:
        self.index = index
        self._local = local
        self._max_age_s = max_age_s
        self._contact_s: float | None = None
        self._lost = False

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""
        return self.index.block_holders + self._local.block_holders

    def contact(self, now_s: float) -> None:
        """The copy is as new as it can be."""
        self._contact_s = now_s
        self._lost = False

    def lost(self) -> None:
        """News comes no longer: from now on, the copy is an old one."""
        self._lost = True

    def age_s(self, now_s: float) -> float:
        """How long ago the copy was up to date; infinite before it was for the first time."""
        return float("inf") if self._contact_s is None else max(now_s - self._contact_s, 0.0)

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._local.add_holder(pod, generation)
        self.index.holders.bind(pod, generation)

    def forget(self, pod: PodId) -> None:
        self._local.forget(pod)
        self.index.holders.unbind(pod)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        self._local.apply(pod, events)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        self._local.caught_up(pod, complete=complete)

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        self._local.record(pod, prefix, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        age_s = self.age_s(now_s)
        known = self.index.match(prefix) if age_s <= self._max_age_s else {}
        return PrefixMatch(self._local.blocks(prefix, now_s, known), age_s, degraded=self._lost or age_s > FRESH_S)

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        announced = sum(self.index.match(prefix).get(pod, (0,)))
        return max(announced, self._local.announced_blocks(pod, prefix))

    def announces(self, pod: PodId) -> bool:
        """While news comes in at all: of a copy that grows old, nobody confirms anything."""
        fresh = not self._lost and self.age_s(time.monotonic()) <= FRESH_S
        return fresh and self.index.holders.publisher_of(pod) is not None

    def refused(self, pod: PodId) -> str:
        return self._local.refused(pod)
