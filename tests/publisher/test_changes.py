"""Coalesced changes of one holder, and blocks that expire."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.publisher.changes import PendingChanges, TierExpiry, split_held
from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

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


CPU, DISK = Tier.CPU, Tier.DISK
TTL_S = 10.0


def stored(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksStored:
    return BlocksStored(block_hashes=hashes, parent_hash=None, tokens=(), block_size_tokens=0, tier=tier, group=group)


def removed(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=hashes, tier=tier, group=group)


def observed(*told: tuple[float, KvEvent]) -> TierExpiry:
    """What a holder told, and when. The CPU and the disk forget silently."""
    expiry = TierExpiry({CPU: TTL_S, DISK: 3 * TTL_S})
    for now_s, event in told:
        expiry.observe([event], now_s)
    return expiry


def test_a_block_is_due_after_its_time_to_live() -> None:
    """Not before, and once."""
    expiry = observed((0.0, stored(71)), (1.0, stored(72, 73)))
    assert list(expiry.expired(9.9)) == []
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(11.0)) == [removed(72), removed(73)]
    assert list(expiry.expired(99.0)) == []


def test_a_block_that_is_told_again_lives_on() -> None:
    """From then, and others do not wait for it."""
    expiry = observed((0.0, stored(71, 72)), (8.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(72)]
    assert list(expiry.expired(17.9)) == []
    assert set(expiry.expired(18.0)) == {removed(71)}


def test_a_block_is_removed_once_for_each_copy() -> None:
    """The index counts them as well; a copy that was removed meanwhile is not removed again."""
    expiry = observed((0.0, stored(71)), (0.0, stored(71)), (0.0, stored(71)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71)] * 2


def test_what_was_removed_is_never_due() -> None:
    """Nor does a removal that came before its store, or too often, owe anything."""
    expiry = observed((0.0, removed(71)), (0.0, removed(71)), (1.0, stored(71, 72)), (2.0, removed(72)))
    assert list(expiry.expired(99.0)) == [removed(71)]


def test_each_tier_has_its_own_time() -> None:
    """A block in two of them is two announcements."""
    expiry = observed((0.0, stored(71, tier=DISK)), (0.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(29.9)) == []
    assert list(expiry.expired(30.0)) == [removed(71, tier=DISK)]


def test_a_tier_without_a_time_never_expires() -> None:
    """Its holder says itself what is gone."""
    expiry = observed((0.0, stored(71, tier=Tier.GPU)))
    assert list(expiry.expired(1e9)) == []
    assert list(TierExpiry({}).expired(1e9)) == []


def test_groups_are_announced_apart() -> None:
    """A removal in one group leaves the other's copy."""
    expiry = observed((0.0, stored(71)), (0.0, stored(71, group=1)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71, group=1)]


def test_a_holder_that_was_cleared_owes_nothing() -> None:
    """In any tier; what it tells from then on counts."""
    expiry = observed((0.0, stored(71)), (0.0, stored(71, tier=DISK)), (1.0, BlocksCleared()), (2.0, stored(72)))
    assert list(expiry.expired(99.0)) == [removed(72)]


steps = st.tuples(
    st.integers(0, 6), st.sampled_from(["stored", "stored", "removed", "due"]), st.integers(1, 4), st.sampled_from(Tier)
)


@settings(max_examples=100)
@given(st.lists(steps, max_size=40))
def test_what_is_due_are_all_copies_that_were_not_heard_of_for_their_time(
    happening: list[tuple[int, str, int, Tier]],
) -> None:
    """Against counts and the time each block was last spoken of."""
    expiry, ttl_s, now_s = observed(), {CPU: TTL_S, DISK: 3 * TTL_S}, 0.0
    copies, heard_s = Counter[tuple[int, Tier]](), dict[tuple[int, Tier], float]()
    for seconds, what, engine_hash, tier in [*happening, (1000, "due", 0, CPU)]:
        now_s += seconds
        copy = engine_hash, tier
        if what == "due":
            due = [one for one, count in copies.items() if count and now_s - heard_s[one] >= ttl_s[one[1]]]
            owed = Counter({removed(one[0], tier=one[1]): copies.pop(one) for one in due})
            assert Counter(expiry.expired(now_s)) == owed
        elif what == "stored":
            expiry.observe([stored(engine_hash, tier=tier)], now_s)
            if tier in ttl_s:
                copies[copy] += 1
                heard_s[copy] = now_s
        else:
            expiry.observe([removed(engine_hash, tier=tier)], now_s)
            copies[copy] -= copies[copy] > 0
            heard_s[copy] = now_s
    assert not +copies
