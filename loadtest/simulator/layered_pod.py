"""A simulated pod whose layers do not all need every earlier token: windows and states next to full attention.

It keeps, hits and frees blocks as vLLM does (docs/hybrid-models.md): full attention keeps every full block; windows and
states keep checkpoints, at the end of each prompt and where full attention alone had more than the hit. One pool serves
all groups, also second copies of blocks that are computed again. Blocks of a window that a growing answer leaves behind
are freed when the request ends, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from loadtest.engine_model.block_cache import CopyingCache
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.virtual_pod import VirtualPod, VirtualPodConfig
from router.index.layers import HeldEnds, HitRule, hit_tokens
from router.types import AttentionKind, BlockChange, BlockHash, LayerType, Tier

_STATE_SPAN = 3
"""A state is freed like a window of three tokens: the first token of a block needs the state of the one before."""
_LIVE_STATES = 3
"""A step of a request computes up to this many: at the junction, at the end of the prompt, and behind it."""
_HASH_BITS = 64
"""The cache's key of a block: its hash, and above these bits the number of its group from 1; 0 for full attention."""


def hit_rule(config: VirtualPodConfig, block_tokens: int) -> HitRule | None:
    """What hits on such a pod; None if all layers have full attention."""
    layers = _layers(config, block_tokens)
    return HitRule.of(dict.fromkeys(layers), len(layers)) if len(layers) > 1 else None


def new_pod(config: VirtualPodConfig, block_tokens: int) -> VirtualPod:
    rule = hit_rule(config, block_tokens)
    return VirtualPod(config, block_tokens) if rule is None else LayeredPod(config, block_tokens, rule)


def _layers(config: VirtualPodConfig, block_tokens: int) -> list[LayerType]:
    return [replace(layer, block_tokens=block_tokens) for layer in config.kv_groups]


def _key(group: int, block: BlockHash) -> BlockHash:
    return (group + 1) << _HASH_BITS | block


@dataclass(slots=True)
class LayerBlocks:
    """What the windows and states hold of one request."""

    checkpoints: set[int]
    """Numbers of blocks in front of which a hit shall be able to end."""
    computed_blocks: int
    pinned: dict[int, list[int]]
    """By group, the numbers of its matchable blocks."""
    private_tokens: int


class LayeredPod(VirtualPod):
    """One pod. `rule` has the types of its groups, full attention first."""

    def __init__(self, config: VirtualPodConfig, block_size_tokens: int, rule: HitRule) -> None:
        super().__init__(config, block_size_tokens)
        self.cache = CopyingCache(config.kv_tokens)
        self._rule = rule
        layers = _layers(config, block_size_tokens)
        self._types = [[at for at, layer in enumerate(layers) if layer == one] for one in rule.types]
        """By type, its groups."""
        self._full = self._types[0][0]
        self._sparse = {at: layer for at, layer in enumerate(layers) if at != self._full}
        """The windows and states, by group."""
        self._held: dict[Job, LayerBlocks] = {}

    # --- what hits ---

    def _cached_blocks(self, prompt: Sequence[BlockHash], known_tokens: int) -> int:
        full_tokens = self.cache.leading_blocks(prompt) * self._block
        held: list[HeldEnds] = [lambda end: end <= full_tokens]
        held += [partial(self._holds, groups, prompt) for groups in self._types[1:]]
        return hit_tokens(self._rule, held, known_tokens) // self._block

    def _holds(self, groups: Sequence[int], prompt: Sequence[BlockHash], end: int) -> bool:
        block = prompt[end // self._block - 1]
        return all(_key(group, block) in self.cache for group in groups)

    def held_blocks(self) -> list[BlockChange]:
        by_group = self._by_group(self.cache.blocks)
        held = [set.intersection(*(set(by_group[group]) for group in groups)) for groups in self._types]
        return [BlockChange(Tier.GPU, True, list(blocks), layer) for layer, blocks in enumerate(held)]

    def _record_evicted(self) -> None:
        """A type does not hold a block any more once one of its groups has evicted it."""
        if evicted := self.cache.take_evicted():
            by_group = self._by_group(evicted)
            for layer, groups in enumerate(self._types):
                if lost := [block for group in groups for block in by_group[group]]:
                    self._progress.block_changes.append(BlockChange(Tier.GPU, False, lost, layer))

    def _by_group(self, keys: Iterable[BlockHash]) -> list[list[BlockHash]]:
        blocks: list[list[BlockHash]] = [[] for _ in range(1 + len(self._sparse))]
        for key in keys:
            group = key >> _HASH_BITS
            blocks[group - 1 if group else self._full].append(key & (1 << _HASH_BITS) - 1)
        return blocks

    # --- what a request holds ---

    def _needed_tokens(self, request: TrafficRequest) -> int:
        last = min(request.prompt_tokens, self.config.step_budget_tokens)
        computed = request.prompt_tokens - last
        return super()._needed_tokens(request) + self._span(computed) + self._step_tokens(computed, last)

    def _step_tokens(self, computed: int, tokens: int) -> int:
        """Memory of windows and states for a step that computes these tokens of a prompt, and the rest of full
        attention's last block."""
        more = self._whole(computed + tokens) - self._whole(computed)
        states = min(more, _LIVE_STATES * self._block)
        layers = sum(states if layer.kind is AttentionKind.STATE else more for layer in self._sparse.values())
        return more - tokens + layers

    def _span(self, computed: int) -> int:
        """Tokens of the blocks in windows and states that the next token needs."""
        whole = self._whole(computed)
        return sum(whole - self._first(group, computed) * self._block for group in self._sparse)

    def _whole(self, tokens: int) -> int:
        """Tokens of the blocks for these tokens."""
        return -(-tokens // self._block) * self._block

    def _first(self, group: int, computed_tokens: int) -> int:
        """The first block that the next token needs."""
        return max(computed_tokens - (self._sparse[group].span_tokens or _STATE_SPAN) + 1, 0) // self._block

    def _reserve_layers(self, job: Job, found: int, computed: int, tokens: int) -> tuple[Sequence[BlockHash], int]:
        request, block = job.request, self._block
        full = min(self.cache.leading_blocks(request.prompt_hashes), (job.known_tokens - 1) // block)
        checkpoints = {(request.prompt_tokens - 1) // block, full}
        pinned = {group: list(range(self._first(group, computed), found)) for group in self._sparse}
        keys = [_key(group, request.blocks[at]) for group, numbers in pinned.items() for at in numbers]
        private = self._span(computed) - len(keys) * block + self._step_tokens(computed, tokens)
        self._held[job] = LayerBlocks(checkpoints, found, pinned, private)
        return keys, private

    def _reserve_chunk(self, job: Job, tokens: int) -> bool:
        more = self._step_tokens(job.computed_tokens, tokens)
        if self.cache.available_tokens - len(self._decoding) < tokens + more:
            return False
        self._held[job].private_tokens += more
        self.cache.allocate(more)
        return super()._reserve_chunk(job, tokens)

    def _end_chunk(self, job: Job, tokens: int) -> None:
        super()._end_chunk(job, tokens)
        if job in self._held:
            self._free_skipped(job, job.computed_tokens)

    def _commit_prompt(self, job: Job, computed_tokens: int) -> None:
        super()._commit_prompt(job, computed_tokens)
        held, done = self._held[job], min(computed_tokens, job.request.prompt_tokens) // self._block
        for layer, one in enumerate(self._rule.types[1:], start=1):
            last = [
                range(max(end - one.needed_blocks, held.computed_blocks), min(end, done)) for end in held.checkpoints
            ]
            self._store(job, layer, sorted(set().union(*last)))
        held.computed_blocks = max(done, held.computed_blocks)

    def _store(self, job: Job, layer: int, numbers: Sequence[int]) -> None:
        """Make these blocks matchable in all groups of a type."""
        held, new = self._held[job], dict[BlockHash, None]()
        for group in self._types[layer]:
            for number in numbers:
                block = job.request.blocks[number]
                held.private_tokens -= self._block
                if self.cache.commit(_key(group, block), self._block):
                    new[block] = None
            held.pinned[group] += numbers
        self._record_change(Tier.GPU, True, list(new), layer)

    def _free_skipped(self, job: Job, computed_tokens: int) -> None:
        held, kept = self._held[job], 0
        for group, numbers in held.pinned.items():
            first = self._first(group, computed_tokens)
            self._unpin(job, group, [number for number in numbers if number < first])
            held.pinned[group] = [number for number in numbers if number >= first]
            kept += len(held.pinned[group]) * self._block
        needed = self._span(computed_tokens) - kept
        more = min(needed - held.private_tokens, self.cache.available_tokens)
        self.cache.allocate(more)
        held.private_tokens += more

    def _unpin(self, job: Job, group: int, numbers: Iterable[int]) -> None:
        self.cache.release([_key(group, job.request.blocks[number]) for number in numbers])

    def _release(self, job: Job) -> None:
        """Free the groups in their order, after what the answer left behind."""
        if job.computed_tokens > job.request.prompt_tokens:
            first = self._whole(job.request.prompt_tokens) + 1
            for tokens in (*range(first, job.computed_tokens + 1, self._block), job.computed_tokens - 1):
                self._free_skipped(job, tokens)
        held = self._held.pop(job)
        self.cache.free(held.private_tokens)
        for group in range(1 + len(self._sparse)):
            if group == self._full:
                super()._release(job)
            else:
                self._unpin(job, group, held.pinned[group])
