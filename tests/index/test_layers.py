"""The length of a hit where layers keep windows or states: the exact rule against recorded cases of the engine's own
cache manager, and the rule for many holders at once against the exact one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.layers import HeldEnds, HitRule, covered, hit_tokens, kept_ends
from router.types import AttentionKind, LayerType

VECTORS = Path(__file__).parents[3] / "shared/data/hybrid_kv_vectors.json"
KINDS = {
    "full": AttentionKind.FULL,
    "window": AttentionKind.WINDOW,
    "mamba": AttentionKind.STATE,
    "chunked": AttentionKind.CHUNK,
}


def recorded_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(VECTORS.read_text())["rule"]["cases"] if VECTORS.exists() else []
    return cases


def as_rule(case: dict[str, Any]) -> tuple[HitRule, list[HeldEnds]]:
    """The rule of a recorded case, and what each of its types holds: what all groups of the type hold."""
    groups: dict[LayerType, list[dict[str, Any]]] = {}
    for group, ends in zip(case["groups"], case["cached_ends"], strict=True):
        kind = KINDS[group["kind"]]
        span = group["window"] if kind in (AttentionKind.WINDOW, AttentionKind.CHUNK) else 0
        groups.setdefault(LayerType(kind, group["block"], span), []).append(group | {"ends": frozenset(ends)})
    ordered = sorted(groups, key=lambda one: one.kind is not AttentionKind.FULL)
    unit = case["hash_block"]
    limit = case["prompt_tokens"] // unit * unit

    def held_by(members: list[dict[str, Any]]) -> HeldEnds:
        return lambda end: 0 < end <= limit and all(end // unit in one["ends"] for one in members)

    types = (LayerType(*_of(one), any(group["eagle"] for group in groups[one])) for one in ordered)
    rule = HitRule(tuple(types), unit, case["step"], is_single=len(case["groups"]) == 1)
    return rule, [held_by(groups[one]) for one in ordered]


def _of(one: LayerType) -> tuple[AttentionKind, int, int]:
    return one.kind, one.block_tokens, one.span_tokens


@pytest.mark.skipif(not VECTORS.exists(), reason="no recorded cases here")
def test_the_rule_gives_what_the_engine_found() -> None:
    """290 random cache states in the engine's own manager: windows, states, chunks, unequal blocks, drafters."""
    cases = recorded_cases()
    assert len(cases) > 200
    for case in cases:
        rule, held = as_rule(case)
        assert hit_tokens(rule, held, case["prompt_tokens"]) == case["hit"], case


UNIT = 16


@st.composite
def rules(draw: st.DrawFn) -> HitRule:
    shapes = st.lists(st.sampled_from([*AttentionKind]), min_size=1, max_size=3, unique=True)
    drops, kinds = draw(st.booleans()), draw(shapes)
    if AttentionKind.CHUNK in kinds:  # engines have it with full attention only, and with no drafter
        kinds, drops = [*{*kinds, AttentionKind.FULL}], False
    types = [LayerType(kind, UNIT * draw(st.sampled_from([1, 1, 2, 4])), draw(spans(kind)), drops) for kind in kinds]
    return HitRule.of(types, groups=len(types) + draw(st.integers(0, 1)))


def spans(kind: AttentionKind) -> st.SearchStrategy[int]:
    if kind is AttentionKind.WINDOW:
        return st.sampled_from([2, 17, 33, 64, 100])
    return st.sampled_from([64, 128]) if kind is AttentionKind.CHUNK else st.just(0)


@given(rules(), st.integers(1, 24 * UNIT), st.randoms(use_true_random=True))
def test_many_holders_get_the_same_hits_as_each_alone(rule: HitRule, prompt_tokens: int, random: Any) -> None:
    rows, block = prompt_tokens // rule.unit_tokens, rule.unit_tokens
    held = [np.zeros(rows, np.uint64) for _ in rule.types]
    for one, bits in zip(rule.types, held, strict=True):
        for row in range(one.block_tokens // block - 1, rows, one.block_tokens // block):
            bits[row] = sum((random.random() < 0.4 + lane / 100) << lane for lane in range(64))
    found = covered(rule, held, prompt_tokens, block)
    for lane in range(0, 64, 7):
        expected = hit_tokens(rule, list(alone(held, lane, block)), prompt_tokens)
        assert int(np.count_nonzero(found & np.uint64(1 << lane))) * block == expected, lane


def alone(held: Sequence[np.ndarray[Any, np.dtype[np.uint64]]], lane: int, block: int) -> Iterator[HeldEnds]:
    for bits in held:
        column = (bits & np.uint64(1 << lane) != 0).tolist()
        yield lambda end, column=column: end % block == 0 and column[end // block - 1]  # type: ignore[misc]


def test_a_window_needs_its_last_blocks_only() -> None:
    rule = HitRule.of(
        [LayerType(AttentionKind.FULL, 16), LayerType(AttentionKind.WINDOW, 16, span_tokens=33)], groups=2
    )
    full, window = [np.full(8, 1, np.uint64), np.array([0, 0, 1, 1, 0, 0, 0, 1], np.uint64)]
    assert np.count_nonzero(covered(rule, [full, window], 200, 16)) == 4


def test_the_last_token_is_computed_in_any_case() -> None:
    rule = HitRule.of([LayerType(AttentionKind.FULL, 16)], groups=1)
    assert np.count_nonzero(covered(rule, [np.full(4, 1, np.uint64)], 64, 16)) == 3
    assert hit_tokens(rule, [lambda end: True], 64) == 48


@pytest.mark.parametrize(("kind", "ends"), [(AttentionKind.WINDOW, {32, 48}), (AttentionKind.STATE, {48})])
@pytest.mark.parametrize("full_tokens", [0, 64])
def test_a_prompt_that_ends_with_a_block_is_kept_for_longer_prompts_and_itself(
    kind: AttentionKind, ends: set[int], full_tokens: int
) -> None:
    """With a drafter, which drops a block. A state is kept once, where the last step but one ended."""
    sparse = LayerType(kind, 16, 33 * (kind is AttentionKind.WINDOW), drops_block=True)
    rule = HitRule.of([LayerType(AttentionKind.FULL, 16, drops_block=True), sparse], groups=2)
    assert kept_ends(rule, full_tokens, 64) == ends


def test_hits_are_multiples_of_all_block_sizes() -> None:
    rule = HitRule.of([LayerType(AttentionKind.FULL, 32), LayerType(AttentionKind.WINDOW, 48, 40)], groups=2)
    assert (rule.unit_tokens, rule.step_tokens) == (16, math.lcm(32, 48))
