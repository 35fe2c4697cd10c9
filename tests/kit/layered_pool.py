"""The blocks of a mock engine whose layers are not all full attention, or whose drafter changes what hits.

As in vLLM (docs/hybrid-models.md), full attention keeps all blocks, windows and states keep checkpoints, and all groups
share the pool. Simpler than there: of windows and states only what others can find takes memory, and requests do not
protect it from eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

from msgspec import structs

from loadtest.engine_model.block_pool import BlockPool, PodBlockTable
from loadtest.engine_model.pod import SimPod, SimPodConfig, SimRequest
from router.hashing import token_array
from router.index.hit_probe import CacheHabits, checkpoints, is_kept
from router.index.layers import HeldEnds, HitRule, hit_tokens
from router.types import AttentionKind, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, LayerType
from tests.kit.scenes import LLAMA_8B

FULL, STATE = LayerType(AttentionKind.FULL, 0), LayerType(AttentionKind.STATE, 0)
DROPS, DENSE, AHEAD = CacheHabits(drops_block=True), CacheHabits(is_dense=True), CacheHabits(looks_ahead=True)
_NO_HABITS = CacheHabits()


def layered(groups: Sequence[LayerType], habits: CacheHabits = _NO_HABITS) -> Callable[[int, int], BlockPool]:
    """Makes the blocks of an engine with these groups, in its order; their block sizes do not count."""
    if all(one.kind is AttentionKind.FULL for one in groups) and habits == _NO_HABITS:
        return BlockPool
    return partial(LayeredPool, groups=groups or (FULL,), habits=habits)


class LayeredPool(BlockPool):
    """A `BlockPool` is the group of full attention. Without one it stands for the memory of a prompt, and its events
    are not published."""

    def __init__(self, num_blocks: int, block_tokens: int, groups: Sequence[LayerType], habits: CacheHabits) -> None:
        layers = [structs.replace(one, block_tokens=block_tokens) for one in groups]
        kinds = [*(one.kind for one in layers), AttentionKind.FULL]
        super().__init__(num_blocks, block_tokens, int(habits.looks_ahead), kinds.index(AttentionKind.FULL))
        rule = HitRule.of(dict.fromkeys(layers), len(layers))
        self._groups_of = [[at for at, layer in enumerate(layers) if layer == one] for one in rule.types]
        """By type, its groups."""
        self._layers = layers
        self._rule = habits.rule(rule)
        self._kept: dict[tuple[int, BlockHash], list[int]] = {}
        """The physical blocks of windows and states, by group and hash."""
        self._kept_as: dict[int, tuple[int, BlockHash]] = {}

    def match(self, table: PodBlockTable) -> list[int]:
        """Also decides where windows and states will keep what a hit needs."""
        found, tokens = super().match(table), len(table.tokens)
        table.hash_up_to(self._hashable_blocks(table, tokens), self.block_size_tokens, self._ahead_tokens)
        held: list[HeldEnds] = [partial(self._hold, groups, table.hashes) for groups in self._groups_of]
        hit = hit_tokens(self._rule, held, tokens)
        table.checkpoints = checkpoints(self._rule, tokens, held[0])
        return found[: hit // self.block_size_tokens]

    def admit(self, table: PodBlockTable, found: list[int], new_tokens: int) -> bool:
        """Blocks that are hit are evicted last."""
        hit = table.hashes[: len(found)]
        for one, groups in zip(self._rule.types, self._groups_of, strict=True):
            places = [(group, block) for group in groups for block in hit[-one.needed_blocks :]]
            used = [self._kept[place][0] for place in places if place in self._kept]
            self._cache.pin(used)
            self._cache.release(used)
        return super().admit(table, found, new_tokens)

    def commit(self, table: PodBlockTable, computed_tokens: int) -> None:
        """Each group has an event of its own, in their order. Those of windows and states name what they keep."""
        first = table.matchable_blocks
        super().commit(table, computed_tokens)
        if table.matchable_blocks == first:
            return
        of_full = self._events.pop()
        assert isinstance(of_full, BlocksStored)
        stored = {self._group: of_full}
        for one, groups in zip(self._rule.types, self._groups_of, strict=True):
            if one.kind is not AttentionKind.FULL:
                ends = range((first + 1) * self.block_size_tokens, computed_tokens + 1, self.block_size_tokens)
                is_needed = [is_kept(self._rule, one, end, table.checkpoints) for end in ends]
                stored |= {group: self._keep(group, of_full, is_needed) for group in groups}
        self._events += [stored[group] for group in sorted(stored)]

    def clear(self) -> bool:
        if is_cleared := super().clear():
            self._kept.clear()
            self._kept_as.clear()
        return is_cleared

    def take_events(self) -> tuple[KvEvent, ...]:
        events = super().take_events()
        return tuple(one for one in events if isinstance(one, BlocksCleared) or one.group < len(self._layers))

    def _hold(self, groups: Sequence[int], hashes: Sequence[BlockHash], end: int) -> bool:
        """Whether all of these groups have the block that ends here."""
        number = end // self.block_size_tokens
        if not 0 < number <= len(hashes):
            return False
        block = hashes[number - 1]
        return all(block in self._copies if group == self._group else (group, block) in self._kept for group in groups)

    def _keep(self, group: int, computed: BlocksStored, is_needed: Sequence[bool]) -> BlocksStored:
        """Keep some of the computed blocks in a window or state, where there is memory."""
        new = [*compress(range(len(computed.block_hashes)), is_needed)][: self.free_blocks]
        blocks = self._allocate(len(new))
        for at, block in zip(new, blocks, strict=True):
            self._cache.commit(block, 1)
            self._kept_as[block] = place = group, computed.block_hashes[at]
            self._kept.setdefault(place, []).append(block)
        self._cache.release(blocks)
        return replace(
            computed,
            block_hashes=tuple(computed.block_hashes[at] for at in new),
            lookahead_tokens=tuple(computed.lookahead_tokens[at] for at in new if self._ahead_tokens),
            group=group,
            layers=self._layers[group],
        )

    def _forget(self, block: int) -> None:
        if block not in self._kept_as:
            super()._forget(block)
            return
        group, block_hash = place = self._kept_as.pop(block)
        self._kept[place].remove(block)
        if not self._kept[place]:
            del self._kept[place]
        self._events.append(BlocksRemoved(block_hashes=(block_hash,), group=group))


def window(tokens: int) -> LayerType:
    return LayerType(AttentionKind.WINDOW, 0, tokens)


def pod_of(groups: Sequence[LayerType], habits: CacheHabits, block: int, num_blocks: int = 10_000) -> SimPod:
    pool = layered(groups, habits)
    return SimPod(SimPodConfig(speed=LLAMA_8B, block_size_tokens=block, num_blocks=num_blocks, new_pool=pool))


def served(pod: SimPod, prompt: Sequence[int], output: Sequence[int], salt: str = "") -> tuple[int, list[KvEvent]]:
    """The cached tokens of a request that runs alone, and its events."""
    pod.submit(SimRequest(id="one", prompt=token_array(prompt), output=output, salt=salt))
    cached, events = 0, list[KvEvent]()
    while pod.start_step() is not None:
        step = pod.end_step()
        cached = step.started.get("one", cached)
        events += step.events
    return cached, events
