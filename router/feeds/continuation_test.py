"""Tests whether a pod continues a broken stream from its token ids: in each of its lives, before it has to.

Until a pod has passed, its streams go on by being made again, or not at all (docs/continuation.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.pod_problems import Post
from router.feeds.self_test import MAX_RETEST_FACTOR, SelfTestTiming
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.fleet.retry_pause import retry_pause_s
from router.guards import Bound, OutOfBounds
from router.request.continuation.answer_words import AnswerWords, WordsOf
from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, first_body, plan
from router.request.continuation.stream import Recorder
from router.request.continuation.stream_events import END
from router.request.continuation.terms import terms_of
from router.types import Endpoint, Pod, PodId, PodState

ANSWER = Bound("answer to a continuation test", 32 * 1024, 100)
MAX_ANSWERS = 3
"""Answers that are asked for: a busy server may send one as a single event, which cannot be broken off inside."""
_TEXT = "Write the numbers from one to twenty in words."
_PROBES: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": _TEXT}]},
    Endpoint.COMPLETIONS: {"prompt": _TEXT},
}
_GREEDY = {"temperature": 0, "stream": True, "max_tokens": 16, "ignore_eos": True}

log = structlog.get_logger()


class ContinuationTestFeed:
    """Tests pods that serve alone, and updates what they continue in the fleet."""

    def __init__(self, fleet: Fleet, post: Post, words_of: WordsOf, timing: SelfTestTiming) -> None:
        self._fleet = fleet
        self._post = post
        self._words_of = words_of
        self._timing = timing

    async def run(self) -> None:
        await each_pod("continuation test", self._fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        tested = failed = 0
        while True:
            status = self._fleet.status(pod_id)
            if status is not None and status.state is PodState.READY and status.pod.epoch != tested:
                is_done = await self.test(status.pod, is_first=not failed)
                tested, failed = (status.pod.epoch, 0) if is_done else (tested, failed + 1)
            retest_s = self._timing.retest_s
            await pause(changed, retry_pause_s(failed + 1, retest_s, retest_s * MAX_RETEST_FACTOR))

    async def test(self, pod: Pod, *, is_first: bool = True) -> bool:
        """Test a pod whose streams may be continued. False if the test should be repeated."""
        words = self._words_of(pod.base_model)
        could = pod.serves_alone and pod.dp_rank is None and ENGINES[pod.engine].continues(pod)
        if words is None or not could:
            return True
        reasons = {one: await self._failure(pod, one, words) for one in _PROBES}
        if self._fleet.same_epoch(pod) is None:
            return True
        self._fleet.learn(pod.id, continues=frozenset(one for one, reason in reasons.items() if not reason))
        if is_first and any(reasons.values()):
            failed = {one.value: reason for one, reason in reasons.items() if reason}
            log.warning("pod does not continue streams", pod=pod.id, reasons=failed)
        return not any(reasons.values())

    async def _failure(self, pod: Pod, endpoint: Endpoint, words: AnswerWords) -> str:
        """Why the pod does not continue an answer of its own, broken off in the middle; "" if it does."""
        body = msgspec.json.encode({"model": pod.base_model, **_PROBES[endpoint], **_GREEDY})
        terms = terms_of(endpoint, body)
        try:
            for _ in range(MAX_ANSWERS):
                whole, broken = Recorder(terms, asks_ids=True), Recorder(terms, asks_ids=True)
                sent = await self._answer(pod, endpoint, first_body(body, terms))
                whole.feed(sent)
                events = sent.split(END)
                broken.feed(b"".join([event + END for event in events[: len(events) // 2]]))
                found = plan(terms, broken.current, body, words)
                if not whole.record.is_done:
                    return whole.fault or "its stream is not whole"
                if isinstance(found, Continue) and found.method == "ids":
                    break
            else:
                return "it sends no token ids that fit its text"
            joiner = Joiner(terms, broken.record, found, words)
            joiner.feed(await self._answer(pod, endpoint, found.body))
        except (UpstreamError, OutOfBounds) as error:
            return str(error)
        one, other = joiner.record, whole.current
        if not one.is_done:
            return joiner.fault or "its continuation is not whole"
        is_same = (one.ids, one.texts) == (other.ids, other.texts)
        return "" if is_same else "its continuation is another answer"

    async def _answer(self, pod: Pod, endpoint: Endpoint, body: bytes) -> bytes:
        sent = await self._post(pod, endpoint.value, msgspec.json.decode(body), self._timing.answer_timeout_s)
        ANSWER.check_size(len(sent))
        ANSWER.check_items(sent.count(END))
        return sent
