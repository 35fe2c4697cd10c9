"""How long is a cache hit where not all layers need every earlier token?

An engine keeps each group of layers by its own rule: full attention needs all blocks of a prefix, a sliding window the
last ones, a state (Mamba, linear attention) the one that ends at the hit, chunked attention those of the last chunk.
`hit_tokens` is the rule of vLLM 0.32 with all its cases; `covered` gives the same for 64 holders at once. Source:
`v1/core/kv_cache_coordinator.py` and `single_type_kv_cache_manager.py` of vLLM, see docs/hybrid-models.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.kv_events import AttentionKind, LayerType

MAX_TYPES = 3
"""Types of layers of one holder next to full attention. Each takes memory for all blocks of all pods."""
MAX_TOKENS = 1 << 24
"""An engine has no larger block."""
Bits = NDArray[np.uint64]
_NONE = np.uint64(0)
HeldEnds = Callable[[int], bool]
"""Whether all groups of a type hold the block that ends at this token."""


class HitRule(msgspec.Struct, frozen=True, gc=False):
    """The types of a model, full attention first. `unit_tokens`: what the engine hashes, the common divisor of the
    block sizes or less. `step_tokens`: hits are multiples of it, the block sizes' common multiple or, where an engine
    matches parts of blocks, the unit."""

    types: tuple[LayerType, ...]
    unit_tokens: int
    step_tokens: int
    is_single: bool
    """The model has one group only."""
    is_dense: bool = False
    """Windows and states keep all blocks, not only checkpoints."""

    @property
    def has_full(self) -> bool:
        """Whether some layers have full attention. Otherwise no event says which blocks were kept, and no request finds
        a shared prefix that it could keep."""
        return bool(self.types) and self.types[0].kind is AttentionKind.FULL

    @property
    def is_plain(self) -> bool:
        """Whether all holders can be computed at once."""
        sparse = [one for one in self.types if one.kind is not AttentionKind.FULL]
        if any(one.drops_block for one in self.types) and (self.unit_tokens != self.step_tokens or len(sparse) > 1):
            return False
        return all(
            one.kind is not AttentionKind.CHUNK and self.step_tokens % one.block_tokens == 0 for one in self.types
        )

    def fits(self, block_tokens: int) -> bool:
        """Whether it can be applied to blocks of this size, for a rule that comes from outside."""
        unit, step, sizes = self.unit_tokens, self.step_tokens, [one.block_tokens for one in self.types]
        if not 0 < len(sizes) <= 1 + MAX_TYPES or min(block_tokens, unit, *sizes) <= 0 or not 0 < step <= MAX_TOKENS:
            return False
        if any(size % block_tokens or step % size for size in sizes) or not self.has_full:
            return False
        return self.is_plain and all(0 <= one.span_tokens <= MAX_TOKENS for one in self.types)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether hits can end only where the engine kept windows or states."""
        return not self.is_dense and any(one.kind in (AttentionKind.WINDOW, AttentionKind.STATE) for one in self.types)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of a hit that are computed again."""
        return self.step_tokens * any(one.drops_block for one in self.types)

    def __str__(self) -> str:
        types = " + ".join(f"{one.kind} {one.span_tokens}" if one.span_tokens else one.kind for one in self.types)
        return types if self.has_full else f"{types}, upper bound"

    @classmethod
    def of(cls, types: Iterable[LayerType], groups: int) -> HitRule:
        """The rule of a model with these types in this number of groups, which matches whole blocks."""
        ordered = tuple(sorted(types, key=lambda one: one.kind is not AttentionKind.FULL))
        sizes = [one.block_tokens for one in ordered]
        return cls(ordered, math.gcd(*sizes), math.lcm(*sizes), groups == 1)


def covered(rule: HitRule, held: Sequence[Bits], prompt_tokens: int, block_tokens: int) -> Bits:
    """By block of the prompt, the holders (a bit each) whose hit covers it. `held`: of each type, by block, the holders
    that have it; `block_tokens` divides the sizes of the types' blocks."""
    if not rule.is_plain:
        return _covered_by_each(rule, held, prompt_tokens, block_tokens)
    rows = len(held[0])
    limit = max(min((prompt_tokens - 1) // block_tokens, rows), 0)
    step = rule.step_tokens // block_tokens
    ends = None
    for one, bits in zip(rule.types, held, strict=True):
        size = one.block_tokens // block_tokens
        own = _runs(one, bits[size - 1 : limit if rule.is_single else rows : size])
        if one.drops_block and one.kind is not AttentionKind.STATE:
            own = np.append(own[1:], _NONE)  # the hit ends a block earlier
        if size > 1:
            at_ends = np.zeros(limit, np.uint64)
            at_ends[size - 1 :: size] = own[: limit // size]
            own = at_ends
        ends = own[:limit] if ends is None else np.bitwise_and(ends, own[:limit], ends)
    assert ends is not None, "a rule has a type"
    if step > 1:
        ends[np.arange(1, limit + 1) % step != 0] = _NONE
    return np.bitwise_or.accumulate(ends[::-1])[::-1]


def kept_ends(rule: HitRule, full_tokens: int, prompt_tokens: int) -> set[int]:
    """After which tokens can a hit end once an engine has computed a prompt of which full attention had `full_tokens`?
    Windows and states are kept in front of the prompt's last token and where full attention had more than the hit; with
    a drafter that drops a block also where a longer prompt may hit, and states there alone."""
    step, dropped = rule.step_tokens, rule.dropped_tokens
    last = (prompt_tokens - 1) // step * step
    longer = prompt_tokens // step * step if dropped else last
    if any(one.kind is AttentionKind.STATE for one in rule.types):
        last = longer
    shared = min(full_tokens // step * step * rule.has_full, last) - rule.types[0].drops_block * step
    return {end for end in (last - dropped, longer - dropped, shared) if end > 0}


def _covered_by_each(rule: HitRule, held: Sequence[Bits], prompt_tokens: int, block_tokens: int) -> Bits:
    """The same, one holder after the other."""
    found = np.zeros(len(held[0]), np.uint64)
    for bit in (np.uint64(1 << lane) for lane in range(64)):
        columns = [(bits & bit != 0).tolist() for bits in held]
        if any(columns[0]):
            has = [lambda end, column=column: column[end // block_tokens - 1] for column in columns]
            found[: hit_tokens(rule, has, prompt_tokens) // block_tokens] |= bit
    return found


def _runs(one: LayerType, bits: Bits) -> Bits:
    """The holders that have what a hit needs which ends with each of the type's blocks."""
    if one.kind is AttentionKind.FULL:
        return np.bitwise_and.accumulate(bits)
    needed = one.needed_blocks + (one.drops_block and one.kind is AttentionKind.WINDOW)
    runs, length = bits.copy(), 1
    while length < min(needed, len(runs)):
        shift = min(length, needed - length)
        np.bitwise_and(runs[shift:], runs[:-shift], runs[shift:])  # shorter at the beginning of the prompt
        length += shift
    return runs


def hit_tokens(rule: HitRule, held: Sequence[HeldEnds], prompt_tokens: int) -> int:
    """Tokens of the prompt that the engine takes from its cache. `held`: of each type.

    Each type shortens what the others found until all agree. The last token is always computed."""
    length, full_hit, dropped = prompt_tokens - 1, -1, set[int]()
    while True:
        found = length
        for number, (one, has) in enumerate(zip(rule.types, held, strict=True)):
            if one.kind is AttentionKind.FULL and full_hit >= 0:
                found = min(found, full_hit)
                continue
            drops = one.drops_block and number not in dropped
            shorter = _of_type(rule, one, has, found, prompt_tokens, drops)
            if drops:
                dropped.add(number)
            elif shorter < found:
                dropped.clear()
            found = shorter
            full_hit = found if one.kind is AttentionKind.FULL else full_hit
        is_settled = rule.is_single or found >= length
        if is_settled or (len(rule.types) == 2 and rule.types[0].kind is AttentionKind.FULL):
            return min(found, length)
        length = found


def _of_type(rule: HitRule, one: LayerType, has: HeldEnds, most: int, prompt_tokens: int, drops: bool) -> int:
    """The longest hit of one type within `most` tokens. One that drops a block may look one block further."""
    unit, step, size = rule.unit_tokens, rule.step_tokens, one.block_tokens
    if drops and one.kind is not AttentionKind.STATE and not rule.is_single:
        further = unit if step < size and one.kind is AttentionKind.FULL else size
        most = min(most + further, prompt_tokens // unit * unit)
    if one.kind is AttentionKind.FULL:
        return _full(one, has, most, rule, drops)
    if one.kind is AttentionKind.WINDOW:
        return _window(one, has, most, step, drops)
    if one.kind is AttentionKind.STATE:
        return _state(has, most, unit if step < size else size, step)
    return _chunk(one, has, most)


def _full(one: LayerType, has: HeldEnds, most: int, rule: HitRule, drops: bool) -> int:
    """All blocks from the first one; where parts of blocks match, perhaps a part of the next one."""
    size, step, unit, end = one.block_tokens, rule.step_tokens, rule.unit_tokens, 0
    while end + size <= most and has(end + size):
        end += size
    if step < size:
        parts = range(min(end + size - unit, most // unit * unit), end, -unit)
        end = next((part for part in parts if has(part)), end)
    if drops and end:
        end -= min(step, size)
    return end - end % step


def _window(one: LayerType, has: HeldEnds, most: int, step: int, drops: bool) -> int:
    """The last run of blocks that is as long as the window, or begins with the prompt."""
    size = one.block_tokens
    needed = math.ceil((one.span_tokens - 1) / size) + drops
    run, end = 0, 0
    for start in range((most // size - 1) * size, -1, -size):
        if not has(start + size):
            run = 0
            continue
        if not run:
            end = start if drops else start + size
            if size != step and end % step:
                continue
        run += 1
        if run >= needed:
            return _multiple(start + (run - drops) * size, size, step)
    end = _multiple(run * size, size, step)
    return _multiple(end - size, size, step) if drops and end else end


def _state(has: HeldEnds, most: int, unit: int, step: int) -> int:
    """The last state within the limit."""
    for end in range(most // unit * unit, 0, -unit):
        if end % step == 0 and has(end):
            return end
    return 0


def _chunk(one: LayerType, has: HeldEnds, most: int) -> int:
    """The blocks of the limit's chunk; what is in front of it is not needed."""
    end = most // one.span_tokens * one.span_tokens
    while end + one.block_tokens <= most and has(end + one.block_tokens):
        end += one.block_tokens
    return end


def _multiple(end: int, size: int, step: int) -> int:
    return end - end % step if size != step else end
