"""A healthy stream passes, however it is written: where the router cannot read it, it is not continued."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.continuation.kept_stream import StreamState
from router.request.continuation.stream import Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.kit.cores import EVENT_HEADERS
from tests.request.continuation.recorded import Received, body_of, case_named, event
from tests.request.continuation.recorded_pod import RecordedPod
from tests.request.continuation.test_any_fault import in_pieces
from tests.request.continuation.test_kept_stream import Fleet, uncut, whole

CASE = case_named("bytes")
SENT = b"".join(RecordedPod(CASE).stream(body_of(CASE)))
ROLE = event({"role": "assistant", "content": ""}, given=CASE["prompt_ids"])
MANY = [["a", -1.0, list(range(1000))]] * 6
"""Log probabilities with more items than are read of one event."""


def recorder(**fields: object) -> Recorder:
    return Recorder(terms_of(Endpoint.CHAT, body_of({**CASE, "request": {**CASE["request"], **fields}})), asks_ids=True)


def fed(reader: Recorder, sent: bytes, size: int = 10**9) -> bytes:
    received = b"".join(map(reader.feed, in_pieces(sent, [size])))
    reader.end()
    assert not reader.fault
    return received


def test_event_with_too_many_log_probabilities_passes_and_its_stream_is_whole() -> None:
    reader = recorder()
    last = event({}, t=[7], f="stop", l=MANY) + event(u={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})
    received = Received(fed(reader, ROLE + event({"content": "a"}, t=[1], l=MANY) + last + b"data: [DONE]\n\n"))
    assert received.logprobs == ["a"] * 12
    assert received.is_done and received.texts == {"content": "a"}
    assert reader.record.forgotten == "unreadable"


def test_stream_with_an_unreadable_event_is_not_continued() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5, event({"content": "a"}, t=[1], l=MANY))
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted == [("none", "connection", "unreadable")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(
    "rewritten",
    [
        lambda sent: sent.replace(b"data: ", b"data:"),
        lambda sent: sent.replace(b"\n", b"\r\n"),
        lambda sent: sent.replace(b"data: ", b"data:").replace(b"\n", b"\r\n"),
    ],
    ids=["without a space", "CRLF", "both"],
)
def test_other_ways_to_write_events_are_read(rewritten: Callable[[bytes], bytes], size: int) -> None:
    plain, reader = recorder(), recorder()
    expected = Received(fed(plain, SENT))
    received = fed(reader, rewritten(SENT), size).replace(b"data:{", b"data: {").replace(b"data:[", b"data: [")
    assert Received(received).whole == expected.whole
    assert reader.record == plain.record


@pytest.mark.parametrize("field", [b"event: message\n", b"id: 3\n", b": a comment\n"])
def test_events_with_other_fields_pass_without_ids(field: bytes) -> None:
    reader = recorder()
    received = fed(reader, SENT.replace(b"data: ", field + b"data: "))
    assert received.count(field) == SENT.count(b"data: ")
    assert b'ids":[' not in received
    assert reader.record.forgotten == "unreadable"


def test_pings_are_passed_and_change_nothing() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5, b": ping\n\n")
    assert fleet.received.endswith(b": ping\n\n")
    assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received.replace(b": ping\n\n", b"")) == uncut("bytes")


def test_hidden_reasoning_of_an_unreadable_event_stays_hidden() -> None:
    reader = recorder(include_reasoning=False)
    received = reader.feed(ROLE + event({"reasoning": "secret," * 6000}, t=[1]))
    assert b"secret" not in received
    assert reader.fault == "unreadable event"


def test_unreadable_answer_of_a_later_pod_ends_the_stream() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5)
    assert fleet.fail()
    fleet.tracker.head("b", 200, EVENT_HEADERS, 0.0)
    assert fleet.tracker.piece(b"event: message\ndata: {}\n\n", 0.0) == b""
    assert fleet.stream.state is StreamState.ENDED
    assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")


@pytest.mark.parametrize(
    "choices",
    [
        b"{}," * 6000 + b"{}",
        b'{"token_ids":[' + b"1," * 6000 + b"1]}",
        b'{"delta":{"content":"' + b"a" * (1 << 20) + b'"}}',
    ],
    ids=["choices", "ids", "text"],
)
@pytest.mark.parametrize("prompt", [b"", b'"prompt_token_ids":[1,2],'])
def test_the_first_event_has_no_more_than_others(choices: bytes, prompt: bytes) -> None:
    """Next to the ids of the prompt, of which there may be a million."""
    reader = recorder()
    reader.feed(b'data: {"id":"a",%b"choices":[%b]}\n\n' % (prompt, choices))
    assert reader.record.forgotten == "unreadable"


@pytest.mark.parametrize("ids", [b"12345," * 170_000 + b"1", b""])
def test_a_long_prompt_is_remembered(ids: bytes) -> None:
    reader = recorder()
    reader.feed(b'data: {"id":"a","prompt_token_ids":[%b],"choices":[{"index":0,"delta":{"role":"a"}}]}\n\n' % ids)
    assert reader.record.prompt == b"[%b]" % ids and not reader.record.forgotten


TEXTS = st.lists(
    st.tuples(
        st.sampled_from(["content", "content", "reasoning", ""]),
        st.text(max_size=4) | st.sampled_from(['"', "\\", '"}', "\n\n", '","token_ids":[7]', "😀", "null"]),
        st.lists(st.integers(0, 2**32 - 1), max_size=3),
    ),
    max_size=30,
)


@given(TEXTS, st.integers(1, 600), st.integers(0, 3))
def test_texts_and_ids_are_remembered_as_they_were_sent(
    pieces: list[tuple[str, str, list[int]]], size: int, together: int
) -> None:
    """`together`: events that come in one piece; 0 where pieces are cut anywhere."""
    reader = recorder()
    sent, shown = [ROLE], [event({"role": "assistant", "content": ""})]
    for field, text, ids in pieces:
        sent.append(event({field: text} if field else {}, t=ids))
        shown.append(event({field: text}, t=None) if field else b"")
    groups = [b"".join(sent[at : at + together]) for at in range(0, len(sent), together or len(sent))]
    assert b"".join(map(reader.feed, groups if together else in_pieces(b"".join(sent), [size]))) == b"".join(shown)
    said = {name: "".join(text for field, text, _ in pieces if field == name) for name in ("content", "reasoning")}
    record = reader.current
    assert (record.content.decode(), record.reasoning.decode()) == (said["content"], said["reasoning"])
    assert list(record.ids) == [one for _, _, ids in pieces for one in ids]


@pytest.mark.parametrize(
    "unread", [b'"content":"\\q"', b'"content":"a\\"', b"[1,x]", b"[1[2]", b"[-1]", b"[4294967296]"]
)
def test_text_or_ids_that_turn_out_to_be_unreadable_end_the_recording_and_nothing_is_sent_twice(unread: bytes) -> None:
    plain = event({"content": "a"}, t=[1])
    changed = plain.replace(b'"content":"a"' if unread.startswith(b'"') else b"[1]", unread)
    fleet = Fleet("bytes")
    fleet.answer(0.5, plain + plain + changed + plain)
    assert fleet.received.endswith(event({"content": "a"}, t=None))
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted == [("none", "connection", "unreadable")]
