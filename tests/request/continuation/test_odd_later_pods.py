"""Later pods that write a stream in ways of their own: the client loses nothing, and no stream ends without need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, plan
from router.request.continuation.stream import PodStream, Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.request.continuation.recorded import DONE, Received, body_of, case_named, event, words
from tests.request.continuation.recorded_pod import RecordedPod

GREEDY = b'{"model":"tiny","stream":true,"temperature":0,"messages":[]}'
ROLE = event({"role": "assistant", "content": ""})
NO_NEXT_CALL = [{"index": 7, "function": {"arguments": "{}"}}]


def joined(body: bytes, pods: Sequence[Sequence[bytes]], *, asks_ids: bool = False) -> tuple[Received, PodStream]:
    """What the client reads of these streams, each of which goes on where the last one broke."""
    terms, known = terms_of(Endpoint.CHAT, body), words() if asks_ids else None
    reader: PodStream = Recorder(terms, asks_ids=asks_ids)
    received = b"".join(map(reader.feed, pods[0]))
    for sent in pods[1:]:
        found = plan(terms, reader.current, body, known)
        assert isinstance(found, Continue)
        reader = Joiner(terms, reader.current, found, known)
        received += b"".join(map(reader.feed, sent))
    return Received(received), reader


def said(*deltas: Any) -> list[bytes]:
    return [ROLE, *map(event, deltas)]


def test_empty_texts_in_front_of_the_seam_are_no_difference() -> None:
    texts = [{"content": text} for text in ("a", "", "😀", "", "b")]
    received, reader = joined(GREEDY, [said(*texts[:3]), [*said(*texts), event({}, f="stop"), DONE]])
    assert not reader.fault
    assert received.texts == {"content": "a😀b"} and received.is_done and received.roles == 1


def test_empty_texts_behind_the_calls_that_the_client_has_are_no_difference() -> None:
    call = [{"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]
    later = said({"tool_calls": [{**call[0], "function": {"name": "f"}}]}, {"content": ""})
    later += said({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "é"}'}}]})[1:]
    received, reader = joined(GREEDY, [said({"tool_calls": call}), [*later, event({}, f="tool_calls"), DONE]])
    assert not reader.fault
    assert received.calls == {0: {"ids": ["x"], "name": "f", "arguments": '{"a": "é"}'}}


def test_pieces_of_calls_without_a_number_are_those_of_the_first_call() -> None:
    call: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    again = {**call, "function": {"name": "f", "arguments": '{"a": 1}'}}
    numbered = {**call, "index": 0}
    end = [event({}, f="tool_calls"), DONE]
    received, reader = joined(GREEDY, [said({"tool_calls": [numbered]}), [*said({"tool_calls": [again]}), *end]])
    assert not reader.fault
    assert received.calls == {0: {"ids": ["x"], "name": "f", "arguments": '{"a": 1}'}}


def test_text_of_an_event_that_cannot_be_read_comes_from_the_third_pod() -> None:
    broken = [*said({"content": "a"}, {"content": "b"}), event({"content": "c", "tool_calls": NO_NEXT_CALL})]
    whole = [*said({"content": "a"}, {"content": "b"}, {"content": "c"}), event({}, f="stop"), DONE]
    received, reader = joined(GREEDY, [said({"content": "a"}), broken, whole])
    assert not reader.fault
    assert received.texts == {"content": "abc"}


def test_hidden_reasoning_with_an_event_that_cannot_be_read_loses_no_text() -> None:
    body = GREEDY[:-1] + b',"include_reasoning":false}'
    broken = [*said({"content": "a"}), event({"content": "b", "tool_calls": NO_NEXT_CALL})]
    whole = [*said({"content": "a"}, {"content": "b"}), event({}, f="stop"), DONE]
    received, reader = joined(body, [broken, whole], asks_ids=True)
    assert not reader.fault
    assert received.texts == {"content": "ab"}


def test_text_that_was_held_at_the_seam_is_not_lost_with_an_event_that_cannot_be_read() -> None:
    case = case_named("stop of many tokens")
    body = body_of(case)
    terms, pod = terms_of(Endpoint.CHAT, body), RecordedPod(case)
    uncut = Received(b"".join(map(Recorder(terms, asks_ids=True).feed, pod.stream(body))))
    reader: PodStream = Recorder(terms, asks_ids=True)
    received = b"".join(map(reader.feed, pod.stream(body)[:5]))
    for is_broken in (True, False):
        found = plan(terms, reader.current, body, words())
        assert isinstance(found, Continue) and found.seam.held
        sent = pod.stream(found.body)
        if is_broken:
            sent = [sent[0], event({"content": "x", "tool_calls": NO_NEXT_CALL}, t=[])]
        reader = Joiner(terms, reader.current, found, words())
        received += b"".join(map(reader.feed, sent))
    assert Received(received).texts == uncut.texts
