"""Tests whether the next turn's prefill pod finds the answers of a decode pod.

The decode pod is asked for an answer, a prefill pod then for a prompt that continues it, and that pod's count of cached
tokens says what it has found. Engines do not say how they are configured, and serve on without a connector that has
failed. Source: docs/disaggregation.md#answers-for-the-next-turn.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.apis.api import WORDS
from router.engines.adapter import answer_token_ids, cached_token_count, prompt_token_ids
from router.engines.engine_catalog import DIALECTS, ENGINES
from router.engines.handoff.dialect import Pair
from router.errors import UpstreamError
from router.feeds.self_test import MAX_RETEST_FACTOR, SelfTestTiming
from router.feeds.watch import Check, Post, Turn, check_of_missing
from router.fleet.fleet import Fleet
from router.policy.decide import compatible
from router.types import Endpoint, Pod, PodState, Role

ANSWER_TOKENS = 576
"""More than two chunks of LMCache, by default."""
SAVED_S = 2.0
"""How long an engine may take to save an answer."""


@dataclass(frozen=True, slots=True)
class AnswersTest:
    """Tests ready decode pods until a prefill pod has found an answer of theirs."""

    fleet: Fleet
    post: Post
    timing: SelfTestTiming

    @property
    def check(self) -> Check:
        retest_s = self.timing.retest_s
        return check_of_missing(
            "test of answers", self._test, self._reader, retest_s, max_s=retest_s * MAX_RETEST_FACTOR
        )

    def _reader(self, pod: Pod) -> Pod | None:
        """A prefill pod that would get the next turn; None if the pod needs no test, or cannot be tested."""
        if pod.role is not Role.DECODE or pod.keeps_answers:
            return None
        if not (pod.serves_alone and ENGINES[pod.engine].returns_token_ids):
            return None
        ready = (one.pod for one in self.fleet.snapshot.pods if one.state is PodState.READY)
        prefill = (one for one in ready if one.role is Role.PREFILL and one.serves(pod.base_model))
        return next((one for one in prefill if compatible(one, pod)), None)

    async def _test(self, pod: Pod, turn: Turn) -> bool | None:
        """Record what is found. Returns False if the test is to be repeated, later each time: also where an engine does
        not say, because an answer costs its pod hundreds of steps."""
        if (reader := self._reader(pod)) is None:
            return None
        try:
            found = await self._found(pod, reader)
        except UpstreamError:
            return False
        if found is not None and self.fleet.same_epoch(pod):
            self.fleet.learn(pod.id, keeps_answers=found)
        if found is False:
            setting = DIALECTS[pod.handoff].answers_setting
            turn.logged.warn("prefill pods do not find the answers of this pod", pod=pod.id, setting=setting)
        return bool(found)

    async def _found(self, pod: Pod, reader: Pod) -> bool | None:
        """Whether the reader finds tokens of an answer; None if an engine does not say."""
        common = {"model": pod.base_model, "temperature": 0}
        text, timeout_s = f"{uuid.uuid4().hex} {WORDS}", self.timing.answer_timeout_s
        asked = {**common, "prompt": text, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "return_token_ids": True}
        answered = await self.post(pod, Endpoint.COMPLETIONS.value, asked, timeout_s)
        prompt, answer = prompt_token_ids(answered), answer_token_ids(answered)
        if not prompt or not answer:
            return None
        await asyncio.sleep(SAVED_S)
        body = _continued({**common, "max_tokens": 1}, [*prompt, *answer], pod, reader)
        cached = cached_token_count(await self.post(reader, Endpoint.COMPLETIONS.value, body, timeout_s))
        return None if cached is None else cached > len(prompt)


def _continued(asked: dict[str, Any], tokens: Sequence[int], pod: Pod, reader: Pod) -> dict[str, Any]:
    """The next turn, with a pull from the pod where both pull."""
    body = msgspec.json.encode({**asked, "prompt": [*tokens, tokens[0]]})
    pair = Pair(prefill=pod, decode=reader, id=random.getrandbits(63))
    pulling = DIALECTS[reader.pulls].pull_body(body, pair) if reader.pulls and reader.pulls == pod.pulls else None
    read: dict[str, Any] = msgspec.json.decode(pulling or body)
    return read


def missing_answers(pod: Pod, computed_tokens: float = 0.0, again_tokens: float = 0.0) -> str:
    """What to set so that prefill pods find the answers of this pod; "" unless they do not. With what it is worth, by
    the traffic seen: of the tokens that prefill pods computed, those that a decode pod held."""
    if pod.keeps_answers is not False:
        return ""
    share = again_tokens / computed_tokens if computed_tokens else 0.0
    worth = f"; it would save {share:.0%} of {computed_tokens:,.0f} tokens that prefill pods computed" if share else ""
    return f"prefill pods do not find its answers; set {DIALECTS[pod.handoff].answers_setting}{worth}"
