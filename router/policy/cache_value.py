"""What would it cost to lose a pod's cache?

    value = sum over recent prompts of  w(age) * T(blocks that this pod alone holds)  +  work in flight
    w(age) = 2^(-age / HALF_LIFE_S)

T is the pod's learnt time to compute these tokens. A block that another ready pod or a store within its reach also has
is not lost, and counts nothing. Blocks of several prompts count once, with the newest. Prompts come newest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.types import BlockHash, BlocksByTier, InFlight, PodId, PodSpeed

HALF_LIFE_S = 300.0
"""After this time without use, a prompt's blocks count half."""
MAX_PROMPT_BLOCKS = 8192
"""Leading blocks of a prompt that count."""
MARK_BLOCKS = 8
"""Blocks are counted once, except fewer than this number after a fork: with all of them, the set would be as much
larger, and its growth would take several milliseconds."""
MAX_COST = 2**31 - 1
"""Kubernetes reads a deletion cost as int32."""
STEP = 0.2
"""Smaller relative changes of a deletion cost are not written."""
MIN_STEP_MS = 20
"""Nor are smaller absolute ones: about the prefill of a short message."""


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """What is lost together: a pod, or all ranks and ports of one Kubernetes pod."""

    name: str
    speed: PodSpeed
    block_size_tokens: int


class CacheValues:
    """The sums while prompts are added. `owners` by pod: those whose caches can be used."""

    def __init__(self, owners: Mapping[PodId, CacheOwner]) -> None:
        self._owners = owners
        self._counted: set[BlockHash] = set()
        self.lost_ms = dict.fromkeys((owner.name for owner in owners.values()), 0.0)
        """Prefill in milliseconds that would have to be computed again, by owner."""

    def add(self, hashes: Sequence[BlockHash], held: Mapping[PodId, BlocksByTier], age_s: float) -> None:
        """Add the blocks of a prompt that one owner alone holds. `held`: leading blocks by pod. O(pods + blocks)."""
        owner, held_blocks, others_blocks = self._sole_owner(held)
        end = min(held_blocks, MAX_PROMPT_BLOCKS)
        if owner is None or others_blocks >= end:
            return
        # A chain hash identifies everything before it: the blocks that are counted already come first.
        marks = range(MARK_BLOCKS - 1, end, MARK_BLOCKS)
        number = bisect_left(
            marks, True, lo=others_blocks // MARK_BLOCKS, key=lambda at: hashes[at] not in self._counted
        )
        self._counted.update(hashes[at] for at in marks[number:])
        first = max(others_blocks, number * MARK_BLOCKS)
        size = owner.block_size_tokens
        weight = 2.0 ** (-max(age_s, 0.0) / HALF_LIFE_S)
        self.lost_ms[owner.name] += weight * owner.speed.compute_ms(first * size, end * size)

    def _sole_owner(self, held: Mapping[PodId, BlocksByTier]) -> tuple[CacheOwner | None, int, int]:
        """The owner that holds most of a prompt, its leading blocks, and the most of any other owner."""
        best: CacheOwner | None = None
        most = second = 0
        for pod, tiers in held.items():
            owner, blocks = self._owners.get(pod), sum(tiers)
            if owner is None:
                continue
            if best is not None and owner.name == best.name:
                most = max(most, blocks)
            elif blocks > most:
                best, most, second = owner, blocks, most
            else:
                second = max(second, blocks)
        return best, most, second


def in_flight_ms(work: InFlight, speed: PodSpeed) -> float:
    """Time to compute elsewhere what the pod has in flight: the queued prompts, and the prompts of running streams."""
    return work.prefill_ms + speed.c1_ms_per_token * work.decode_tokens


def deletion_cost(values_ms: Iterable[float]) -> int:
    """The sum as a deletion cost, rounded to milliseconds within int32."""
    return min(round(max(sum(values_ms), 0.0)), MAX_COST)


def is_new_cost(known: int, cost: int) -> bool:
    """Whether a cost differs enough from the one that was written."""
    return abs(cost - known) > max(STEP * known, MIN_STEP_MS)
