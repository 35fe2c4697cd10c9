"""Announcements that grow old."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.publisher.changes import TierExpiry
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

CPU, DISK = Tier.CPU, Tier.DISK
TTL_S = 10.0


def stored(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksStored:
    return BlocksStored(block_hashes=hashes, parent_hash=None, tokens=(), block_size_tokens=0, tier=tier, group=group)


def removed(*hashes: int, tier: Tier = CPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=hashes, tier=tier, group=group)


def noted(*told: tuple[float, KvEvent]) -> TierExpiry:
    """What a holder told, and when. The CPU and the disk forget silently."""
    expiry = TierExpiry({CPU: TTL_S, DISK: 3 * TTL_S})
    for now_s, event in told:
        expiry.observe([event], now_s)
    return expiry


def test_a_block_is_due_after_its_time_to_live() -> None:
    """Not before, and once."""
    expiry = noted((0.0, stored(71)), (1.0, stored(72, 73)))
    assert list(expiry.expired(9.9)) == []
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(11.0)) == [removed(72), removed(73)]
    assert list(expiry.expired(99.0)) == []


def test_a_block_that_is_told_again_lives_on() -> None:
    """From then, and others do not wait for it."""
    expiry = noted((0.0, stored(71, 72)), (8.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(72)]
    assert list(expiry.expired(17.9)) == []
    assert set(expiry.expired(18.0)) == {removed(71)}


def test_a_block_is_removed_once_for_each_copy() -> None:
    """The index counts them as well; a copy that was removed meanwhile is not removed again."""
    expiry = noted((0.0, stored(71)), (0.0, stored(71)), (0.0, stored(71)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71)] * 2


def test_what_was_removed_is_never_due() -> None:
    """Nor does a removal that came before its store, or too often, owe anything."""
    expiry = noted((0.0, removed(71)), (0.0, removed(71)), (1.0, stored(71, 72)), (2.0, removed(72)))
    assert list(expiry.expired(99.0)) == [removed(71)]


def test_each_tier_has_its_own_time() -> None:
    """A block in two of them is two announcements."""
    expiry = noted((0.0, stored(71, tier=DISK)), (0.0, stored(71)))
    assert list(expiry.expired(10.0)) == [removed(71)]
    assert list(expiry.expired(29.9)) == []
    assert list(expiry.expired(30.0)) == [removed(71, tier=DISK)]


def test_a_tier_without_a_time_never_expires() -> None:
    """Its holder says itself what is gone."""
    expiry = noted((0.0, stored(71, tier=Tier.GPU)))
    assert list(expiry.expired(1e9)) == []
    assert list(TierExpiry({}).expired(1e9)) == []


def test_groups_are_announced_apart() -> None:
    """A removal in one group leaves the other's copy."""
    expiry = noted((0.0, stored(71)), (0.0, stored(71, group=1)), (1.0, removed(71)))
    assert list(expiry.expired(99.0)) == [removed(71, group=1)]


def test_a_holder_that_was_cleared_owes_nothing() -> None:
    """In any tier; what it tells from then on counts."""
    expiry = noted((0.0, stored(71)), (0.0, stored(71, tier=DISK)), (1.0, BlocksCleared()), (2.0, stored(72)))
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
    expiry, ttl_s, now_s = noted(), {CPU: TTL_S, DISK: 3 * TTL_S}, 0.0
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
