"""What is lost with a pod: the blocks that it alone holds, each once, by age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.cache_value import (
    HALF_LIFE_S,
    MARK_BLOCKS,
    MAX_COST,
    CacheOwner,
    CacheValues,
    deletion_cost,
    in_flight_ms,
    is_new_cost,
)
from router.types import BlocksByTier, InFlight, PodSpeed

SPEED = PodSpeed(c0_ms=5.0, c1_ms_per_token=0.5, c2_ms_per_token2=0.0)
SIZE = 16
BLOCK_MS = SPEED.c1_ms_per_token * SIZE
PODS = ("a", "b", "c")
Held = Mapping[str, int]


def owners(**names: str) -> dict[str, CacheOwner]:
    """Each pod is an owner of its own, or belongs to the one that is named."""
    return {pod: CacheOwner(names.get(pod, pod), SPEED, SIZE) for pod in PODS}


def tiers(held: Held) -> dict[str, BlocksByTier]:
    return {pod: (blocks, 0, 0, 0) for pod, blocks in held.items()}


def lost(*prompts: tuple[Sequence[int], Held], age_s: float = 0.0, **names: str) -> dict[str, float]:
    """Lost milliseconds in blocks, of owners that would lose any."""
    values = CacheValues(owners(**names))
    for hashes, held in prompts:
        values.add(hashes, tiers(held), age_s)
    return {owner: round(ms / BLOCK_MS, 6) for owner, ms in values.lost_ms.items() if ms}


def test_only_blocks_that_no_other_pod_holds_are_lost() -> None:
    assert lost((range(10), {"a": 10, "b": 4})) == {"a": 6}
    assert lost((range(10), {"a": 10, "b": 10})) == {}
    assert lost((range(10), {})) == {}


def test_blocks_in_a_store_that_others_can_read_are_not_lost() -> None:
    values = CacheValues(owners())
    values.add(range(10), {"a": (10, 0, 0, 0), "b": (0, 0, 0, 9), "c": (0, 0, 0, 9)}, 0.0)
    assert values.lost_ms == {"a": BLOCK_MS, "b": 0.0, "c": 0.0}


def test_ranks_of_one_kubernetes_pod_are_lost_together() -> None:
    assert lost((range(10), {"a": 10, "b": 10, "c": 2}), a="x", b="x") == {"x": 8}


def test_a_pod_that_cannot_be_used_saves_nothing() -> None:
    assert lost((range(10), {"a": 10, "draining": 10})) == {"a": 10}


def test_a_shared_document_counts_once() -> None:
    document = list(range(10 * MARK_BLOCKS))
    prompts = ([*document, 2000], {"a": 81}), ([*document, 3000, 3001], {"a": 82})
    assert lost(*prompts) == {"a": 10 * MARK_BLOCKS + 1 + 2}


def test_a_prompt_that_was_added_longer_counts_nothing_more() -> None:
    assert lost((range(96), {"a": 96}), (range(80), {"a": 80})) == {"a": 96}


def test_a_cache_is_worth_half_after_each_half_life_without_use() -> None:
    assert lost((range(10), {"a": 10}), age_s=HALF_LIFE_S) == {"a": 5}
    assert lost((range(10), {"a": 10}), age_s=3 * HALF_LIFE_S) == {"a": 1.25}


def test_later_tokens_cost_more_where_prefill_is_quadratic() -> None:
    speed = PodSpeed(c0_ms=0.0, c1_ms_per_token=0.1, c2_ms_per_token2=0.001)
    values = CacheValues({pod: CacheOwner(pod, speed, SIZE) for pod in PODS})
    values.add(range(10), {"a": (10, 0, 0, 0), "b": (5, 0, 0, 0)}, 0.0)
    assert values.lost_ms["a"] == pytest.approx(speed.compute_ms(5 * SIZE, 10 * SIZE))


PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the branch
        st.integers(0, 30),  # common blocks before it
        st.integers(1, 60),
    ),
    max_size=8,
)


@given(PROMPTS, st.lists(st.dictionaries(st.integers(0, 60), st.sets(st.sampled_from(PODS))), max_size=1))
def test_the_sum_equals_a_count_of_all_blocks(
    shapes: list[tuple[int, int, int]], placed: list[dict[int, set[str]]]
) -> None:
    """Against the plain definition: each distinct block that exactly one pod holds, with all blocks before it. A prompt
    counts less than `MARK_BLOCKS` of them again."""
    chosen = placed[0] if placed else {}
    prompts = [
        [*range(common), *(10_000 * branch + 100 * common + at + 100 for at in range(common, length))]
        for branch, common, length in ((branch, min(common, length), length) for branch, common, length in shapes)
    ]
    holders = {block: chosen.get(block % 61, {"a"}) for prompt in prompts for block in prompt}
    alone: dict[int, str] = {}
    found = []
    for prompt in prompts:
        held = dict.fromkeys(PODS, 0)
        for pod in PODS:
            while held[pod] < len(prompt) and pod in holders[prompt[held[pod]]]:
                held[pod] += 1
        found.append((prompt, held))
        for at, block in enumerate(prompt):
            having = [pod for pod in PODS if held[pod] > at]
            if len(having) == 1:
                alone[block] = having[0]
    for pod in PODS:
        exact = list(alone.values()).count(pod)
        assert exact <= lost(*found).get(pod, 0) <= exact + (MARK_BLOCKS - 1) * len(prompts)


def test_work_in_flight_is_the_queue_and_the_prompts_of_running_streams() -> None:
    work = InFlight(requests=3, prefill_requests=1, prefill_ms=40.0, context_tokens=900, decode_tokens=600)
    assert in_flight_ms(work, SPEED) == 40.0 + 600 * 0.5


def test_a_cost_is_an_int32() -> None:
    assert deletion_cost([1.4, 1.2]) == 3
    assert deletion_cost([1e300]) == MAX_COST
    assert deletion_cost([-5.0]) == 0


@pytest.mark.parametrize(
    ("known", "cost", "new"), [(0, 20, False), (0, 21, True), (1000, 1200, False), (1000, 799, True)]
)
def test_small_changes_are_not_written(known: int, cost: int, new: bool) -> None:
    assert is_new_cost(known, cost) is new
