"""Values the caches of the pods, for the deletion costs of Kubernetes.

Looks up a sample of the recent prompts in the index, a few in each turn of the event loop. What a cache is worth is
decided in `policy/cache_value.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.index.recent_prompts import RecentPrompt, RecentPrompts
from router.policy.cache_value import CacheOwner, CacheValues, deletion_cost, in_flight_ms
from router.stores.prefix_store import LocalStore
from router.types import Generation, Pod, PodId, PodState, PodStatus, PromptPrefix

SAMPLE_PROMPTS = 1024
SAMPLE_BLOCKS = 1 << 18
TURN_STEPS = 1 << 11
"""Blocks and holders of the prompts in one turn, unless one prompt has more; a holder counts as `HOLDER_BLOCKS`.
Measured with a million blocks, on a busy machine: turns of at most 5 ms, 0.1 s in all with 8 pods, 0.4 s with 500."""
HOLDER_BLOCKS = 16
UNKNOWN_GENERATION = Generation(model="")
"""Prompts are looked up by the hashes of their own generation only: their tokens are not kept."""


@dataclass(slots=True, eq=False)
class CacheCosts:
    """Deletion costs by uid of a Kubernetes pod. `generation_of`: that of a pod's model; None if it is unknown."""

    recent: RecentPrompts
    store: LocalStore
    fleet: Fleet
    ledger: Ledger
    generation_of: Callable[[Pod], Generation | None]

    async def read(self) -> dict[str, int] | None:
        """By uid; None while the index is incomplete. A pod that is not ready has its work in flight."""
        pods = self.fleet.snapshot.pods
        owners = self._owners(pods)
        values = CacheValues(owners)
        prompts, step = self.recent.sample(SAMPLE_PROMPTS, SAMPLE_BLOCKS)
        if not await self._add(prompts, values, owners):
            return None
        parts: defaultdict[str, list[float]] = defaultdict(list)
        inflight = self.ledger.inflight()
        for status in pods:
            if status.pod.uid and (work := inflight.get(status.pod.id)) is not None:
                parts[status.pod.uid].append(in_flight_ms(work, status.pod.speed))
        uids = {status.pod.uid for status in pods if status.pod.uid}
        return {uid: deletion_cost([step * values.lost_ms.get(uid, 0.0), *parts[uid]]) for uid in uids}

    def _owners(self, pods: Iterable[PodStatus]) -> dict[PodId, CacheOwner]:
        found: dict[PodId, CacheOwner] = {}
        for status in pods:
            pod = status.pod
            generation = self.generation_of(pod) if status.state is PodState.READY else None
            if generation is not None:
                found[pod.id] = CacheOwner(pod.uid or pod.id, pod.speed, generation.block_size_tokens)
        return found

    async def _add(
        self, prompts: Iterable[RecentPrompt], values: CacheValues, owners: Mapping[PodId, CacheOwner]
    ) -> bool:
        """Look up the prompts and add them. False if the index cannot answer."""
        steps = 0
        for prompt in prompts if owners else ():
            now_s = time.monotonic()
            match = self.store.match(PromptPrefix(UNKNOWN_GENERATION, (), prompt.hashes), now_s)
            if match.degraded:
                return False
            values.add(prompt.hashes, match.blocks, now_s - prompt.at_s)
            steps += len(prompt.hashes) + HOLDER_BLOCKS * len(match.blocks)
            if steps >= TURN_STEPS:
                steps = 0
                await asyncio.sleep(0)
        return True
