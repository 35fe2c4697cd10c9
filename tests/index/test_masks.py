"""Blocks, holders and tiers as bits, compared with sets."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.masks import MIN_ROWS, SCATTER, HolderMasks
from router.types import BlocksByTier, PodId, Tier

PROMPT = [10, 11, 12, 13, 14]
Held = dict[tuple[PodId, int], set[Tier]]


def naive_walk(held: Held, prompt: list[int] = PROMPT) -> dict[PodId, BlocksByTier]:
    found: dict[PodId, BlocksByTier] = {}
    for pod in {pod for pod, _ in held}:
        counts = [0, 0, 0, 0]
        for block in prompt:
            tiers = held.get((pod, block))
            if not tiers:
                break
            counts[min(tiers)] += 1
        if any(counts):
            found[pod] = (counts[0], counts[1], counts[2], counts[3])
    return found


def test_leading_blocks_end_at_the_first_missing_block() -> None:
    """A holder without the first block is not returned."""
    masks = HolderMasks()
    masks.add("a", [10, 11, 13, 14])
    masks.add("b", [11, 12])
    assert masks.walk(PROMPT) == {"a": (2, 0, 0, 0)}
    assert masks.walk([]) == {} and masks.walk([99, 10]) == {}


def test_what_full_attention_has_is_what_hits_without_a_rule() -> None:
    """Other holders of the blocks make no difference."""
    masks = HolderMasks()
    masks.add("a", [10, 11, 13])
    masks.add("b", PROMPT)
    found = [masks.full_and_hit(name, blocks, (0, 1)) for name in "abc" for blocks in (PROMPT, [], [99])]
    assert found == [(2, 2), (0, 0), (0, 0), (5, 5), (0, 0), (0, 0), *[(0, 0)] * 3]


def test_each_block_counts_in_its_nearest_tier() -> None:
    """Once."""
    masks = HolderMasks()
    masks.add("a", [10, 11], Tier.CPU)
    masks.add("a", [11, 12])
    masks.add("a", [11, 13], Tier.REMOTE)
    assert masks.walk(PROMPT) == {"a": (2, 1, 0, 1)}
    assert masks.held("a") == masks.block_holders == 6


def test_arrays_and_lists_of_blocks_are_equal() -> None:
    """Including the largest hash and 0."""
    masks = HolderMasks()
    blocks = [0, 2**64 - 1, 2**63]
    masks.add("a", array("Q", blocks))
    assert masks.walk(blocks) == masks.walk(array("Q", blocks)) == {"a": (3, 0, 0, 0)}


def test_a_freed_slot_is_reused_once_it_is_swept() -> None:
    """The number of planes follows the number of holders, and no holder inherits blocks."""
    masks = HolderMasks()
    first = masks._slot("a")
    assert masks._slot("a") == first
    masks._slot("b")
    masks.add("a", [10, 11])
    masks.forget("a")
    assert masks.walk(PROMPT) == {} and masks.block_holders == 0
    assert masks._slot("c") != first and len(masks._lanes) == 1
    masks.add("c", [99])
    assert masks._slot("d") == first and masks.walk(PROMPT) == {}


def test_blocks_are_found_during_the_whole_move() -> None:
    """A removal may start the move to a new table."""
    masks = HolderMasks()
    blocks = list(range(1, MIN_ROWS // 2 + 2))
    masks.add("a", blocks)
    masks.remove("a", blocks[-1:])
    assert masks.walk(blocks) == {"a": (len(blocks) - 1, 0, 0, 0)}


def test_a_block_in_the_first_row_can_be_removed() -> None:
    masks, block = HolderMasks(), pow(SCATTER, -1, 1 << 64)
    masks.add("a", [block])
    masks.remove("a", [block])
    assert masks.walk([block]) == {} and masks.block_holders == 0


def test_blocks_added_again_while_the_table_moves_count_once() -> None:
    masks = HolderMasks()
    blocks = list(range(1, MIN_ROWS // 2 + 2))
    masks.add("a", blocks)
    masks.add("a", blocks)
    assert masks.held("a") == masks.block_holders == len(blocks)


def test_forgetting_an_unknown_holder_changes_nothing() -> None:
    masks = HolderMasks()
    masks.add("a", [10])
    masks.forget("b")
    assert masks.walk(PROMPT) == {"a": (1, 0, 0, 0)}


def test_a_renamed_holder_replaces_the_one_with_that_name() -> None:
    masks = HolderMasks()
    masks.add("a", [10, 11, 12])
    masks.add("a again", [10, 11])
    masks.rename("a again", "a")
    assert masks.walk(PROMPT) == {"a": (2, 0, 0, 0)}
    masks.add("a", [12])
    assert masks.walk(PROMPT) == {"a": (3, 0, 0, 0)} and masks.held("a") == 3


changes = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "forget"]),
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.sampled_from(PROMPT),
    st.sampled_from(Tier),
)


@given(st.lists(changes, max_size=80))
def test_walk_returns_what_sets_return(steps: list[tuple[str, PodId, int, Tier]]) -> None:
    """For any order of additions, removals and departures."""
    masks, held = HolderMasks(), Held()
    for what, pod, block, tier in steps:
        if what == "forget":
            masks.forget(pod)
            held = {key: tiers for key, tiers in held.items() if key[0] != pod}
        elif what == "add":
            masks.add(pod, [block], tier)
            held.setdefault((pod, block), set()).add(tier)
        else:
            masks.remove(pod, [block], tier)
            held.get((pod, block), set()).discard(tier)
        assert masks.walk(PROMPT) == naive_walk(held)
        assert masks.block_holders == sum(map(len, held.values()))


@pytest.mark.parametrize("seed", range(3))
def test_growing_and_shrinking_lose_nothing(seed: int) -> None:
    """Several renewals, batches of every size, holders of every word, and holders that leave meanwhile."""
    rng = random.Random(seed)
    masks, held = HolderMasks(), Held()
    pods = [f"p{number}" for number in range(70)]
    conversations = [[rng.getrandbits(64) for _ in range(rng.choice([3, 40, 300]))] for _ in range(120)]
    for _ in range(1500):
        pod, prompt, tier = rng.choice(pods[-3:] + pods), rng.choice(conversations), rng.choice([Tier.GPU, Tier.CPU])
        some = prompt[: rng.randrange(len(prompt) + 1)]
        if rng.random() < 0.02:
            masks.forget(pod)
            held = {key: tiers for key, tiers in held.items() if key[0] != pod}
        elif rng.random() < 0.6:
            masks.add(pod, array("Q", some), tier)
            for block in some:
                held.setdefault((pod, block), set()).add(tier)
        else:
            masks.remove(pod, some, tier)
            for block in some:
                held.get((pod, block), set()).discard(tier)
        if rng.random() < 0.05:
            assert masks.walk(prompt) == naive_walk(held, prompt)
    assert masks.bytes > 8 * MIN_ROWS * 9
    for prompt in conversations:
        assert masks.walk(prompt) == naive_walk(held, prompt)
    assert masks.block_holders == sum(map(len, held.values()))


def test_a_bounded_table_drops_what_does_not_fit_and_keeps_the_rest() -> None:
    """Dropped blocks are counted, and freed rows are reused."""
    masks = HolderMasks(max_bytes=16 * 4096)
    rng = random.Random(0)
    prompts = [[rng.getrandbits(64) for _ in range(100)] for _ in range(60)]
    for prompt in prompts:
        masks.add("a", prompt)
        assert masks.bytes <= 2 * 16 * 4096
    known = [prompt for prompt in prompts if masks.walk(prompt)]
    assert 15 <= len(known) < 60 and all(masks.walk(prompt) == {"a": (100, 0, 0, 0)} for prompt in known)
    assert masks.dropped_blocks == 100 * (60 - len(known))
    for prompt in known:
        masks.remove("a", prompt)
    for prompt in known:
        masks.add("a", [block ^ 1 for block in prompt])
    assert all(masks.walk([block ^ 1 for block in prompt]) for prompt in known)
