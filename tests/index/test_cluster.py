"""What a router makes of the log, against what publishers have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.holders import HolderFacts, HolderId, KnownHolder, holder_name
from router.types import BlockChange, BlockHash, BlocksByTier, Generation, Pod, PodSpeed, PromptPrefix, Tier

GENERATION = Generation(model="m")
LIFETIME_S = 10.0
GPU, CPU = Tier.GPU, Tier.CPU
EMPTY, RELOAD, CHANGE, SEAL, BEAT, GONE = EntryKind


def came(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, True, blocks)


def went(*blocks: BlockHash, tier: Tier = GPU) -> BlockChange:
    return BlockChange(tier, False, blocks)


def entry(
    kind: EntryKind, seq: int = 0, *changes: BlockChange, epoch: int = 1, holder: HolderId = "a", complete: bool = True
) -> LogEntry:
    """One entry about a holder that is the pod of the same name."""
    facts = HolderFacts(url=f"http://{holder}") if kind in (EMPTY, RELOAD) else None
    return LogEntry(kind=kind, holder=holder, epoch=epoch, seq=seq, complete=complete, facts=facts, changes=changes)


def make_index() -> ClusterIndex:
    """Of two pods, `a` and `b`."""
    index = ClusterIndex(lifetime_s=LIFETIME_S)
    for pod_id in "ab":
        index.holders.bind(
            Pod(id=pod_id, url=f"http://{pod_id}", engine="vllm", speed=PodSpeed(1.0, 0.1, 0.0)), GENERATION
        )
    return index


def take(index: ClusterIndex, *entries: LogEntry, now_s: float = 0.0) -> list[bool]:
    return [index.apply(GENERATION, one, now_s) for one in entries]


def after(*entries: LogEntry) -> ClusterIndex:
    """The index when it took all of these over."""
    index = make_index()
    assert take(index, *entries) == [True] * len(entries)
    return index


def get(index: ClusterIndex, holder: HolderId = "a") -> KnownHolder:
    found = index.holders.get(holder_name(GENERATION, holder))
    assert found is not None
    return found


def runs(index: ClusterIndex, *blocks: BlockHash) -> dict[str, BlocksByTier]:
    return index.match(PromptPrefix(GENERATION, (), blocks))


def copied(index: ClusterIndex, *blocks: BlockHash, epoch: int = 1, seq: int = 0) -> KnownHolder:
    """Read `a` anew, all of it on the GPU."""
    known = KnownHolder(
        id="a", generation=GENERATION, facts=HolderFacts(url="http://a"), epoch=epoch, seq=seq, last_seen_s=0.0
    )
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, blocks)
    index.restore(known)
    return known


STARTED = entry(EMPTY), entry(CHANGE, 1, came(1, 2, 3))


# --- changes in order ---


def test_changes_that_follow_on_each_other_are_taken_over() -> None:
    """What comes, what goes, and in which tier."""
    index = after(*STARTED, entry(CHANGE, 2, came(2, tier=CPU), went(2)), entry(CHANGE, 3, came(4)))
    assert runs(index, 1, 2, 3, 4) == {"a": (3, 1, 0, 0)}
    assert index.held(get(index)) == index.block_holders == 4
    assert (get(index).seq, get(index).complete) == (3, True)


def test_holders_count_for_themselves() -> None:
    """Neither their numbers nor their blocks are one another's."""
    index = after(*STARTED, entry(EMPTY, holder="b"), entry(CHANGE, 1, came(1), holder="b"))
    assert runs(index, 1, 2) == {"a": (2, 0, 0, 0), "b": (1, 0, 0, 0)}


def test_a_change_that_was_heard_before_changes_nothing() -> None:
    """Its blocks may have gone meanwhile."""
    index = after(*STARTED, entry(CHANGE, 2, went(3)), STARTED[1], STARTED[0])
    assert (runs(index, 1, 2, 3), get(index).seq) == ({"a": (2, 0, 0, 0)}, 2)


def test_after_a_gap_the_holder_must_be_read_anew() -> None:
    """The change is not taken over, nor is the holder heard of: it stays as it was."""
    index = after(*STARTED)
    assert take(index, entry(CHANGE, 3, came(4)), now_s=5.0) == [False]
    assert (runs(index, 1, 2, 3, 4), get(index).seq, get(index).last_seen_s) == ({"a": (3, 0, 0, 0)}, 1, 0.0)


def test_a_beat_tells_of_changes_that_were_lost() -> None:
    """It repeats the number of the last change; one behind it is merely late."""
    index = after(*STARTED, entry(BEAT, 1), entry(BEAT, 0))
    assert take(index, entry(BEAT, 2)) == [False]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)}


@pytest.mark.parametrize("kind, seq", [(CHANGE, 1), (SEAL, 1), (BEAT, 0)])
def test_an_unknown_holder_must_be_read_anew(kind: EntryKind, seq: int) -> None:
    """Its beginning was not heard."""
    index = make_index()
    assert take(index, entry(kind, seq)) == [False]
    assert list(index.holders) == []


def test_whether_a_holder_is_complete_comes_with_every_entry() -> None:
    """From its beginning on."""
    index = after(entry(EMPTY, complete=False))
    told = [get(index).complete]
    for one in (entry(CHANGE, 1), entry(BEAT, 1, complete=False), entry(BEAT, 1)):
        assert take(index, one) == [True]
        told.append(get(index).complete)
    assert told == [False, True, False, True]


# --- epochs ---


@pytest.mark.parametrize("late", [CHANGE, SEAL, BEAT, EMPTY, RELOAD, GONE])
def test_an_older_epoch_is_ignored(late: EntryKind) -> None:
    """Somebody who was fenced off and does not know it yet; whatever the number."""
    index = after(entry(EMPTY, epoch=5), entry(CHANGE, 1, came(1), epoch=5))
    assert take(index, entry(late, 2, went(1), came(9), epoch=4, complete=False), now_s=5.0) == [True]
    assert (runs(index, 1), runs(index, 9)) == ({"a": (1, 0, 0, 0)}, {})
    assert (get(index).epoch, get(index).seq, get(index).complete, get(index).last_seen_s) == (5, 1, True, 0.0)


@pytest.mark.parametrize("kind", [CHANGE, SEAL, BEAT])
def test_a_newer_epoch_whose_beginning_was_lost_must_be_read_anew(kind: EntryKind) -> None:
    """What is known of the old one stays until then."""
    index = after(*STARTED)
    assert take(index, entry(kind, 2, came(4), epoch=2)) == [False]
    assert (runs(index, 1, 2, 3, 4), get(index).epoch) == ({"a": (3, 0, 0, 0)}, 1)


def test_an_empty_epoch_drops_everything_at_once() -> None:
    """The holder has lost its cache; numbers begin anew."""
    index = after(*STARTED, entry(EMPTY, epoch=2))
    assert (runs(index, 1), index.block_holders) == ({}, 0)
    assert take(index, entry(CHANGE, 1, came(2), epoch=2)) == [True]
    assert (runs(index, 1), runs(index, 2)) == ({}, {"a": (1, 0, 0, 0)})


def test_a_reload_keeps_the_old_until_it_is_sealed() -> None:
    """What is merely written again stays readable; with the seal, only what was written counts."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, came(1, 4), epoch=2))
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 4) == {}
    assert get(index).reloading
    assert take(index, entry(SEAL, 2, came(2), epoch=2)) == [True]
    assert runs(index, 1, 2, 3) == {"a": (2, 0, 0, 0)} and runs(index, 4) == {"a": (1, 0, 0, 0)}
    assert not get(index).reloading and index.block_holders == 3


def test_after_the_seal_changes_count_at_once() -> None:
    """A seal that is heard again changes nothing."""
    index = after(entry(RELOAD), entry(CHANGE, 1, came(1)), entry(SEAL, 2), entry(CHANGE, 3, came(2)), entry(SEAL, 2))
    assert runs(index, 1, 2) == {"a": (2, 0, 0, 0)}


def test_a_reload_that_begins_again_forgets_what_was_gathered() -> None:
    """The old stays even then."""
    index = after(
        *STARTED,
        entry(RELOAD, epoch=2),
        entry(CHANGE, 1, came(8), epoch=2),
        entry(RELOAD, epoch=3),
        entry(CHANGE, 1, came(9), epoch=3),
    )
    assert (runs(index, 1), runs(index, 8), runs(index, 9)) == ({"a": (1, 0, 0, 0)}, {}, {})
    assert take(index, entry(SEAL, 2, epoch=3)) == [True]
    assert (runs(index, 1), runs(index, 8), runs(index, 9)) == ({}, {}, {"a": (1, 0, 0, 0)})


def test_an_empty_epoch_ends_a_reload() -> None:
    """Neither the old nor what was gathered is left."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, came(8), epoch=2), entry(EMPTY, epoch=3))
    assert (index.block_holders, get(index).reloading) == (0, False)


def test_a_beginning_that_does_not_say_who_it_is_must_be_read() -> None:
    """Nothing is known of the holder then."""
    index = make_index()
    assert take(index, replace(entry(EMPTY), facts=None)) == [False]
    assert list(index.holders) == []


# --- who is no longer there ---


def test_who_is_gone_has_nothing() -> None:
    """Neither what was known nor what was being gathered; others stay."""
    index = after(
        *STARTED,
        entry(RELOAD, epoch=2),
        entry(CHANGE, 1, came(8), epoch=2),
        entry(EMPTY, holder="b"),
        entry(CHANGE, 1, came(1), holder="b"),
        entry(GONE, epoch=2),
        entry(GONE, epoch=2),
    )
    assert ([known.id for known in index.holders], index.block_holders) == (["b"], 1)
    assert runs(index, 1) == {"b": (1, 0, 0, 0)}


def test_who_is_silent_for_longer_than_a_lifetime_expires() -> None:
    """Changes and heartbeats are signs of life, even those that were heard before."""
    index = after(*STARTED, entry(EMPTY, holder="b"))
    take(index, entry(BEAT, 0, holder="b"), now_s=1.0)
    assert index.expire(LIFETIME_S) == []
    assert [known.id for known in index.expire(LIFETIME_S + 0.5)] == ["a"]
    assert ([known.id for known in index.holders], index.block_holders) == (["b"], 0)
    assert [known.id for known in index.expire(LIFETIME_S + 1.5)] == ["b"]


def test_when_nobody_could_be_heard_lifetimes_begin_anew() -> None:
    """The silence was not theirs."""
    index = after(*STARTED, entry(EMPTY, holder="b"))
    index.reset_expiry(100.0)
    assert index.expire(100.0 + LIFETIME_S) == []
    assert len(index.expire(100.5 + LIFETIME_S)) == 2


# --- reading anew ---


def test_what_is_known_stays_while_it_is_read_anew() -> None:
    """With the last piece the copy takes its place, at once; pieces may repeat blocks."""
    index = after(*STARTED)
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, [1, 9])
    index.copy(GENERATION, "a", GPU, [9])
    index.copy(GENERATION, "a", CPU, [1])
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 9) == {}
    index.restore(replace(get(index), epoch=4, seq=7))
    assert runs(index, 1, 2, 3) == {"a": (1, 0, 0, 0)} and runs(index, 9) == {"a": (1, 0, 0, 0)}
    assert index.held(get(index)) == index.block_holders == 3


def test_a_copy_goes_on_where_it_was_read() -> None:
    """What it has seen already is passed over, what follows is taken."""
    index = make_index()
    copied(index, 1, 2, epoch=3, seq=7)
    assert take(index, entry(CHANGE, 7, went(2), epoch=3), entry(CHANGE, 8, came(3), epoch=3)) == [True, True]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)}
    assert take(index, entry(CHANGE, 10, epoch=3)) == [False]


def test_a_copy_that_was_begun_again_has_nothing_of_the_first() -> None:
    """Redis may fail in the middle of one."""
    index = make_index()
    index.begin_copy(GENERATION, "a")
    index.copy(GENERATION, "a", GPU, [8])
    copied(index, 1)
    assert (runs(index, 8), runs(index, 1)) == ({}, {"a": (1, 0, 0, 0)})


def test_a_copy_of_an_empty_holder_is_empty() -> None:
    """Though nothing of it was ever copied."""
    index = after(*STARTED)
    known = copied(index, seq=5)
    assert (get(index), runs(index, 1), index.block_holders) == (known, {}, 0)


def test_a_copy_that_was_read_during_a_reload_counts_as_it_is() -> None:
    """What is written again from then on adds to it, and the seal takes nothing away."""
    index = after(*STARTED, entry(RELOAD, epoch=2), entry(CHANGE, 1, came(8), epoch=2))
    copied(index, 1, 2, epoch=2, seq=3)
    assert take(index, entry(CHANGE, 4, came(3), epoch=2), entry(SEAL, 5, epoch=2)) == [True, True]
    assert runs(index, 1, 2, 3) == {"a": (3, 0, 0, 0)} and runs(index, 8) == {}


# --- any history, heard badly ---

BLOCKS = range(1, 6)
Held = frozenset[tuple[Tier, BlockHash]]


@dataclass(frozen=True, slots=True)
class Row:
    """What is true of one holder."""

    epoch: int
    seq: int
    complete: bool
    held: Held


Truth = dict[HolderId, Row]


@dataclass(slots=True)
class Writers:
    """Publishers, the log they write, and what was true after each entry."""

    rows: Truth = field(default_factory=dict)
    log: list[LogEntry] = field(default_factory=list)
    truths: list[Truth] = field(default_factory=list)
    epoch: int = 0

    def write(self, kind: EntryKind, holder: HolderId, flipped: Held = frozenset(), *, complete: bool = True) -> None:
        """One entry, in which `flipped` comes if it is not held and goes if it is."""
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


def read_anew(index: ClusterIndex, holder: HolderId, truth: Truth, now_s: float) -> None:
    """As the feed does it."""
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


def hear(index: ClusterIndex, entries: Iterable[LogEntry], truth: Truth, now_s: float) -> None:
    """Take entries over; whoever does not follow is read as `truth` has it."""
    for one in entries:
        if not index.apply(GENERATION, one, now_s):
            read_anew(index, one.holder, truth, now_s)


def assert_equal(index: ClusterIndex, truth: Truth) -> None:
    assert {known.id: (known.epoch, known.seq, known.complete) for known in index.holders} == {
        holder: (row.epoch, row.seq, row.complete) for holder, row in truth.items()
    }
    for known in index.holders:
        assert index.held(known) == len(truth[known.id].held)
    assert index.block_holders == sum(len(row.held) for row in truth.values())
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


@settings(max_examples=150, deadline=None)
@given(
    happening=st.lists(st.tuples(writes, st.sampled_from([1, 1, 1, 0, 2]), st.integers(0, 3)), max_size=40),
    last=st.integers(0, 1),
)
def test_whatever_is_lost_or_repeated_the_copy_is_the_truth(
    happening: list[tuple[tuple[EntryKind, HolderId, Held, bool], int, int]], last: int
) -> None:
    """Entries come in order, each any number of times; a holder that is read anew is read as it is by then, which may
    be ahead of the log. With the next heartbeat, and a lifetime after the last one of who is gone, all is right."""
    writers = Writers()
    heard: list[tuple[int, int]] = []
    for (kind, holder, flipped, complete), times, ahead in happening:
        entries = len(writers.log)
        writers.write(kind, holder, flipped, complete=complete)
        heard += [(times, ahead)] * (len(writers.log) - entries)
    for holder in writers.rows:
        writers.write(SEAL, holder, complete=holder == "a")
        heard.append((last, 0))
    index = make_index()
    for at, (times, ahead) in enumerate(heard):
        truth = writers.truths[min(at + ahead, len(heard) - 1)]
        hear(index, [writers.log[at]] * times, truth, now_s=0.0)
    later_s = 2 * LIFETIME_S
    beats = [
        entry(BEAT, row.seq, epoch=row.epoch, holder=holder, complete=row.complete)
        for holder, row in writers.rows.items()
    ]
    hear(index, beats, writers.rows, later_s)
    index.expire(later_s)
    assert_equal(index, writers.rows)


@settings(max_examples=80, deadline=None)
@given(st.lists(writes, max_size=30))
def test_a_log_that_is_heard_in_full_is_never_read_anew(history: list[tuple[EntryKind, HolderId, Held, bool]]) -> None:
    """The copy is the truth after every entry, but for holders whose reload is not sealed: those keep the old."""
    writers, index = Writers(), make_index()
    for kind, holder, flipped, complete in history:
        writers.write(kind, holder, flipped, complete=complete)
    for one, truth in zip(writers.log, writers.truths, strict=True):
        assert index.apply(GENERATION, one, 0.0)
        if not any(known.reloading for known in index.holders):
            assert_equal(index, truth)
