"""Does a pod continue a stream? It shows that with a short answer of its own, broken off in the middle."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, first_body, plan
from router.request.continuation.record import Record
from router.request.continuation.recorder import Recorder
from router.request.continuation.stream_events import END
from router.request.continuation.terms import terms_of
from router.types import Endpoint

TOKENS = 16


def rehearsal(endpoint: Endpoint, body: Mapping[str, Any], words: AnswerWords) -> Generator[bytes, bytes, str]:
    """Yields bodies for the pod and receives the streams that it sends. Returns why it does not continue; "" if it
    does. `body`: of a greedy request."""
    asked = msgspec.json.encode({**body, "stream": True, "max_tokens": TOKENS, "ignore_eos": True})
    terms = terms_of(endpoint, asked)
    sent = yield first_body(asked, terms)
    whole, broken = Recorder(terms, asks_ids=True), Recorder(terms, asks_ids=True)
    whole.feed(sent)
    events = sent.split(END)
    broken.feed(b"".join([event + END for event in events[: len(events) // 2]]))
    found = plan(terms, broken.record, asked, words, asks_ids=True)
    if not whole.record.is_done:
        return whole.fault or "its stream is not whole"
    if not isinstance(found, Continue) or found.method != "ids":
        return "it sends no token ids that fit its text"
    joiner = Joiner(terms, broken.record, found, words)
    joiner.feed((yield found.body))
    if not joiner.record.is_done:
        return joiner.fault or "its continuation is not whole"
    return "" if _said(joiner.record) == _said(whole.record) else "its continuation is another answer"


def _said(record: Record) -> tuple[object, ...]:
    return record.ids, record.reasoning, record.content
