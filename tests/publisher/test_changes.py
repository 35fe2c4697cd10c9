"""Coalesced changes of one holder, and blocks that expire."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.publisher.changes import PendingChanges, TierExpiry, split_held
from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

GPU, CPU = Tier.GPU, Tier.CPU
ALL = 1000

Held = set[tuple[Tier, BlockHash]]


def adds(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, True, list(blocks))


def removes(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, False, list(blocks))


def pending_after(*changes: BlockChange) -> PendingChanges:
    pending = PendingChanges()
    for change in changes:
        pending.add(change)
    return pending


def apply(changes: list[BlockChange], held: Held) -> None:
    """As strict as the counts in Redis: only absent blocks are added, only present ones removed."""
    for change in changes:
        blocks = {(change.tier, block) for block in change.blocks}
        assert len(blocks) == len(change.blocks) > 0
        assert held.isdisjoint(blocks) if change.held else held >= blocks
        held ^= blocks


def test_opposite_changes_cancel_out() -> None:
    assert pending_after(adds(1, 2), removes(2), removes(3), adds(3, 4)).take(ALL) == [adds(1, 4)]


def test_the_last_change_of_a_block_counts() -> None:
    assert pending_after(removes(1), adds(1), removes(1)).take(ALL) == [removes(1)]


def test_tiers_are_independent() -> None:
    """A block that moves is removed from one tier and added to the other."""
    assert pending_after(adds(1, tier=CPU), removes(1)).take(ALL) == [adds(1, tier=CPU), removes(1)]


def test_take_returns_at_most_max_blocks() -> None:
    """Oldest changes first, over all tiers together."""
    pending = pending_after(adds(1), removes(2), adds(3), adds(4, 5, tier=CPU))
    assert len(pending) == 5
    assert pending.take(2) == [removes(2), adds(1)]
    assert pending.take(2) == [adds(3), adds(4, tier=CPU)]
    assert (len(pending), pending.take(0)) == (1, [])
    assert (pending.take(2), pending.take(2), len(pending)) == ([adds(5, tier=CPU)], [], 0)


def test_taken_changes_are_no_longer_pending() -> None:
    """A later removal is a change of its own."""
    pending = pending_after(adds(1))
    pending.take(ALL)
    pending.add(removes(1))
    assert pending.take(ALL) == [removes(1)]


def test_nothing_is_pending_after_clear() -> None:
    pending = pending_after(adds(1), adds(2, tier=CPU))
    pending.clear()
    assert (len(pending), pending.take(ALL)) == (0, [])


flips = st.tuples(st.sampled_from([GPU, CPU]), st.booleans(), st.sets(st.integers(1, 12), min_size=1))


@given(st.sets(st.tuples(st.sampled_from([GPU, CPU]), st.integers(1, 12))), st.lists(flips | st.integers(0, 6)))
def test_taken_changes_add_up_to_all_changes(
    before: Held, happening: list[tuple[Tier, bool, set[BlockHash]] | int]
) -> None:
    """For any order of add and take; as few blocks as possible are pending."""
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


@given(st.dictionaries(st.sampled_from(Tier), st.lists(st.integers(1, 50), unique=True)), st.integers(1, 7))
def test_split_held_returns_all_blocks_in_bounded_pieces(held: dict[Tier, list[BlockHash]], most: int) -> None:
    """As few pieces as possible."""
    pieces = list(split_held({(tier, 2): blocks for tier, blocks in held.items()}, most))
    assert all(change.layer == 2 for piece in pieces for change in piece)
    copy: Held = set()
    for piece in pieces:
        apply(piece, copy)
        assert sum(len(change.blocks) for change in piece) <= most
    assert copy == {(tier, block) for tier, blocks in held.items() for block in blocks}
    assert len(pieces) == sum(-(-len(blocks) // most) for blocks in held.values())


def test_a_block_has_one_pending_change_in_each_type_of_layers() -> None:
    """A window drops a block that full attention keeps."""
    pending = pending_after(
        BlockChange(Tier.GPU, True, [1, 2]), BlockChange(Tier.GPU, True, [2], 1), BlockChange(Tier.GPU, False, [1], 2)
    )
    assert len(pending) == 4
    taken = {(change.layer, change.held): list(change.blocks) for change in pending.take(9)}
    assert taken == {(0, True): [1, 2], (1, True): [2], (2, False): [1]}


CPU, DISK = Tier.CPU, Tier.DISK
TTL_S = 10.0


def stored(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksStored:
    return BlocksStored(block_hashes=hashes, parent_hash=None, tokens=(), block_size_tokens=0, tier=tier, group=group)


def removed(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=hashes, tier=tier, group=group)


def expiry_after(*events: tuple[float, KvEvent]) -> TierExpiry:
    """Expiry of a holder after these (time, event) pairs."""
    expiry = TierExpiry({CPU: TTL_S, DISK: 3 * TTL_S})
    for now_s, event in events:
        expiry.observe([event], now_s)
    return expiry


def test_a_block_expires_after_its_ttl() -> None:
    """Once."""
    expiry = expiry_after((0.0, stored(71)), (1.0, stored(72, 73)))
    assert list(expiry.expired(9.9)) == []
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(11.0)) == [removed(72), removed(73)]
    assert list(expiry.expired(99.0)) == []


def test_an_announcement_renews_a_block() -> None:
    """Other blocks expire independently."""
    expiry = expiry_after((0.0, stored(71, 72)), (8.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(72)]
    assert list(expiry.expired(17.9)) == []
    assert set(expiry.expired(18.0)) == {removed(71)}


def test_an_expired_block_is_removed_once_per_copy() -> None:
    """Copies removed before are not removed again."""
    expiry = expiry_after((0.0, stored(71)), (0.0, stored(71)), (0.0, stored(71)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71)] * 2


def test_a_removed_block_does_not_expire() -> None:
    """Removals before the store or repeated ones have no effect."""
    expiry = expiry_after((0.0, removed(71)), (0.0, removed(71)), (1.0, stored(71, 72)), (2.0, removed(72)))
    assert list(expiry.expired(99.0)) == [removed(71)]


def test_each_tier_has_its_own_ttl() -> None:
    expiry = expiry_after((0.0, stored(71, tier=DISK)), (0.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(29.9)) == []
    assert list(expiry.expired(30.0)) == [removed(71, tier=DISK)]


def test_a_tier_without_a_ttl_never_expires() -> None:
    expiry = expiry_after((0.0, stored(71, tier=Tier.GPU)))
    assert list(expiry.expired(1e9)) == []
    assert list(TierExpiry({}).expired(1e9)) == []


def test_attention_groups_are_independent() -> None:
    expiry = expiry_after((0.0, stored(71)), (0.0, stored(71, group=1)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71, group=1)]


def test_nothing_expires_after_a_clear() -> None:
    """Later announcements count again."""
    expiry = expiry_after((0.0, stored(71)), (0.0, stored(71, tier=DISK)), (1.0, BlocksCleared()), (2.0, stored(72)))
    assert list(expiry.expired(99.0)) == [removed(72)]


steps = st.tuples(
    st.integers(0, 6), st.sampled_from(["stored", "stored", "removed", "due"]), st.integers(1, 4), st.sampled_from(Tier)
)


@given(st.lists(steps, max_size=40))
def test_exactly_the_copies_without_recent_events_expire(
    happening: list[tuple[int, str, int, Tier]],
) -> None:
    """Compared with counts and the time of the last event of each block."""
    expiry, ttl_s, now_s = expiry_after(), {CPU: TTL_S, DISK: 3 * TTL_S}, 0.0
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
