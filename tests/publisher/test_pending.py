"""Changes that wait for their write, against sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.publisher.changes import PendingChanges, split_held
from router.types import BlockChange, BlockHash, Tier

GPU, CPU = Tier.GPU, Tier.CPU
ALL = 1000

Held = set[tuple[Tier, BlockHash]]


def came(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, True, list(blocks))


def went(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, False, list(blocks))


def noted(*changes: BlockChange) -> PendingChanges:
    pending = PendingChanges()
    for change in changes:
        pending.add(change)
    return pending


def apply(changes: list[BlockChange], held: Held) -> None:
    """As strict as Redis' counts: what comes was not there, what goes was."""
    for change in changes:
        blocks = {(change.tier, block) for block in change.blocks}
        assert len(blocks) == len(change.blocks) > 0
        assert held.isdisjoint(blocks) if change.held else held >= blocks
        held ^= blocks


def test_what_came_and_went_again_has_not_changed() -> None:
    """And what went and came; the rest of the same changes has."""
    assert noted(came(1, 2), went(2), went(3), came(3, 4)).take(ALL) == [came(1, 4)]


def test_a_block_that_came_back_and_left_again_has_left() -> None:
    """Only the last word counts."""
    assert noted(went(1), came(1), went(1)).take(ALL) == [went(1)]


def test_tiers_change_apart() -> None:
    """A block that moves goes from one and comes to the other."""
    assert noted(came(1, tier=CPU), went(1)).take(ALL) == [came(1, tier=CPU), went(1)]


def test_no_more_is_taken_than_asked_for() -> None:
    """What changed first goes first; over all tiers together, what goes and what comes."""
    pending = noted(came(1), went(2), came(3), came(4, 5, tier=CPU))
    assert len(pending) == 5
    assert pending.take(2) == [went(2), came(1)]
    assert pending.take(2) == [came(3), came(4, tier=CPU)]
    assert (len(pending), pending.take(0)) == (1, [])
    assert (pending.take(2), pending.take(2), len(pending)) == ([came(5, tier=CPU)], [], 0)


def test_what_was_taken_is_no_longer_pending() -> None:
    """What goes afterwards is a change again, not the end of one."""
    pending = noted(came(1))
    pending.take(ALL)
    pending.add(went(1))
    assert pending.take(ALL) == [went(1)]


def test_nothing_is_pending_after_clear() -> None:
    """In no tier."""
    pending = noted(came(1), came(2, tier=CPU))
    pending.clear()
    assert (len(pending), pending.take(ALL)) == (0, [])


flips = st.tuples(st.sampled_from([GPU, CPU]), st.booleans(), st.sets(st.integers(1, 12), min_size=1))


@settings(max_examples=150)
@given(st.sets(st.tuples(st.sampled_from([GPU, CPU]), st.integers(1, 12))), st.lists(flips | st.integers(0, 6)))
def test_what_is_taken_makes_of_a_copy_what_all_changes_made(
    before: Held, happening: list[tuple[Tier, bool, set[BlockHash]] | int]
) -> None:
    """Notes and takes of any size in any order: every change that is taken is one, and as few as can be are pending."""
    actual, copy, pending = set(before), set(before), PendingChanges()
    for step in happening:
        if isinstance(step, int):
            taken = pending.take(step)
            assert sum(len(change.blocks) for change in taken) == min(step, len(actual ^ copy))
            apply(taken, copy)
        else:
            tier, held, some = step
            blocks = [block for block in some if ((tier, block) in actual) is not held]
            pending.add(BlockChange(tier, held, blocks))
            actual ^= {(tier, block) for block in blocks}
        assert len(pending) == len(actual ^ copy)
    apply(pending.take(ALL), copy)
    assert copy == actual


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(Tier), st.lists(st.integers(1, 50), unique=True)), st.integers(1, 7))
def test_pieces_are_all_that_is_held_and_none_too_large(held: dict[Tier, list[BlockHash]], most: int) -> None:
    """As changes of a holder that has nothing yet, and as few of them as can be."""
    pieces = list(split_held(held, most))
    copy: Held = set()
    for piece in pieces:
        apply(piece, copy)
        assert sum(len(change.blocks) for change in piece) <= most
    assert copy == {(tier, block) for tier, blocks in held.items() for block in blocks}
    assert len(pieces) == sum(-(-len(blocks) // most) for blocks in held.values())
