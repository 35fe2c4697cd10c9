"""Five prompts show which rule an engine follows."""

from __future__ import annotations

import pytest

from router.index.hit_probe import CacheHabits, expected_hits, explaining_habits, probe_prompts
from router.index.layers import HitRule
from router.kv_events import AttentionKind, LayerType

BLOCK = 16
FULL = LayerType(AttentionKind.FULL, BLOCK)
WINDOW = LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=8 * BLOCK)
STATE = LayerType(AttentionKind.STATE, BLOCK)
ONE, WINDOWS, STATES, ALONE = (
    HitRule.of([FULL], 1),
    HitRule.of([FULL, WINDOW], 2),
    HitRule.of([FULL, STATE], 2),
    HitRule.of([WINDOW], 1),
)
DROPS, DENSE, AHEAD = CacheHabits(drops_block=True), CacheHabits(is_dense=True), CacheHabits(looks_ahead=True)
MTP_IN_FULL, MTP_IN_WINDOWS = (CacheHabits(drops_block=True, drafter_layer=layer) for layer in (0, 1))


@pytest.mark.parametrize(
    ("rule", "habits", "blocks"),
    [
        (ONE, CacheHabits(), [0, 15, 12, 10, 10]),
        (WINDOWS, DENSE, [0, 15, 12, 10, 10]),
        (STATES, DENSE, [0, 15, 12, 10, 10]),
        (WINDOWS, CacheHabits(), [0, 15, 0, 0, 10]),
        (STATES, CacheHabits(), [0, 15, 0, 0, 10]),
        (ALONE, CacheHabits(), [0, 15, 0, 0, 0]),
        (ONE, DROPS, [0, 14, 11, 9, 9]),
        (WINDOWS, DROPS, [0, 14, 0, 0, 9]),
        (STATES, DROPS, [0, 14, 0, 0, 9]),
        (ONE, AHEAD, [0, 15, 12, 9, 9]),
        (WINDOWS, AHEAD, [0, 15, 0, 0, 9]),
        (STATES, AHEAD, [0, 15, 0, 0, 9]),
        (WINDOWS, MTP_IN_FULL, [0, 14, 0, 0, 9]),
        (WINDOWS, MTP_IN_WINDOWS, [0, 14, 0, 0, 0]),
    ],
)
def test_each_rule_answers_as_the_engines_manager_did(rule: HitRule, habits: CacheHabits, blocks: list[int]) -> None:
    found = expected_hits(rule, habits, probe_prompts(rule))
    assert found == [BLOCK * count for count in blocks]


@pytest.mark.parametrize("rule", [ONE, WINDOWS, STATES, ALONE])
@pytest.mark.parametrize("habits", [CacheHabits(), DROPS, DENSE, AHEAD])
def test_the_answers_show_what_an_engine_does(rule: HitRule, habits: CacheHabits) -> None:
    prompts = probe_prompts(rule)
    answers = expected_hits(rule, habits, prompts)
    alike = (rule is ONE and habits is DENSE) or (rule is ALONE and habits is AHEAD)
    assert explaining_habits(rule, prompts, answers)[0] == (CacheHabits() if alike else habits)


def test_the_answers_do_not_show_whether_windows_need_the_dropped_block() -> None:
    prompts = probe_prompts(WINDOWS)
    for habits, explained_by in ((DROPS, [DROPS, MTP_IN_FULL]), (MTP_IN_WINDOWS, [MTP_IN_WINDOWS])):
        assert explaining_habits(WINDOWS, prompts, expected_hits(WINDOWS, habits, prompts)) == explained_by


@pytest.mark.parametrize("answers", [[0, 0, 0, 0, 0], [16, 240, 192, 160, 160], [0, 240, 0, 16, 160]])
def test_answers_of_no_rule_are_not_explained(answers: list[int]) -> None:
    assert explaining_habits(WINDOWS, probe_prompts(WINDOWS), answers) == []


def test_a_long_window_is_told_from_dense_with_longer_prompts() -> None:
    rule = HitRule.of([FULL, LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=1024)], 2)
    prompts = probe_prompts(rule)
    assert prompts[0].length_tokens == 15 * 128 + 64
    assert expected_hits(rule, CacheHabits(), prompts) == [0, 1968, 0, 0, 1280]
    assert expected_hits(rule, DENSE, prompts) == [0, 1968, 1536, 1280, 1280]


def test_a_test_that_would_cost_seconds_is_not_made() -> None:
    assert probe_prompts(HitRule.of([FULL, LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=32_768)], 2)) == ()


def test_a_pod_whose_blocks_are_tiny_is_not_tested() -> None:
    """The answers of all rules would take a second to compute."""
    types = [LayerType(AttentionKind.FULL, 1), LayerType(AttentionKind.WINDOW, 1, span_tokens=4096)]
    assert probe_prompts(HitRule.of(types, 2)) == ()
