"""Tests by which rule a pod takes cached tokens: once in each life of its cache, on a trusted pod with little to do.

The events say which layers an engine has, not all of what it does with their blocks (`index/hit_probe.py`). Five
prompts of random tokens show it. Until then, and where the engine reports no cached tokens, the events alone count.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from router.engines.adapter import cached_token_count
from router.errors import UpstreamError, UpstreamTimeout
from router.feeds.pod_problems import Post
from router.feeds.self_test import SelfTestTiming
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.index.hit_probe import MAX_TEST_TOKENS, CacheHabits, ProbePrompt, explaining_habits, probe_prompts
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, Pod, PodId, PodState, PodStatus, PrefixTrust

MAX_TESTS = 3
"""Tests of a pod whose answers no rule explains: blocks may have been evicted meanwhile."""
MAX_KV_USAGE = 0.5
"""A fuller pod is tested later: it would evict the blocks of the test."""
_TOKENS = 50
"""Different tokens that a prompt adds. Those of another are different ones, and all are in every vocabulary."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HitTestFeed:
    """Tests pods, and reports to the index what they do. `publishes_events(pod_id)`: whether it gets their events."""

    fleet: Fleet
    store: LocalStore
    post: Post
    publishes_events: Callable[[PodId], bool]
    timing: SelfTestTiming

    async def run(self) -> None:
        await each_pod("hit test", self.fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        tested = failed = 0
        while True:
            status = self.fleet.status(pod_id)
            if status is not None and status.pod.epoch != tested and self.may_test(status):
                is_done = await self.test(status.pod, is_last=failed + 1 == MAX_TESTS)
                failed += is_done is not None
                if is_done:
                    tested, failed = status.pod.epoch, 0
            await pause(changed, self.timing.retest_s)

    def may_test(self, status: PodStatus) -> bool:
        """Whether a pod can be tested now: its events have said which layers it has, and it has little to do."""
        if self.store.cache_of(status.pod.id).announced_rule is None:
            return False
        is_trusted = status.state is PodState.READY and status.pod.trust is PrefixTrust.TRUSTED
        is_idle = not status.load.waiting and status.load.kv_usage <= MAX_KV_USAGE
        return is_trusted and is_idle and self.publishes_events(status.pod.id)

    async def test(self, pod: Pod, *, is_last: bool = True) -> bool | None:
        """Test a pod whose rule is announced. False if the test should be repeated; None: because it was too busy."""
        rule = self.store.cache_of(pod.id).announced_rule
        prompts = probe_prompts(rule) if rule is not None else ()
        if rule is None or not prompts or prompts[0].length_tokens >= (pod.max_model_len_tokens or MAX_TEST_TOKENS):
            return True
        sent = list(_tokens_of(prompts))
        try:
            answers = await self._answers(pod, sent)
        except UpstreamError as error:
            return None if isinstance(error, UpstreamTimeout) else is_last
        if answers is None:
            return True
        explaining = await asyncio.to_thread(explaining_habits, rule, prompts, answers)
        if self.fleet.same_epoch(pod) is None:
            return True
        if explaining:
            self._learn(pod, explaining, sent[0], answers[1])
            log.info("hit test passed", pod=pod.id, hits=self.store.cache_of(pod.id).hits)
        elif is_last:
            self.store.learn(pod.id, None)
            log.warning("no known rule explains the pod's hits; they are an upper bound", pod=pod.id, cached=answers)
        return bool(explaining) or is_last

    def _learn(self, pod: Pod, explaining: Sequence[CacheHabits], prompt: Sequence[int], hit: int) -> None:
        """Learn the first of the habits under which the announced blocks give the hit of the prompt; the first of all
        where they have not arrived."""
        for habits in (*explaining, explaining[0]):
            self.store.learn(pod.id, habits)
            full_tokens, hit_tokens = self.store.cache_of(pod.id).full_and_hit_tokens(prompt)
            if not full_tokens or hit_tokens == hit:
                return

    async def _answers(self, pod: Pod, prompts: Iterable[Sequence[int]]) -> Sequence[int] | None:
        """The cached tokens that the pod reports of each prompt; None if it does not. Raises `UpstreamError`."""
        answers = []
        for tokens in prompts:
            body = {"model": pod.models[0], "prompt": tokens, "max_tokens": 1, "temperature": 0}
            answer = await self.post(pod, Endpoint.COMPLETIONS.value, body, self.timing.answer_timeout_s)
            if (cached := cached_token_count(answer)) is None:
                return None
            answers.append(cached)
        return answers


def _tokens_of(prompts: Sequence[ProbePrompt]) -> Iterator[list[int]]:
    """Prompts that share what they should with the first one, and nothing else."""
    first = _random_tokens(0, prompts[0].length_tokens)
    for number, prompt in enumerate(prompts):
        yield first[: prompt.shared_tokens] + _random_tokens(number, prompt.length_tokens - prompt.shared_tokens)


def _random_tokens(number: int, count: int) -> list[int]:
    return [random.randrange(number * _TOKENS, (number + 1) * _TOKENS) for _ in range(count)]
