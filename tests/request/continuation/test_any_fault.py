"""However often and wherever a stream breaks, the client reads the uncut answer, or one that ends early by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.continuation import stream
from router.request.continuation.answer_words import HALF
from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, Finish, StreamPlan, plan
from router.request.continuation.stream import PodStream, Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.request.continuation.recorded import Case, Received, body_of, case_named, decode, event, words
from tests.request.continuation.recorded_pod import RecordedPod

BY_IDS = ["bytes", "length", "no usage", "stop", "stop included", "stop of many tokens", "stop_token_ids", "think"]
BY_IDS += [
    "think hidden",
    "stop of many tokens, included",
    "sampled",
    "sampled, stop",
    "sampled, thinking",
    "min_tokens",
]
WITH_CALLS = ["tool", "tools, thinking", "sampled, tools"]
BY_REPLAY = ["json schema", "seed", "bad_words", "frequency", "json schema, thinking"]
FAULTS = [
    b"",
    b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\ndata: [DONE]\n\n',
    event({}, t=[], f="abort") + b"data: [DONE]\n\n",
]


def in_pieces(sent: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, place, number = [], 0, 0
    while place < len(sent):
        size = sizes[number % len(sizes)]
        pieces.append(sent[place : place + size])
        place, number = place + size, number + 1
    return pieces


class Broken:
    """One stream through any number of faults."""

    def __init__(self, case: Case, *, holds_calls: bool = False) -> None:
        self.case, self.body, self.received = case, body_of(case), b""
        self.terms = terms_of(Endpoint.CHAT, self.body, holds_calls=holds_calls)
        self.reader: PodStream = Recorder(self.terms, asks_ids=True)
        self.asked = self.body
        self.lives = 0

    def live(self, groups: Sequence[int], sizes: Sequence[int], cut: float, fault: bytes) -> bool:
        """One pod sends a part of its stream and then fails. False where the client has all."""
        head = {"id": f"chatcmpl-{self.lives}", "created": self.lives}
        sent = b"".join(RecordedPod(self.case, groups, **head).stream(self.asked))
        self.lives += 1
        sent = sent[: int(cut * (len(sent) + 1))]
        if fault:
            sent = (sent[: sent.rfind(b"\n\n") + 2] if b"\n\n" in sent else b"") + fault
        before = self.received
        for piece in in_pieces(sent, sizes):
            self.received += self.reader.feed(piece)
        assert self.received.startswith(before)
        assert not self.reader.differs, self.reader.fault
        return not (self.reader.record.is_done or self.reader.is_over)

    def plan(self) -> StreamPlan:
        record = self.reader.current
        if not self.received:  # an ordinary retry
            self.reader, self.asked = Recorder(self.terms, asks_ids=True), self.body
            return Continue(method="retry", body=self.body, prompt=[])
        found = plan(self.terms, record, self.body, words())
        if isinstance(found, Continue):
            kept = record.ids[: found.seam.kept]
            assert found.seam.kept <= len(record.ids) and not decode(kept, True).endswith(HALF)
            self.reader, self.asked = Joiner(self.terms, record, found, words()), found.body
        elif isinstance(found, Finish):
            self.received += found.events
        return found


@cache
def _received_uncut(name: str) -> Any:
    case = case_named(name)
    reader = Recorder(terms_of(Endpoint.CHAT, body_of(case)), asks_ids=True)
    return Received(b"".join(map(reader.feed, RecordedPod(case).stream(body_of(case))))).whole


def received_uncut(case: Case) -> Any:
    return _received_uncut(case["name"])


def play(
    case: Case, lives: Sequence[tuple[Sequence[int], Sequence[int], float, bytes]], *, holds_calls: bool = False
) -> Broken:
    """Let pods fail, one after the other; the last one lives."""
    broken = Broken(case, holds_calls=holds_calls)
    for life in [*lives, ((1,), (10**9,), 1.0, b"")]:
        if not broken.live(*life):
            return broken
        found = broken.plan()
        if isinstance(found, Finish):
            return broken
        if isinstance(found, str):
            assert found, "the event of the error has a name"
            return broken
    raise AssertionError("the last pod has lived")


LIVES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 7), min_size=1, max_size=4),
        st.lists(st.integers(1, 700), min_size=1, max_size=4),
        st.floats(0, 1),
        st.sampled_from(FAULTS),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", [*BY_IDS, *WITH_CALLS[:2], *BY_REPLAY])
@given(LIVES)
def test_joined_stream_is_the_uncut_one(name: str, lives: Any) -> None:
    case = case_named(name)
    assert Received(play(case, lives).received).whole == received_uncut(case)


@given(LIVES)
def test_sampled_calls_are_never_made_twice(lives: Any) -> None:
    case = case_named("sampled, tools")
    broken = play(case, lives)
    got = Received(broken.received)
    if got.is_done:
        assert got.whole == received_uncut(case)
    else:
        assert got.calls


@given(LIVES)
def test_sampled_calls_that_are_held_until_they_are_whole_are_never_lost(lives: Any) -> None:
    case = case_named("sampled, tools")
    broken = play(case, lives, holds_calls=True)
    assert Received(broken.received).whole == received_uncut(case)


def test_no_call_begins_for_the_client_before_all_are_whole() -> None:
    case = case_named("sampled, tools")
    broken = Broken(case, holds_calls=True)
    *events, end, usage, done = RecordedPod(case).stream(broken.body)
    before = b"".join(map(broken.reader.feed, events))
    assert b"tool_calls" not in before and broken.reader.held_bytes > 0
    rest = broken.reader.feed(end)
    assert rest.count(b'"tool_calls":[') > 1 and broken.reader.held_bytes == 0
    received = before + rest + broken.reader.feed(usage) + broken.reader.feed(done)
    assert Received(received).whole == received_uncut(case)


@pytest.mark.parametrize("why", ["too large", "memory", "unreadable"])
def test_calls_are_not_held_without_memory(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_named("sampled, tools")
    broken = Broken(case, holds_calls=True)
    sent = RecordedPod(case).stream(broken.body)
    place = next(number for number, one in enumerate(sent) if b"tool_calls" in one)
    if why == "too large":
        monkeypatch.setattr(stream, "MAX_HELD_BYTES", 500)
    received = b"".join(map(broken.reader.feed, sent[: place + 1]))
    if why == "memory":
        broken.reader.record.forget(why)
    if why == "unreadable":
        received += broken.reader.feed(b"id: 3\ndata: {}\n\n")
        assert b"tool_calls" in received and received.endswith(b"id: 3\ndata: {}\n\n")
        received = received.removesuffix(b"id: 3\ndata: {}\n\n")
    received += b"".join(map(broken.reader.feed, sent[place + 1 : place + 4]))
    assert b"tool_calls" in received and broken.reader.held_bytes == 0
    received += b"".join(map(broken.reader.feed, sent[place + 4 :]))
    assert Received(received).whole == received_uncut(case)


@pytest.mark.parametrize(
    "case", [case_named(name) for name in [*BY_IDS, *WITH_CALLS[:2]]], ids=lambda case: case["name"]
)
def test_every_cut_between_two_events_is_exact(case: Case) -> None:
    expected, events = received_uncut(case), len(RecordedPod(case).stream(body_of(case)))
    for number in range(1, events):
        broken = Broken(case)
        pieces = RecordedPod(case).stream(broken.body)[:number]
        broken.received = b"".join(map(broken.reader.feed, pieces))
        found = broken.plan()
        if not isinstance(found, Finish):
            assert isinstance(found, Continue), (number, found)
            assert not broken.live((1,), (10**9,), 1.0, b"")
        assert Received(broken.received).whole == expected, number


def test_half_a_character_is_not_kept_where_text_is_held_for_a_stop_string() -> None:
    case = case_named("bytes")
    case = {**case, "request": {**case["request"], "stop": ["zzzzz"]}}
    expected, events = received_uncut(case_named("bytes")), len(RecordedPod(case).stream(body_of(case)))
    for number in range(1, events - 2):
        broken = Broken(case)
        broken.received = b"".join(map(broken.reader.feed, RecordedPod(case).stream(broken.body)[:number]))
        assert isinstance(broken.plan(), Continue)
        assert not broken.live((1,), (10**9,), 1.0, b"")
        assert Received(broken.received).whole == expected, number
