"""Tests of a READY pod by requests of the router's own: its tokens, its cache hits, and how it continues streams.

The self-test compares the pod's tokens and block hashes with the router's. If they differ, the router serves requests
but never predicts a cache hit. It runs for pods that are not TRUSTED: when they join, after a restart, and at intervals
while it fails. Until it passes, the pod serves without prefix matching.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from os.path import commonprefix
from typing import Any, TypeAlias

import msgspec
import structlog

from router.apis.api import WORDS, Body, long_text, text_part
from router.apis.chat_rules import ALL_IN_ONE, RULES
from router.engines.adapter import (
    PROBE_ANSWER,
    TOKENIZE_PATH,
    cached_token_count,
    parse_tokens,
    prompt_token_count,
    prompt_token_ids,
)
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError, UpstreamTimeout
from router.feeds.watch import Check, Post, Turn, is_refusal
from router.fleet.fleet import Fleet
from router.guards import Bound, OutOfBounds
from router.index.hit_probe import MAX_TEST_TOKENS, CacheHabits, ProbePrompt, explaining_habits, probe_prompts
from router.request.continuation.answer_words import AnswerWords, WordsOf
from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, first_body, plan
from router.request.continuation.stream import Recorder
from router.request.continuation.stream_events import END
from router.request.continuation.terms import terms_of
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, Pod, PodId, PodState, PodStatus, PrefixTrust, PromptPrefix

MAX_RETEST_FACTOR = 64
"""A failed test of a conversion is repeated after up to as many times `retest_s`: the engine may have no such endpoint.
"""

POLL_S = 0.02

_SMALL = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAC0lEQVR42mNgQAYAAA4AATo1BFYAAAAASUVORK5CYII="
"""A PNG of 2 x 2 pixels, which models enlarge."""
_SCREENSHOT = (
    "iVBORw0KGgoAAAANSUhEUgAABQAAAALQAQAAAADnBuD7AAAAh0lEQVR42u3BMQEAAADCoPVPbQlPoAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAB4GsTfAAGc95RKAAAAAElFTkSuQmCC"
)
"""A PNG of 1280 x 720 pixels, black and white, which engines convert to RGB."""

Probe: TypeAlias = tuple[Endpoint, dict[str, Any]]

Fingerprint: TypeAlias = Callable[[Endpoint, Mapping[str, Any]], Awaitable[PromptPrefix | None]]
"""(endpoint, decoded body) to the router's prefix of it; None if the router cannot tokenize such a prompt."""

Advice: TypeAlias = Callable[[str, Sequence[int], Sequence[int]], str]
"""(model, the router's tokens of a probe, the engine's) to the cause of a difference and what to do; "" if unknown."""

_NOT_TRUSTED = "conversion not trusted; requests to this endpoint are routed by load"
_OF_PROMPTS = ("messages", "tools", "prompt", "add_generation_prompt", "continue_final_message")
"""Fields of probes that determine their prompts."""
_WARNINGS = {Endpoint.CHAT: "chats with tools are matched up to the first difference only"}

log = structlog.get_logger()


class Parity(StrEnum):
    OK = "ok"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    NO_EVENTS = "no_events"
    """There are no hashes to compare: the pod publishes no KV events, or has windows alone, whose events do not say
    which blocks they name."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The result of a self-test. `reason` names the difference and what to do."""

    tokens: Parity
    hashes: Parity
    reason: str

    @property
    def trust(self) -> PrefixTrust:
        """Equal hashes prove equal tokens, because KV events contain the engine's tokens. Without events, equal tokens
        suffice, because the index contains only this router's own prompts."""
        if Parity.MISMATCH in (self.tokens, self.hashes):
            return PrefixTrust.MISMATCH
        if self.hashes is Parity.OK or (self.hashes is Parity.NO_EVENTS and self.tokens is Parity.OK):
            return PrefixTrust.TRUSTED
        return PrefixTrust.UNTESTED


_NONE_READ = ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the router reads none of the probes")


def compare_tokens(ours: Sequence[int], engine: Sequence[int] | None, engine_count: int | None) -> ParityReport:
    """Compare the router's tokens with the engine's, or with their number if the engine reports only that. The number
    is enough for an engine without KV events."""
    if engine is not None:
        if list(ours) == list(engine):
            return ParityReport(Parity.OK, Parity.UNKNOWN, f"{len(ours)} tokens are equal")
        return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{_difference(ours, engine)}. {_TOKENS_ADVICE}")
    if engine_count is None:
        return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the engine reports neither tokens nor their number")
    if engine_count == len(ours):
        return ParityReport(Parity.OK, Parity.UNKNOWN, f"the number of tokens, {engine_count}, is equal")
    differs = f"the engine counts {engine_count} tokens where the router has {len(ours)}"
    return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{differs}. {_TOKENS_ADVICE}")


def expected_blocks(prompt: PromptPrefix, engine_block_tokens: int | None) -> int:
    """Number of router blocks that the engine must announce: those inside its full blocks of the prompt."""
    block = engine_block_tokens or prompt.block_size_tokens
    return prompt.token_count // block * block // prompt.block_size_tokens


def compare_hashes(
    tokens: ParityReport, known_blocks: int, expected: int, rejected: str, new_blocks: int = 0
) -> ParityReport:
    """Add the result of the pod's KV events. `rejected`: why the index rejects its events, or "". `new_blocks`: how
    many came since the probe was sent. None, or more than it has, prove nothing: its own may be late."""
    if rejected:
        return ParityReport(tokens.tokens, Parity.MISMATCH, rejected)
    if known_blocks >= expected:
        return ParityReport(tokens.tokens, Parity.OK, f"{tokens.reason}; {expected} announced blocks are equal")
    if 0 < new_blocks <= expected:
        why = f"KV events came, but only {known_blocks} of {expected} blocks of the probe have equal hashes"
        return ParityReport(tokens.tokens, Parity.MISMATCH, f"{tokens.reason}; {why}. {_TOKENS_ADVICE}")
    late = "the pod is busy" if new_blocks > 0 else "none came: check that the engine's prefix caching is on"
    why = f"{known_blocks} of {expected} blocks of the probe came by KV events in time; {late}. It is tested again"
    return ParityReport(tokens.tokens, Parity.UNKNOWN, f"{tokens.reason}; {why}")


_TOKENS_ADVICE = "Configure the tokenizer and chat template that the engine uses (`models` in the configuration)."


def _difference(ours: Sequence[int], engine: Sequence[int]) -> str:
    at = len(commonprefix((list(ours), list(engine))))
    return f"token {at} differs, of {len(ours)} in the router and {len(engine)} in the engine"


def _untested(pod: Pod) -> list[Endpoint]:
    """The endpoints whose conversions by the pod's engine have not passed their test."""
    endpoints = ENGINES[pod.engine].conversions_of(pod.front_end).keys() - pod.converts - pod.lacks
    return sorted(endpoint for endpoint in endpoints if endpoint.api.probes)


@dataclass(frozen=True, slots=True)
class SelfTestTiming:
    retest_s: float = 30.0
    answer_timeout_s: float = 30.0
    events_timeout_s: float = 5.0
    """How long after the answer the pod's KV events may announce the blocks of the probe."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Tests pods and updates their trust in the fleet. `publishes_events(pod_id)`: whether the index receives the pod's
    KV events; if so, they must announce the probe's blocks."""

    fleet: Fleet
    store: LocalStore
    post: Post
    fingerprint: Fingerprint
    publishes_events: Callable[[PodId], bool]
    timing: SelfTestTiming
    advice: Advice = lambda *_: ""

    @property
    def checks(self) -> Sequence[Check]:
        """The self-test, and what is tested of a pod that has passed it."""

        def is_trusted(status: PodStatus) -> bool:
            return status.state is PodState.READY and status.pod.trust is PrefixTrust.TRUSTED

        def every_s(_status: PodStatus) -> float:
            return self.timing.retest_s

        return (
            Check(
                name="self-test",
                run=self._test_parity,
                due=lambda status: status.state is PodState.READY and not is_trusted(status),
                every_s=every_s,
            ),
            Check(
                name="test of conversions",
                run=self._test_conversions,
                due=lambda status: is_trusted(status) and bool(_untested(status.pod)),
                every_s=every_s,
                max_s=self.timing.retest_s * MAX_RETEST_FACTOR,
            ),
            Check(
                name="test of rules",
                run=self._test_rules,
                due=is_trusted,
                every_s=every_s,
                max_s=self.timing.retest_s * MAX_RETEST_FACTOR,
                once=True,
            ),
            Check(name="test of pictures", run=self._test_pictures, due=is_trusted, every_s=every_s, once=True),
        )

    async def _test_parity(self, pod: Pod, _turn: Turn) -> None:
        report = await self.test(pod)
        if self.fleet.same_epoch(pod) is None:
            return
        self.fleet.trust(pod.id, report.trust, report.reason)
        if report.trust is PrefixTrust.TRUSTED:
            log.info("self-test passed", pod=pod.id, tokens=report.tokens, hashes=report.hashes, reason=report.reason)

    async def _test_conversions(self, pod: Pod, turn: Turn) -> bool:
        """Test the conversions of the pod's engine, and record those that passed. Returns whether all did. A mismatch
        is logged once; that a pod has no such endpoint is not."""
        passed: set[Endpoint] = set(pod.converts)
        for endpoint in _untested(pod):
            make = endpoint.api.probes
            assert make is not None
            made = make(pod.models[0], uuid.uuid4().hex, pod.block_size_tokens)
            report = await self._test_conversion(pod, ([(endpoint, body) for body in group] for group in made))
            if report is None:
                passed |= {one for one in Endpoint if endpoint in (one, one.api.proven_with)}
            elif report.trust is PrefixTrust.MISMATCH:
                event = _WARNINGS.get(endpoint, _NOT_TRUSTED)
                turn.logged.warn(event, pod=pod.id, endpoint=endpoint.value, reason=report.reason)
        if self.fleet.same_epoch(pod):
            self.fleet.learn(pod.id, converts=frozenset(passed))
        return passed.issuperset(_untested(pod))

    async def _test_rules(self, pod: Pod, turn: Turn) -> bool:
        """Test by which rules the pod makes other prompts of chats, and record them. False if the test must be
        repeated, because a chat had no answer. One that the pod refuses shows nothing."""
        rules = () if await self._reads(pod, ALL_IN_ONE) is Parity.OK else RULES
        found = {rule.name: await self._reads(pod, rule.chat) for rule in rules}
        if self.fleet.same_epoch(pod) is None:
            return False
        wrong = [name for name, parity in found.items() if parity is Parity.MISMATCH]
        self.fleet.learn(pod.id, misreads=frozenset(wrong))
        if wrong:
            event = "pod makes other prompts of some chats; they are matched up to the first difference"
            turn.logged.warn(event, pod=pod.id, rules=", ".join(wrong))
        return None not in found.values()

    async def _reads(self, pod: Pod, chat: Body) -> Parity | None:
        """Whether the pod has the router's tokens of a chat, by /tokenize where it has that; None without an answer."""
        body = {"model": pod.models[0], "max_tokens": 1, "temperature": 0, **chat}
        if (found := await self._first_readable(pod, [(Endpoint.CHAT, body)])) is None:
            return Parity.UNKNOWN
        probe, prompt = found
        tokens, answer = await self._tokenized_by(pod, probe), b""
        if tokens is None:
            try:
                answer = await self._send(pod, probe)
            except UpstreamError as error:
                return Parity.UNKNOWN if is_refusal(error) else None
        return compare_tokens(prompt.tokens, tokens or prompt_token_ids(answer), prompt_token_count(answer)).tokens

    async def _test_pictures(self, pod: Pod, _turn: Turn) -> bool:
        """Test whether the pod identifies and counts pictures as the router does, and record it if so. False if the
        test must be repeated."""
        groups = picture_probes(pod.models[0], uuid.uuid4().hex, pod.block_size_tokens)
        report = await self._test_conversion(pod, groups, lambda it: bool(it.pictures) and not it.media_tokens)
        if self.fleet.same_epoch(pod) is None:
            return False
        if report is None:
            self.fleet.learn(pod.id, reads_pictures=True)
        elif report.trust is PrefixTrust.MISMATCH:
            event = "pictures not trusted; prompts are matched up to their first picture"
            log.warning(event, pod=pod.id, reason=report.reason)
        return report in (None, _NONE_READ) or report.trust is PrefixTrust.MISMATCH

    async def _test_conversion(
        self, pod: Pod, groups: Iterable[Sequence[Probe]], reads: Callable[[PromptPrefix], bool] = lambda _: True
    ) -> ParityReport | None:
        """The first failure of a conversion's probes; None if all passed, of each group the first that the router
        reads. `reads`: whether it has read a probe exactly."""
        read = 0
        for group in groups:
            if (found := await self._first_readable(pod, group)) is None or not reads(found[1]):
                continue
            report = await self._compare(pod, *found)
            if report.trust is not PrefixTrust.TRUSTED:
                return report
            read += 1
        return None if read else _NONE_READ

    async def test(self, pod: Pod) -> ParityReport:
        """Run one self-test: one short prompt and one output token."""
        nonce, block = uuid.uuid4().hex, pod.block_size_tokens
        every = (one for model in pod.models for one in probes(model, nonce, block))
        found = await self._first_readable(pod, every)
        if found is None:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the router has no tokenizer for this pod's models")
        report = await self._compare(pod, *found)
        if report.tokens is Parity.UNKNOWN and self.publishes_events(pod.id):
            # A pod that generates nothing. The events show its tokens, and whether its model caches prefixes at all.
            text = {"model": pod.models[0], "input": f"{uuid.uuid4().hex} {long_text(block)}"}
            found = await self._first_readable(pod, [(Endpoint.EMBEDDINGS, text)])
            embedded = await self._compare(pod, *found) if found else _NONE_READ
            return embedded if embedded.trust is PrefixTrust.TRUSTED else report
        return report

    async def _compare(self, pod: Pod, probe: Probe, prompt: PromptPrefix) -> ParityReport:
        """Send a probe, and compare the pod's tokens and blocks with the router's prefix of it."""
        before_blocks = self.store.cache_of(pod.id).size_blocks
        try:
            answer = await self._send(pod, probe)
        except UpstreamError as error:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, f"the probe request failed: {error}")
        engine_tokens = prompt_token_ids(answer) or await self._tokenized_by(pod, probe)
        report = compare_tokens(prompt.tokens, engine_tokens, prompt_token_count(answer))
        if report.tokens is Parity.MISMATCH:
            advice = self.advice(probe[1]["model"], prompt.tokens, engine_tokens or ())
            return replace(report, reason=advice) if advice else report
        if not self.publishes_events(pod.id):
            return replace(report, hashes=Parity.NO_EVENTS)
        expected = expected_blocks(prompt, pod.block_size_tokens)
        known_blocks = await self._announced(pod.id, prompt, expected)
        if pod.id in self.store.unnamed or not self.publishes_events(pod.id):
            return replace(report, hashes=Parity.NO_EVENTS)
        cache = self.store.cache_of(pod.id)
        new_blocks = cache.size_blocks - before_blocks
        return compare_hashes(report, known_blocks, expected, cache.blocks.rejected_reason, new_blocks)

    async def _first_readable(self, pod: Pod, group: Iterable[Probe]) -> tuple[Probe, PromptPrefix] | None:
        """The first probe that the router can tokenize as the pod's front end does."""
        for endpoint, body in group:
            prompt = await self.fingerprint(endpoint, body)
            if prompt is not None and (own := prompt.read_by(pod.front_end)) is not None:
                return (endpoint, body), own
        return None

    async def _send(self, pod: Pod, probe: Probe) -> bytes:
        endpoint, body = probe
        if not endpoint.api.is_converted and ENGINES[pod.engine].returns_token_ids:
            body = {**body, "return_token_ids": True}
        return await self.post(pod, endpoint.value, body, self.timing.answer_timeout_s)

    async def _tokenized_by(self, pod: Pod, probe: Probe) -> list[int] | None:
        """The probe's tokens from the engine's /tokenize; None if the engine has none or it fails."""
        endpoint, body = probe
        if endpoint.api.is_converted:
            return None
        fields: dict[str, Any] = {name: body[name] for name in _OF_PROMPTS if name in body}
        asked = ENGINES[pod.engine].tokenize_body(body["model"], fields)
        if asked is None:
            return None
        try:
            answer = await self.post(pod, TOKENIZE_PATH, asked, self.timing.answer_timeout_s)
        except UpstreamError:
            return None
        found = parse_tokens(answer, PROBE_ANSWER)
        return found.tolist() if found is not None else None

    async def _announced(self, pod_id: PodId, prompt: PromptPrefix, expected: int) -> int:
        """Number of announced blocks of the prompt. Waits until all have arrived or the timeout has passed."""
        try:
            async with asyncio.timeout(self.timing.events_timeout_s):
                # Polled: the store has no callback for blocks, of which thousands arrive each second.
                while self.publishes_events(pod_id) and not self.store.cache_of(pod_id).blocks.rejected_reason:
                    found = self.store.cache_of(pod_id).full_and_hit(prompt)[0]
                    if found >= expected or pod_id in self.store.unnamed:
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass  # the evaluation reports missing blocks
        return self.store.cache_of(pod_id).full_and_hit(prompt)[0]


# --- hits ---

MAX_TESTS = 3
"""Tests of a pod whose answers no rule explains: blocks may have been evicted meanwhile."""
MAX_KV_USAGE = 0.5
"""A fuller pod is tested later: it would evict the blocks of the test."""
_TOKENS = 50
"""Different tokens that a prompt adds. Those of another are different ones, and all are in every vocabulary."""


@dataclass(frozen=True, slots=True)
class HitTest:
    """Tests by which rule a pod takes cached tokens, once in each life of its cache, while it has little to do.

    The events say which layers an engine has, not all of what it does with their blocks (`index/hit_probe.py`). Five
    prompts of random tokens show it. Until then, and where the engine reports no cached tokens, the events alone count.
    """

    fleet: Fleet
    store: LocalStore
    post: Post
    publishes_events: Callable[[PodId], bool]
    timing: SelfTestTiming

    @property
    def check(self) -> Check:
        return Check(
            name="hit test",
            run=lambda pod, turn: self.test(pod, is_last=turn.failures + 1 == MAX_TESTS),
            due=self.may_test,
            every_s=lambda _status: self.timing.retest_s,
            once=True,
        )

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


# --- continuation ---

ANSWER = Bound("answer to a continuation test", 32 * 1024, 100)
MAX_ANSWERS = 3
"""Answers that are asked for: a busy server may send one as a single event, which cannot be broken off inside."""
_TEXT = "Write the numbers from one to twenty in words."
_CONTINUED: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": _TEXT}]},
    Endpoint.COMPLETIONS: {"prompt": _TEXT},
}
_GREEDY = {"temperature": 0, "stream": True, "max_tokens": 16, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class ContinuationTest:
    """Tests whether a pod that serves alone continues a broken stream from its token ids, before it has to.

    Until it has passed, its streams go on by being made again, or not at all (docs/continuation.md)."""

    fleet: Fleet
    post: Post
    words_of: WordsOf
    timing: SelfTestTiming

    @property
    def check(self) -> Check:
        return Check(
            name="continuation test",
            run=lambda pod, turn: self.test(pod, is_first=not turn.failures),
            due=lambda status: status.state is PodState.READY,
            every_s=lambda _status: self.timing.retest_s,
            max_s=self.timing.retest_s * MAX_RETEST_FACTOR,
            once=True,
        )

    async def test(self, pod: Pod, *, is_first: bool = True) -> bool:
        """Test a pod whose streams may be continued. False if the test should be repeated."""
        words = self.words_of(pod.base_model)
        could = ENGINES[pod.engine].continues(pod) if pod.serves_alone and pod.dp_rank is None else frozenset()
        if words is None or not could:
            return True
        reasons = {one: await self._failure(pod, one, words) for one in _CONTINUED if one in could}
        if self.fleet.same_epoch(pod) is None:
            return True
        self.fleet.learn(pod.id, continues=frozenset(one for one, reason in reasons.items() if not reason))
        if is_first and any(reasons.values()):
            failed = {one.value: reason for one, reason in reasons.items() if reason}
            log.warning("pod does not continue streams", pod=pod.id, reasons=failed)
        return not any(reasons.values())

    async def _failure(self, pod: Pod, endpoint: Endpoint, words: AnswerWords) -> str:
        """Why the pod does not continue an answer of its own, broken off in the middle; "" if it does."""
        body = msgspec.json.encode({"model": pod.base_model, **_CONTINUED[endpoint], **_GREEDY})
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
        sent = await self.post(pod, endpoint.value, msgspec.json.decode(body), self.timing.answer_timeout_s)
        ANSWER.check_size(len(sent))
        ANSWER.check_items(sent.count(END))
        return sent


# --- what is sent ---


def probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Probe]:
    """Probe requests, the most thorough first: a chat with several roles, a chat without a system message (some
    templates refuse one), a completion. `nonce` prevents cache hits. Each word is at least one token."""
    text = long_text(block_tokens)
    system = {"role": "system", "content": f"{nonce} You are a probe. {WORDS}"}
    turns = [
        {"role": "user", "content": f"{nonce}\n{text}"},
        {"role": "assistant", "content": f"Well, {WORDS}"},
        {"role": "user", "content": "And?"},
    ]
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    yield Endpoint.CHAT, {**common, "messages": [system, *turns]}
    yield Endpoint.CHAT, {**common, "messages": turns}
    yield Endpoint.COMPLETIONS, {**common, "prompt": f"{nonce} {text}"}


def picture_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """With a picture: its number of tokens shows the limits of its size, and the blocks behind it its identifier."""
    for encoded in (_SMALL, _SCREENSHOT):
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        content = [text_part(f"{nonce} Look:"), shown, text_part(long_text(block_tokens))]
        messages = [{"role": "user", "content": content}]
        yield [(Endpoint.CHAT, {"model": model, "max_tokens": 1, "temperature": 0, "messages": messages})]
