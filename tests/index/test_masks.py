"""Blocks, holders and tiers as bits, against sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.index.masks import HolderMasks
from router.types import BlocksByTier, PodId, Tier

PROMPT = [10, 11, 12, 13, 14]
Held = dict[tuple[PodId, int], set[Tier]]


def naive_walk(held: Held) -> dict[PodId, BlocksByTier]:
    found: dict[PodId, BlocksByTier] = {}
    for pod in {pod for pod, _ in held}:
        counts = [0, 0, 0, 0]
        for block in PROMPT:
            tiers = held.get((pod, block))
            if not tiers:
                break
            counts[min(tiers)] += 1
        if any(counts):
            found[pod] = (counts[0], counts[1], counts[2], counts[3])
    return found


def test_a_run_ends_at_the_first_block_that_is_missing() -> None:
    """However much of the rest is there; a holder without the first block is not mentioned."""
    masks = HolderMasks()
    masks.add_all(masks.slot("a"), [10, 11, 13, 14])
    masks.add_all(masks.slot("b"), [11, 12])
    assert masks.walk(PROMPT) == {"a": (2, 0, 0, 0)}
    assert masks.walk([]) == {} and masks.walk([99, 10]) == {}


def test_each_block_counts_in_its_nearest_tier() -> None:
    """In each block's own, and once."""
    masks = HolderMasks()
    slot = masks.slot("a")
    masks.add_all(slot, [10, 11], Tier.CPU)
    masks.add_all(slot, [11, 12])
    masks.add_all(slot, [11, 13], Tier.REMOTE)
    assert masks.walk(PROMPT) == {"a": (2, 1, 0, 1)}
    assert masks.has(slot, 11, Tier.CPU) and not masks.has(slot, 12, Tier.CPU)


def test_a_slot_that_was_left_is_used_again_and_empty() -> None:
    """Masks stay as wide as there are holders at a time."""
    masks = HolderMasks()
    first = masks.slot("a")
    assert masks.slot("a") == first
    masks.slot("b")
    masks.add_all(first, [10, 11])
    masks.forget("a", [10, 11])
    assert masks.slot("c") == first
    assert masks.walk(PROMPT) == {} and len(masks) == 0


def test_forgetting_a_stranger_changes_nothing() -> None:
    """It may have left already."""
    masks = HolderMasks()
    masks.add(masks.slot("a"), 10)
    masks.forget("b", [10])
    assert masks.walk(PROMPT) == {"a": (1, 0, 0, 0)}


changes = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "forget"]),
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.sampled_from(PROMPT),
    st.sampled_from(Tier),
)


@given(st.lists(changes, max_size=80))
def test_a_walk_tells_what_sets_would_tell(steps: list[tuple[str, PodId, int, Tier]]) -> None:
    """For any order of additions, removals and departures, after each of them."""
    masks, held = HolderMasks(), Held()
    for step, pod, block, tier in steps:
        if step == "add":
            masks.add(masks.slot(pod), block, tier)
            held.setdefault((pod, block), set()).add(tier)
        elif step == "remove":
            masks.remove(masks.slot(pod), block, tier)
            held.get((pod, block), set()).discard(tier)
        else:
            masks.forget(pod, [block for owner, block in held if owner == pod])
            held = {key: tiers for key, tiers in held.items() if key[0] != pod}
        assert masks.walk(PROMPT) == naive_walk(held)
    assert len(masks) == len({block for (_, block), tiers in held.items() if tiers})
