"""Recording and continuing a stream is bounded work, for any pod and answer. CPU times: `tests/bench/cpu_bounds.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any, cast

import pytest

from router.decision import Candidate
from router.errors import UpstreamBroken
from router.prompt.tokenizer import Tokenizer
from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.joiner import Joiner, StopWatch
from router.request.continuation.plan import Continue
from router.request.continuation.stream import Record, Recorder
from router.request.continuation.stream_events import MAX_REMEMBERED_BYTES
from router.request.continuation.terms import MAX_STOP_CHARACTERS, terms_of
from router.request.effects import Downstream
from router.request.tracker import Tracker
from router.types import Endpoint
from tests.request.continuation.test_kept_stream import Fleet, uncut, whole

TERMS = terms_of(Endpoint.CHAT, b'{"messages":[],"stream":true}')
PIECE_BYTES = 64 * 1024
ANSWER = b'"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


def first_event(ids: int) -> bytes:
    return b'data: {"id":"a","prompt_token_ids":[%b1],%b' % (b"123456," * (ids - 1), ANSWER)


def feeds(reader: Recorder | Joiner, sent: bytes) -> list[Callable[[], object]]:
    pieces = [sent[begin : begin + PIECE_BYTES] for begin in range(0, len(sent), PIECE_BYTES)]
    return [lambda piece=piece: reader.feed(piece) for piece in pieces]  # type: ignore[misc]


def test_a_prompt_that_is_too_long_is_forgotten() -> None:
    reader = Recorder(TERMS, asks_ids=True)
    for feed in feeds(reader, first_event(1_000_000)):
        feed()
    assert reader.has_begun and not reader.fault
    assert reader.record.forgotten == "too long" and reader.record.prompt == b""


def test_a_long_prompt_is_remembered_and_continued() -> None:
    reader = Recorder(TERMS, asks_ids=True)
    ids = b"123456," * 139_999 + b"1"
    found = Continue(method="ids", body=b"", prompt=[123456] * 139_999 + [1], sent=b"[%b]" % ids)
    joiner = Joiner(TERMS, Record(), found, None)
    for each in (reader, joiner):
        for feed in feeds(each, first_event(140_000)):
            feed()
    assert reader.record.prompt.count(b",") == 139_999
    assert joiner.has_begun and not joiner.fault


def test_what_is_kept_of_a_first_event_while_it_comes_is_bounded() -> None:
    reader, largest = Recorder(TERMS, asks_ids=True), 0
    for feed in feeds(reader, first_event(1_000_000)):
        feed()
        largest = max(largest, len(reader._rest))
    assert largest <= MAX_REMEMBERED_BYTES
    assert reader.has_begun and not reader.fault
    assert reader.record.forgotten == "too long" and reader.record.prompt == b""


def test_client_gets_the_first_event_of_a_prompt_that_is_too_long() -> None:
    reader = Recorder(TERMS, asks_ids=True)
    sent = first_event(200_000)
    received = b"".join([reader.feed(sent[begin : begin + 1000]) for begin in range(0, len(sent), 1000)])
    assert received == b'data: {"id":"a","prompt_token_ids":null,' + ANSWER


@pytest.mark.anyio
async def test_the_seam_is_searched_in_a_thread() -> None:
    """An answer of 100,000 tokens takes 40 ms, in which the loop goes on."""
    fleet, threads = Fleet("bytes"), set[int]()
    words, options = fleet.stream.asked.words, fleet.stream.options
    assert words is not None

    def text_of(ids: Sequence[int], special: bool) -> str:
        threads.add(get_ident())
        return words.text_of(ids, special)

    class Threads:
        """The effects of a front on asyncio."""

        async def in_thread(self, work: Callable[[], Any]) -> Any:
            return await asyncio.to_thread(work)

        async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
            fleet.pod = candidate.pod.id
            fleet.answer(1.0 if fleet.received else 0.5)
            if not fleet.tracker.body.count(b"kv_transfer_params"):
                raise UpstreamBroken("cut", pod=fleet.pod)
            fleet.end()

    options = replace(options, words_of=lambda _model: replace(words, text_of=text_of))
    fleet.stream.rules = replace(fleet.stream.rules, continuation=options)
    fleet.tracker.release(0.0)
    await fleet.core.core.attempts(fleet.tracker, cast(Any, None), cast(Any, Threads()))
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert threads and get_ident() not in threads


def test_text_of_many_tokens_leaves_the_interpreter_to_others() -> None:
    """Only the batch form of the library does."""

    class Library:
        def decode_batch(self, batch: Sequence[Sequence[int]], **_options: object) -> list[str]:
            return ["a" * len(batch[0])]

    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._reference = Library()
    assert tokenizer.text_of([1] * 5000, False) == "a" * 5000


def test_tokens_without_a_text_are_decoded_once() -> None:
    decoded = 0

    def text_of(ids: Sequence[int], _special: bool) -> str:
        nonlocal decoded
        decoded += len(ids)
        return ""

    watch = StopWatch(("stop" * 100,), [1] * 8, "kept", AnswerWords(text_of))
    assert watch.feed([1] * 5000) is None
    assert decoded < 32 * MAX_STOP_CHARACTERS
