"""The replica of the log, compared with the publishers' state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import token_array
from router.index.cluster import MAX_EXPIRED, ClusterIndex, EntryKind, LogEntry
from router.index.holders import HolderFacts, HolderId, KnownHolder, holder_name
from router.index.layers import HitRule
from router.types import (
    AttentionKind,
    BlockChange,
    BlockHash,
    BlocksByTier,
    Generation,
    LayerType,
    PromptPrefix,
    Tier,
)
from tests.kit.scenes import make_pod

GENERATION = Generation(model="m")
HOLDER_TTL_S = 10.0
GPU, CPU = Tier.GPU, Tier.CPU
EMPTY, RELOAD, CHANGE, SEAL, BEAT, GONE = EntryKind


def adds(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, True, blocks)


def removes(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, False, blocks)


def entry(
    kind: EntryKind, seq: int = 0, *changes: BlockChange, epoch: int = 1, holder: HolderId = "a", complete: bool = True
) -> LogEntry:
    """One entry of a holder that is the pod with the same name."""
    facts = HolderFacts(url=f"http://{holder}") if kind in (EMPTY, RELOAD) else None
    return LogEntry(kind=kind, holder=holder, epoch=epoch, seq=seq, complete=complete, facts=facts, changes=changes)


def make_index() -> ClusterIndex:
    """An index with two pods, `a` and `b`."""
    index = ClusterIndex(holder_ttl_s=HOLDER_TTL_S)
    for pod_id in "ab":
        index.holders.bind(make_pod(pod_id), GENERATION)
    return index


def apply(index: ClusterIndex, *entries: LogEntry, now_s: float = 0.0) -> list[bool]:
    return [index.apply(GENERATION, one, now_s) for one in entries]


def after(*entries: LogEntry) -> ClusterIndex:
    """An index after these entries."""
    index = make_index()
    assert apply(index, *entries) == [True] * len(entries)
    return index


def get(index: ClusterIndex, holder: HolderId = "a") -> KnownHolder:
    found = index.holders.get(holder_name(GENERATION, holder))
    assert found is not None
    return found


def runs(index: ClusterIndex, *blocks: BlockHash) -> dict[str, BlocksByTier]:
    return index.match(PromptPrefix(GENERATION, (), blocks))


def copied(index: ClusterIndex, *blocks: BlockHash, epoch: int = 1, seq: int = 0) -> KnownHolder:
    """Read `a` again, all blocks on the GPU."""
    known = KnownHolder(
        id="a", generation=GENERATION, facts=HolderFacts(url="http://a"), epoch=epoch, seq=seq, last_seen_s=0.0
    )
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, blocks)
    index.restore(known)
    return known


STARTED = entry(EMPTY), entry(CHANGE, 1, adds(1, 2, 3))
BLOCK = GENERATION.block_size_tokens
FULL, WINDOW = LayerType(AttentionKind.FULL, BLOCK), LayerType(AttentionKind.WINDOW, BLOCK, BLOCK + 1)
RULE = HitRule.of([FULL, WINDOW], groups=2)


def ruled(one: LogEntry, rule: HitRule | None = RULE) -> LogEntry:
    """The entry of a holder whose last block of a hit must be in its window, too."""
    return replace(one, facts=HolderFacts(url="http://a", rule=rule))


def in_window(*blocks: BlockHash) -> BlockChange:
    return BlockChange(GPU, True, blocks, 1)


def hit(index: ClusterIndex, *blocks: BlockHash) -> int:
    """Leading blocks of a prompt that has one more token."""
    tokens = token_array([0] * (len(blocks) * BLOCK + 1))
    return sum(index.match(PromptPrefix(GENERATION, tokens, blocks)).get("a", (0,)))


# --- changes in order ---


def test_consecutive_changes_are_applied() -> None:
    """Additions and removals in each tier."""
    index = after(*STARTED, entry(CHANGE, 2, adds(2, tier=CPU), removes(2)), entry(CHANGE, 3, adds(4)))
    assert runs(index, 1, 2, 3, 4) == {"a": (3, 1, 0, 0)}
    assert index.masks.held(get(index).name) == index.masks.block_holders == 4
    assert (get(index).seq, get(index).complete) == (3, True)


def test_holders_are_independent() -> None:
    """Both sequence numbers and blocks."""
    index = after(*STARTED, entry(EMPTY, holder="b"), entry(CHANGE, 1, adds(1), holder="b"))
    assert runs(index, 1, 2) == {"a": (2, 0, 0, 0), "b": (1, 0, 0, 0)}


def test_a_repeated_change_is_ignored() -> None:
    """Its blocks may have been removed since."""
    index = after(*STARTED, entry(CHANGE, 2, removes(3)), STARTED[1], STARTED[0])
    assert (runs(index, 1, 2, 3), get(index).seq) == ({"a": (2, 0, 0, 0)}, 2)


def test_after_a_gap_the_holder_must_be_read_again() -> None:
    """The change is not applied and does not extend the holder's TTL."""
    index = after(*STARTED)
    assert apply(index, entry(CHANGE, 3, adds(4)), now_s=5.0) == [False]
    assert (runs(index, 1, 2, 3, 4), get(index).seq, get(index).last_seen_s) == ({"a": (3, 0, 0, 0)}, 1, 0.0)


def test_a_beat_reveals_lost_changes() -> None:
    """It repeats the number of the last change; a lower number is only late."""
    index = after(*STARTED, entry(BEAT, 1), entry(BEAT, 0))
    assert apply(index, entry(BEAT, 2)) == [False]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)}


@pytest.mark.parametrize("kind, seq", [(CHANGE, 1), (SEAL, 1), (BEAT, 0)])
def test_an_unknown_holder_must_be_read_again(kind: EntryKind, seq: int) -> None:
    """The start of its epoch was missed."""
    index = make_index()
    assert apply(index, entry(kind, seq)) == [False]
    assert list(index.holders) == []


def test_every_entry_updates_whether_the_holder_is_complete() -> None:
    index = after(entry(EMPTY, complete=False))
    states = [get(index).complete]
    for one in (entry(CHANGE, 1), entry(BEAT, 1, complete=False), entry(BEAT, 1)):
        assert apply(index, one) == [True]
        states.append(get(index).complete)
    assert states == [False, True, False, True]


# --- epochs ---


@pytest.mark.parametrize("late", [CHANGE, SEAL, BEAT, EMPTY, RELOAD, GONE])
def test_an_older_epoch_is_ignored(late: EntryKind) -> None:
    """Entries of a fenced-off publisher with any number."""
    index = after(entry(EMPTY, epoch=5), entry(CHANGE, 1, adds(1), epoch=5))
    assert apply(index, entry(late, 2, removes(1), adds(9), epoch=4, complete=False), now_s=5.0) == [True]
    assert (runs(index, 1), runs(index, 9)) == ({"a": (1, 0, 0, 0)}, {})
    assert (get(index).epoch, get(index).seq, get(index).complete, get(index).last_seen_s) == (5, 1, True, 0.0)


@pytest.mark.parametrize("kind", [CHANGE, SEAL, BEAT])
def test_a_newer_epoch_whose_start_was_lost_must_be_read_again(kind: EntryKind) -> None:
    """The previous epoch stays until then."""
    index = after(*STARTED)
    assert apply(index, entry(kind, 2, adds(4), epoch=2)) == [False]
    assert (runs(index, 1, 2, 3, 4), get(index).epoch) == ({"a": (3, 0, 0, 0)}, 1)


def test_an_empty_epoch_drops_everything_at_once() -> None:
    """Sequence numbers restart."""
    index = after(*STARTED, entry(EMPTY, epoch=2))
    assert (runs(index, 1), index.masks.block_holders) == ({}, 0)
    assert apply(index, entry(CHANGE, 1, adds(2), epoch=2)) == [True]
    assert (runs(index, 1), runs(index, 2)) == ({}, {"a": (1, 0, 0, 0)})


def test_a_reload_keeps_the_old_blocks_until_its_seal() -> None:
    """After the seal only the written blocks count."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, adds(1, 4), epoch=2))
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 4) == {}
    assert get(index).reloading
    assert apply(index, entry(SEAL, 2, adds(2), epoch=2)) == [True]
    assert runs(index, 1, 2, 3) == {"a": (2, 0, 0, 0)} and runs(index, 4) == {"a": (1, 0, 0, 0)}
    assert not get(index).reloading and index.masks.block_holders == 3


def test_after_the_seal_changes_are_applied_at_once() -> None:
    """A repeated seal is ignored."""
    index = after(entry(RELOAD), entry(CHANGE, 1, adds(1)), entry(SEAL, 2), entry(CHANGE, 3, adds(2)), entry(SEAL, 2))
    assert runs(index, 1, 2) == {"a": (2, 0, 0, 0)}


def test_a_restarted_reload_drops_the_collected_blocks() -> None:
    """The old blocks still stay."""
    index = after(
        *STARTED,
        entry(RELOAD, epoch=2),
        entry(CHANGE, 1, adds(8), epoch=2),
        entry(RELOAD, epoch=3),
        entry(CHANGE, 1, adds(9), epoch=3),
    )
    assert (runs(index, 1), runs(index, 8), runs(index, 9)) == ({"a": (1, 0, 0, 0)}, {}, {})
    assert apply(index, entry(SEAL, 2, epoch=3)) == [True]
    assert (runs(index, 1), runs(index, 8), runs(index, 9)) == ({}, {}, {"a": (1, 0, 0, 0)})


def test_an_empty_epoch_ends_a_reload() -> None:
    """Neither old nor collected blocks remain."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, adds(8), epoch=2), entry(EMPTY, epoch=3))
    assert (index.masks.block_holders, get(index).reloading) == (0, False)


def test_an_epoch_start_without_facts_must_be_read_again() -> None:
    index = make_index()
    assert apply(index, replace(entry(EMPTY), facts=None)) == [False]
    assert list(index.holders) == []


# --- who is no longer there ---


def test_a_removed_holder_has_no_blocks() -> None:
    """Neither current nor collected ones; other holders stay."""
    index = after(
        *STARTED,
        entry(RELOAD, epoch=2),
        entry(CHANGE, 1, adds(8), epoch=2),
        entry(EMPTY, holder="b"),
        entry(CHANGE, 1, adds(1), holder="b"),
        entry(GONE, epoch=2),
        entry(GONE, epoch=2),
    )
    assert ([known.id for known in index.holders], index.masks.block_holders) == (["b"], 1)
    assert runs(index, 1) == {"b": (1, 0, 0, 0)}


def test_a_holder_without_entries_expires_after_its_ttl() -> None:
    """Changes and heartbeats extend the TTL, including repeated ones."""
    index = after(*STARTED, entry(EMPTY, holder="b"))
    apply(index, entry(BEAT, 0, holder="b"), now_s=1.0)
    assert index.expire(HOLDER_TTL_S) == []
    assert [known.id for known in index.expire(HOLDER_TTL_S + 0.5)] == ["a"]
    assert ([known.id for known in index.holders], index.masks.block_holders) == (["b"], 0)
    assert [known.id for known in index.expire(HOLDER_TTL_S + 1.5)] == ["b"]


def test_many_holders_expire_in_turns() -> None:
    """Each takes time in proportion to all others."""
    index = after(*(entry(EMPTY, holder=f"h{number}") for number in range(40)))
    turns = [len(index.expire(HOLDER_TTL_S + 1)) for _ in range(40)]
    assert (max(turns) <= MAX_EXPIRED, sum(turns), len(index.holders)) == (True, 40, 0)


def test_ttls_restart_after_an_outage() -> None:
    index = after(*STARTED, entry(EMPTY, holder="b"))
    index.reset_expiry(100.0)
    assert index.expire(100.0 + HOLDER_TTL_S) == []
    assert len(index.expire(100.5 + HOLDER_TTL_S)) == 2


# --- reading anew ---


def test_blocks_stay_while_a_holder_is_read_again() -> None:
    """The copy replaces them at once; pieces may repeat blocks."""
    index = after(*STARTED)
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, [1, 9])
    index.copy(GENERATION, "a", GPU, [9])
    index.copy(GENERATION, "a", CPU, [1])
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 9) == {}
    index.restore(replace(get(index), epoch=4, seq=7))
    assert runs(index, 1, 2, 3) == {"a": (1, 0, 0, 0)} and runs(index, 9) == {"a": (1, 0, 0, 0)}
    assert index.masks.held(get(index).name) == index.masks.block_holders == 3


def test_a_copy_continues_at_its_sequence_number() -> None:
    """Earlier entries are ignored, later ones are applied."""
    index = make_index()
    copied(index, 1, 2, epoch=3, seq=7)
    assert apply(index, entry(CHANGE, 7, removes(2), epoch=3), entry(CHANGE, 8, adds(3), epoch=3)) == [True, True]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)}
    assert apply(index, entry(CHANGE, 10, epoch=3)) == [False]


def test_a_restarted_copy_drops_the_first_attempt() -> None:
    """Redis may fail during a copy."""
    index = make_index()
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, [8])
    copied(index, 1)
    assert (runs(index, 8), runs(index, 1)) == ({}, {"a": (1, 0, 0, 0)})


def test_a_copy_of_an_empty_holder_is_empty() -> None:
    index = after(*STARTED)
    known = copied(index, seq=5)
    assert (get(index), runs(index, 1), index.masks.block_holders) == (known, {}, 0)


def test_a_copy_read_during_a_reload_is_used_as_it_is() -> None:
    """Later writes add to it, and the seal removes nothing."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, adds(8), epoch=2))
    copied(index, 1, 2, epoch=2, seq=3)
    assert apply(index, entry(CHANGE, 4, adds(3), epoch=2), entry(SEAL, 5, epoch=2)) == [True, True]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 8) == {}


# --- any history, with lost and repeated entries ---

BLOCKS = range(1, 6)
Held = frozenset[tuple[Tier, BlockHash]]


@dataclass(frozen=True, slots=True)
class Row:
    """True state of one holder."""

    epoch: int
    seq: int
    complete: bool
    held: Held


Truth = dict[HolderId, Row]


@dataclass(slots=True)
class Writers:
    """Publishers, the log they write, and the true state after each entry."""

    rows: Truth = field(default_factory=dict)
    log: list[LogEntry] = field(default_factory=list)
    truths: list[Truth] = field(default_factory=list)
    epoch: int = 0

    def write(self, kind: EntryKind, holder: HolderId, flipped: Held = frozenset(), *, complete: bool = True) -> None:
        """Write one entry that adds the absent ones of `flipped` and removes the others."""
        row = self.rows.get(holder)
        if kind in (EMPTY, RELOAD):
            self.epoch += 1
            row, flipped = Row(self.epoch, 0, complete, frozenset()), frozenset()
        elif row is None:
            return
        elif kind in (CHANGE, SEAL):
            row = Row(row.epoch, row.seq + 1, complete, row.held ^ flipped)
        else:
            row = replace(row, complete=complete)
        changes = [BlockChange(tier, (tier, block) in row.held, (block,)) for tier, block in sorted(flipped)]
        self.rows[holder] = row
        if kind is GONE:
            del self.rows[holder]
        self.log.append(entry(kind, row.seq, *changes, epoch=row.epoch, holder=holder, complete=complete))
        self.truths.append(dict(self.rows))


def read_again(index: ClusterIndex, holder: HolderId, truth: Truth, now_s: float) -> None:
    """As the feed does."""
    row = truth.get(holder)
    if row is None:
        return
    index.begin_copy(GENERATION, holder)
    for tier in Tier:
        index.copy(GENERATION, holder, tier, [block for where, block in row.held if where is tier])
    index.restore(
        KnownHolder(
            id=holder,
            generation=GENERATION,
            facts=HolderFacts(url=f"http://{holder}"),
            epoch=row.epoch,
            seq=row.seq,
            last_seen_s=now_s,
            complete=row.complete,
        )
    )


def apply_log(index: ClusterIndex, entries: Iterable[LogEntry], truth: Truth, now_s: float) -> None:
    """Apply entries; a holder with a gap is read from `truth`."""
    for one in entries:
        if not index.apply(GENERATION, one, now_s):
            read_again(index, one.holder, truth, now_s)


def assert_equal(index: ClusterIndex, truth: Truth) -> None:
    assert {known.id: (known.epoch, known.seq, known.complete) for known in index.holders} == {
        holder: (row.epoch, row.seq, row.complete) for holder, row in truth.items()
    }
    for known in index.holders:
        assert index.masks.held(known.name) == len(truth[known.id].held)
    assert index.masks.block_holders == sum(len(row.held) for row in truth.values())
    for block in BLOCKS:
        nearest = {holder: min((t for t, b in row.held if b == block), default=None) for holder, row in truth.items()}
        found = {holder: tiers.index(1) for holder, tiers in runs(index, block).items()}
        assert found == {holder: tier for holder, tier in nearest.items() if tier is not None}


writes = st.tuples(
    st.sampled_from([CHANGE] * 8 + [EMPTY, RELOAD, RELOAD, SEAL, SEAL, BEAT, GONE]),
    st.sampled_from("ab"),
    st.frozensets(st.tuples(st.sampled_from([GPU, CPU]), st.sampled_from(BLOCKS)), max_size=4),
    st.booleans(),
)


@given(
    happening=st.lists(st.tuples(writes, st.sampled_from([1, 1, 1, 0, 2]), st.integers(0, 3)), max_size=40),
    last=st.integers(0, 1),
)
def test_the_replica_converges_despite_lost_and_repeated_entries(
    happening: list[tuple[tuple[EntryKind, HolderId, Held, bool], int, int]], last: int
) -> None:
    """A holder that is read again may be ahead of the log. After the next heartbeat, and one TTL after
    the last entry of removed holders, the replica equals the true state."""
    writers = Writers()
    deliveries: list[tuple[int, int]] = []
    for (kind, holder, flipped, complete), times, ahead in happening:
        entries = len(writers.log)
        writers.write(kind, holder, flipped, complete=complete)
        deliveries += [(times, ahead)] * (len(writers.log) - entries)
    for holder in writers.rows:
        writers.write(SEAL, holder, complete=holder == "a")
        deliveries.append((last, 0))
    index = make_index()
    for at, (times, ahead) in enumerate(deliveries):
        truth = writers.truths[min(at + ahead, len(deliveries) - 1)]
        apply_log(index, [writers.log[at]] * times, truth, now_s=0.0)
    later_s = 2 * HOLDER_TTL_S
    beats = [
        entry(BEAT, row.seq, epoch=row.epoch, holder=holder, complete=row.complete)
        for holder, row in writers.rows.items()
    ]
    apply_log(index, beats, writers.rows, later_s)
    index.expire(later_s)
    assert_equal(index, writers.rows)


@given(st.lists(writes, max_size=30))
def test_a_complete_log_never_requires_reading_again(history: list[tuple[EntryKind, HolderId, Held, bool]]) -> None:
    """The replica is exact after each entry, except for holders whose reload is not sealed."""
    writers, index = Writers(), make_index()
    for kind, holder, flipped, complete in history:
        writers.write(kind, holder, flipped, complete=complete)
    for one, truth in zip(writers.log, writers.truths, strict=True):
        assert index.apply(GENERATION, one, 0.0)
        if not any(known.reloading for known in index.holders):
            assert_equal(index, truth)


# --- layers that keep some blocks only ---


def test_a_hit_ends_where_the_rule_of_the_holder_says() -> None:
    index = after(ruled(entry(EMPTY)), entry(CHANGE, 1, adds(1, 2, 3), in_window(2)))
    assert (hit(index, 1, 2, 3), hit(index, 1)) == (2, 0)
    assert index.holders.ruled == {"a"}
    assert apply(index, entry(CHANGE, 2, BlockChange(GPU, False, [2], 1))) == [True]
    assert hit(index, 1, 2, 3) == 0


def test_the_rule_changes_with_the_blocks_at_the_end_of_a_reload() -> None:
    index = after(*STARTED, ruled(entry(RELOAD, epoch=2)), entry(CHANGE, 1, adds(1, 2, 3), in_window(1), epoch=2))
    assert hit(index, 1, 2, 3) == 3
    assert apply(index, entry(SEAL, 2, epoch=2)) == [True]
    assert hit(index, 1, 2, 3) == 1
    assert apply(index, entry(EMPTY, epoch=3), entry(CHANGE, 1, adds(1, 2, 3), epoch=3)) == [True, True]
    assert (hit(index, 1, 2, 3), index.holders.ruled) == (3, set())


def test_a_holder_that_is_read_again_keeps_its_rule() -> None:
    index = make_index()
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, [1, 2, 3])
    index.copy(GENERATION, "a", GPU, [2], 1)
    facts = HolderFacts(url="http://a", rule=RULE)
    index.restore(KnownHolder(id="a", generation=GENERATION, facts=facts, epoch=1, seq=1, last_seen_s=0.0))
    assert hit(index, 1, 2, 3) == 2


@pytest.mark.parametrize(
    "rule",
    [
        msgspec.structs.replace(RULE, types=()),
        msgspec.structs.replace(RULE, types=(WINDOW, FULL)),
        msgspec.structs.replace(RULE, types=(FULL, *([WINDOW] * 4))),
        msgspec.structs.replace(RULE, step_tokens=0),
        msgspec.structs.replace(RULE, unit_tokens=-1),
        HitRule.of([FULL, LayerType(AttentionKind.WINDOW, BLOCK + 1, 5)], groups=2),
        HitRule.of([FULL, LayerType(AttentionKind.WINDOW, 0, 5)], groups=2),
        HitRule.of([FULL, LayerType(AttentionKind.CHUNK, BLOCK, 0)], groups=2),
        HitRule.of([FULL, LayerType(AttentionKind.WINDOW, BLOCK << 60, 5)], groups=2),
        HitRule.of([FULL, LayerType(AttentionKind.WINDOW, BLOCK, 10**400)], groups=2),
    ],
)
def test_a_rule_that_cannot_be_applied_is_ignored(rule: HitRule) -> None:
    """It comes from a client that may write to Redis. Full attention alone remains, an upper bound."""
    index = after(ruled(entry(EMPTY), rule), entry(CHANGE, 1, adds(1, 2, 3), in_window(2)))
    assert hit(index, 1, 2, 3) == 3


def test_layers_that_no_rule_names_take_no_memory() -> None:
    index = after(*STARTED)
    before = index.masks.bytes
    assert apply(index, entry(CHANGE, 2, in_window(1, 2), BlockChange(GPU, True, [1], 3))) == [True]
    assert (index.masks.bytes, hit(index, 1, 2, 3)) == (before, 3)
