"""Publishing the events of stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from router.index.holders import ALL_PODS, HolderFacts, HolderId
from router.publisher.publisher import Publisher, StoreSink
from router.publisher.publisher_app import apply_events
from router.publisher.standard_events import MAX_STREAMS, MalformedEvent, StandardEvent, StandardIntake
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, Generation, KvEvent, Tier

OLD, NEW = Generation(model="demo", revision="1"), Generation(model="demo", revision="2")
HOLDER = "cache/cpu"
STORED = BlocksStored(block_hashes=(71,), parent_hash=None, tokens=(), block_size_tokens=0, tier=Tier.CPU)
REMOVED = BlocksRemoved(block_hashes=(71,), tier=Tier.CPU)


class RecordingPublisher:
    """Stands in for a `Publisher` and records its calls."""

    def __init__(self) -> None:
        self.generations = {"demo": OLD}
        self.calls: list[tuple[Any, ...]] = []
        self.known: set[HolderId] = set()

    def publishes(self, holder_id: HolderId) -> bool:
        return holder_id in self.known

    def begin(self, holder_id: HolderId, generation: Generation, facts: HolderFacts) -> None:
        self.known.add(holder_id)
        self.calls.append(("begin", holder_id, generation, facts))

    def apply(self, holder_id: HolderId, events: Iterable[KvEvent]) -> None:
        self.calls.append(("apply", holder_id, *events))

    def caught_up(self, holder_id: HolderId, *, complete: bool) -> None:
        self.calls.append(("complete" if complete else "incomplete", holder_id))

    def end(self, holder_id: HolderId) -> None:
        self.known.discard(holder_id)
        self.calls.append(("end", holder_id))


def facts_of(holder: str) -> HolderFacts:
    return HolderFacts(reach=ALL_PODS, source=holder)


def sink_to(recorder: RecordingPublisher) -> StoreSink:
    return StoreSink(cast("Publisher", recorder), "demo", facts_of)


def standard_to(recorder: RecordingPublisher) -> StandardIntake:
    """An intake with one backend, `cache`."""
    standard = StandardIntake()
    standard.add("cache", sink_to(recorder))
    return standard


def event(
    event_id: int, what: KvEvent = STORED, holder: str = HOLDER, model: str = "demo", backend: str = "cache"
) -> StandardEvent:
    return StandardEvent(holder=holder, event=what, event_id=event_id, model=model, backend=backend)


def begun(holder: str = HOLDER, generation: Generation = OLD) -> tuple[Any, ...]:
    return "begin", holder, generation, facts_of(holder)


def applied(holder: str = HOLDER, what: KvEvent = STORED) -> tuple[Any, ...]:
    return "apply", holder, what


# --- any store ---


def test_the_first_call_for_a_store_adds_it() -> None:
    """Events or state; once."""
    recorder = RecordingPublisher()
    sink = sink_to(recorder)
    sink.apply("one", (STORED, REMOVED))
    sink.stream_state("two", complete=False)
    sink.apply("two", (STORED,))
    assert recorder.calls == [
        begun("one"),
        ("apply", "one", STORED, REMOVED),
        begun("two"),
        ("incomplete", "two"),
        applied("two"),
    ]


def test_a_restarted_store_uses_the_current_generation() -> None:
    recorder = RecordingPublisher()
    sink = sink_to(recorder)
    sink.restarted(HOLDER)
    recorder.generations["demo"] = NEW
    sink.restarted(HOLDER)
    assert recorder.calls == [begun(), begun(generation=NEW)]


def test_a_removed_store_can_return() -> None:
    recorder = RecordingPublisher()
    sink = sink_to(recorder)
    sink.apply(HOLDER, (STORED,))
    sink.gone(HOLDER)
    sink.apply(HOLDER, (STORED,))
    assert recorder.calls == [begun(), applied(), ("end", HOLDER), begun(), applied()]


# --- standardised events ---


def test_events_in_order_are_published() -> None:
    """From any first id."""
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    assert [standard.apply(event(7)), standard.apply(event(8, REMOVED))] == [True, True]
    assert recorder.calls == [begun(), ("complete", HOLDER), applied(), applied(what=REMOVED)]


def test_repeated_events_are_ignored() -> None:
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    taken = [standard.apply(event(event_id)) for event_id in (7, 8, 8, 7, 3, 9)]
    assert taken == [True, True, False, False, False, True]
    assert recorder.calls == [begun(), ("complete", HOLDER), applied(), applied(), applied()]


def test_a_gap_marks_the_holder_incomplete() -> None:
    """The event after the gap is applied; late events are ignored."""
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    assert [standard.apply(event(event_id)) for event_id in (1, 4, 5, 2)] == [True, True, True, False]
    assert recorder.calls == [begun(), ("complete", HOLDER), applied(), ("incomplete", HOLDER), applied(), applied()]


@pytest.mark.parametrize(("event_id", "lost"), [(2, []), (9, [("incomplete", HOLDER)])])
def test_a_cleared_stream_is_empty_and_complete(event_id: int, lost: list[tuple[Any, ...]]) -> None:
    """Event ids continue."""
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    standard.apply(event(1))
    recorder.calls.clear()
    assert standard.apply(event(event_id, BlocksCleared()))
    assert recorder.calls == [*lost, begun(), ("complete", HOLDER)]
    assert not standard.apply(event(event_id))


def test_event_ids_count_per_holder() -> None:
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    assert [standard.apply(event(5, holder=holder)) for holder in ("cache/cpu", "cache/disk")] == [True, True]
    assert standard.apply(event(6, holder="cache/cpu")) and standard.apply(event(6, holder="cache/disk"))
    assert [word for word, *_ in recorder.calls] == ["begin", "complete", "apply"] * 2 + ["apply"] * 2


def test_each_backend_has_its_own_sink() -> None:
    cache, other = RecordingPublisher(), RecordingPublisher()
    standard = standard_to(cache)
    standard.add("other", sink_to(other))
    standard.apply(event(1, holder="other/cpu", backend="other"))
    assert cache.calls == [] and other.calls == [begun("other/cpu"), ("complete", "other/cpu"), applied("other/cpu")]


def test_the_model_name_is_optional() -> None:
    assert standard_to(RecordingPublisher()).apply(event(1, model=""))


@pytest.mark.parametrize(
    ("wrong", "field", "said"),
    [
        ({"backend": "unheard-of"}, "backend_id", ["'unheard-of'", "known: cache"]),
        ({"model": "other"}, "model_name", ["'other'", "'demo'"]),
    ],
)
def test_events_of_unknown_backends_and_models_are_rejected(wrong: dict[str, str], field: str, said: list[str]) -> None:
    """With the field and the known values; the event id is not recorded."""
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    with pytest.raises(MalformedEvent) as refused:
        standard.apply(event(1, **wrong))  # type: ignore[arg-type]
    assert refused.value.field == field
    assert all(part in str(refused.value) for part in said)
    assert recorder.calls == [] and standard.apply(event(1))


def test_without_backends_every_event_is_rejected() -> None:
    with pytest.raises(MalformedEvent, match="known: none"):
        StandardIntake().apply(event(1))


def test_streams_that_senders_make_up_are_bounded() -> None:
    """Each would be a holder with a task and metrics of its own, until the publisher ends."""
    recorder = RecordingPublisher()
    standard = standard_to(recorder)
    for number in range(MAX_STREAMS):
        standard.apply(StandardEvent(holder=f"cache/{number}", event=STORED, event_id=1, model="", backend="cache"))
    with pytest.raises(MalformedEvent, match="streams"):
        standard.apply(StandardEvent(holder="cache/new", event=STORED, event_id=1, model="", backend="cache"))
    assert standard.apply(StandardEvent(holder="cache/0", event=STORED, event_id=2, model="", backend="cache"))
    assert len(recorder.known) == MAX_STREAMS


@pytest.mark.anyio
async def test_events_of_a_large_body_are_published_in_turns() -> None:
    """Meanwhile the holders stay alive, and the publisher answers others."""
    lines = b"\n".join(
        b'{"event_type":"removed","event_id":%d,"backend_id":"cache","medium":"cpu","seq_hashes":[1]}' % number
        for number in range(5000)
    )
    applying, turns = asyncio.ensure_future(apply_events(standard_to(RecordingPublisher()), lines)), 0
    while not applying.done():
        await asyncio.sleep(0)
        turns += 1
    assert applying.result() == {"applied": 5000, "known": 0}
    assert turns > 100


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body", [b"[" + b"1," * 300_000 + b"1]", b'{"x":"' + b"x" * 5_000_000 + b'"}'], ids=["items", "bytes"]
)
async def test_events_that_take_long_to_decode_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedEvent, match="at most"):
        await apply_events(standard_to(RecordingPublisher()), body)
