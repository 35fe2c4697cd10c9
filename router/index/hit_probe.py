"""Which rule of hits does an engine follow? Five prompts, and how many cached tokens each rule answers them with.

The events of an engine name its windows and states, not whether it keeps all of their blocks, whether a drafter makes
it compute the last block of a hit again (vLLM up to 0.32), or whether a block's hash includes the next token (from
0.33). The answers differ in all of these. Source: docs/hybrid-models.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from router.index.layers import HeldEnds, HitRule, hit_tokens, kept_ends
from router.kv_events import AttentionKind, LayerType

MAX_TEST_TOKENS = 40_000
"""Tokens of the prompts that are computed together; a longer test would cost the pod seconds."""
MAX_TEST_BLOCKS = 2_000
"""Blocks of a prompt, of all types: computing the answers for more would stop the event loop."""
_SPAN_BLOCKS = 8
"""The longest window in blocks of the test: with longer ones, sparse and dense would give the same answers."""


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """A prompt of the test: how long it is, and how many tokens it begins with that the first prompt has, too."""

    length_tokens: int
    shared_tokens: int


class CacheHabits(msgspec.Struct, frozen=True, gc=False):
    """What an engine does with its blocks that its events do not say."""

    drops_block: bool = False
    """It computes the last block of a hit again."""
    drafter_layer: int = -1
    """The number in a rule of the only type of layers that needs this block: the one with those of MTP. -1: all do."""
    is_dense: bool = False
    """Its windows and states keep all blocks, not only checkpoints."""
    looks_ahead: bool = False
    """A block is found again only with the same token behind it."""

    def rule(self, rule: HitRule) -> HitRule:
        drops = map(self.drops, range(len(rule.types)))
        types = [msgspec.structs.replace(one, drops_block=each) for one, each in zip(rule.types, drops, strict=True)]
        return msgspec.structs.replace(rule, types=tuple(types), is_dense=self.is_dense)

    def drops(self, layer: int) -> bool:
        """Whether a type of layers needs the block behind a hit."""
        return self.drops_block and self.drafter_layer in (-1, layer)


def described(rule: HitRule | None, *tested: CacheHabits | None) -> str:
    """The rule of a pod in words, for operators. `tested`: what explains its hits, None if nothing does; nothing before
    a test."""
    if rule is not None and not rule.has_full:
        return str(rule)
    if rule is None or not tested:
        return f"{rule or AttentionKind.FULL}, by events"
    if (habits := tested[0]) is None:
        return f"{rule}, upper bound"
    applies = {
        "checkpoints": rule.keeps_checkpoints,
        "drops a block": habits.drops_block,
        "looks ahead": habits.looks_ahead,
    }
    return ", ".join([str(rule), *[name for name, is_so in applies.items() if is_so]])


_HABITS = (
    CacheHabits(),
    CacheHabits(is_dense=True),
    CacheHabits(drops_block=True),
    CacheHabits(looks_ahead=True),
    CacheHabits(is_dense=True, drops_block=True),
    CacheHabits(is_dense=True, looks_ahead=True),
)


def probe_prompts(rule: HitRule) -> Sequence[ProbePrompt]:
    """The prompts, to be sent one after the other. None where they would have more than `MAX_TEST_TOKENS`.

    A prompt, the same again, its beginning, and two others that share ten blocks with it and with each other."""
    span_tokens = max(one.span_tokens for one in rule.types)
    block = rule.step_tokens * max(1, math.ceil(span_tokens / (rule.step_tokens * _SPAN_BLOCKS)))
    blocks = 16 * block * sum([1 / one.block_tokens for one in rule.types])
    if 60 * block > MAX_TEST_TOKENS or blocks > MAX_TEST_BLOCKS:
        return ()
    whole, shared = 15 * block + block // 2, 10 * block
    cut = ProbePrompt(12 * block + 1, 12 * block + 1)
    other = ProbePrompt(15 * block, shared)
    return ProbePrompt(whole, whole), ProbePrompt(whole, whole), cut, other, other


def explaining_habits(rule: HitRule, prompts: Sequence[ProbePrompt], answers: Sequence[int]) -> list[CacheHabits]:
    """The habits that explain these cached tokens. Takes up to 100 ms. Some have the same answers, but differ in what
    windows keep: one that needs the block behind a hit keeps it."""
    return [one for one in _all_habits(rule) if expected_hits(rule, one, prompts) == [*answers]]


def _all_habits(rule: HitRule) -> Iterator[CacheHabits]:
    """Those of engines with these layers."""
    for habits in _HABITS:
        yield habits
        for layer in range(len(rule.types)) if habits.drops_block and len(rule.types) > 1 else ():
            yield msgspec.structs.replace(habits, drafter_layer=layer)


def expected_hits(rule: HitRule, habits: CacheHabits, prompts: Sequence[ProbePrompt]) -> list[int]:
    """Cached tokens of each prompt on an engine with this rule and habits that had none of their blocks before."""
    engine = _Engine(habits.rule(rule), int(habits.looks_ahead))
    return [engine.compute(number, prompt) for number, prompt in enumerate(prompts)]


class _Engine:
    """A cache in which nothing is evicted. A block is (prompt that stored it first, its end)."""

    def __init__(self, rule: HitRule, ahead_tokens: int) -> None:
        self._rule = rule
        self._ahead_tokens = ahead_tokens
        self._held: list[set[tuple[int, int]]] = [set() for _ in rule.types]

    def compute(self, number: int, prompt: ProbePrompt) -> int:
        """The cached tokens of a prompt, whose blocks are then stored."""
        length = prompt.length_tokens

        def block(end: int) -> tuple[int, int]:
            return (0 if end + self._ahead_tokens <= prompt.shared_tokens else number), end

        def has(held: set[tuple[int, int]], end: int) -> bool:
            return end + self._ahead_tokens <= length and block(end) in held

        hit = hit_tokens(self._rule, [partial(has, held) for held in self._held], length)
        ends = checkpoints(self._rule, length, partial(has, self._held[0]))
        for one, held in zip(self._rule.types, self._held, strict=True):
            size = one.block_tokens
            for end in range(size, length - self._ahead_tokens + 1, size):
                if is_kept(self._rule, one, end, ends):
                    held.add(block(end))
        return hit


def checkpoints(rule: HitRule, prompt_tokens: int, has_full: HeldEnds) -> set[int]:
    """Where windows and states keep what a hit needs, once a prompt is computed of which full attention has these."""
    full, step = 0, rule.step_tokens
    while has_full(full + step):
        full += step
    return {end + rule.dropped_tokens for end in kept_ends(rule, full, prompt_tokens)}


def is_kept(rule: HitRule, one: LayerType, end: int, checkpoints: Collection[int]) -> bool:
    """Whether groups of a type keep the block that ends here."""
    if rule.is_dense or one.kind in (AttentionKind.FULL, AttentionKind.CHUNK):
        return True
    if one.kind is AttentionKind.STATE:
        return end + rule.dropped_tokens in checkpoints
    needed = one.needed_blocks + one.drops_block
    end += rule.dropped_tokens - one.drops_block * rule.step_tokens
    return any(0 <= at - end < needed * one.block_tokens for at in checkpoints)
