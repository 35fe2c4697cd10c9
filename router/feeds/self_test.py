"""Tests whether the tokens and block hashes of a pod equal the router's.

If they differ, the router serves requests but never predicts a cache hit. The self-test runs for READY pods that are
not TRUSTED: when they join, after a restart, and at intervals while it fails. Until it passes, the pod serves without
prefix matching.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from os.path import commonprefix
from typing import Any, TypeAlias

import structlog

from router.engines.adapter import PROBE_ANSWER, TOKENIZE_PATH, parse_tokens, prompt_token_count, prompt_token_ids
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.pod_problems import Post
from router.feeds.probe_bodies import (
    MakeGroups,
    Probe,
    conversion_probes,
    embeddings_probe,
    picture_probes,
    probes,
)
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.fleet.retry_pause import retry_pause_s
from router.stores.logged_once import LoggedOnce
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, Pod, PodId, PodState, PrefixTrust, PromptPrefix

MAX_RETEST_FACTOR = 64
"""A failed test of a conversion is repeated after up to as many times `retest_s`: the engine may have no such endpoint.
"""

POLL_S = 0.02

Fingerprint: TypeAlias = Callable[[Endpoint, Mapping[str, Any]], Awaitable[PromptPrefix | None]]
"""(endpoint, decoded body) to the router's prefix of it; None if the router cannot tokenize such a prompt."""

Advice: TypeAlias = Callable[[str, Sequence[int], Sequence[int]], str]
"""(model, the router's tokens of a probe, the engine's) to the cause of a difference and what to do; "" if unknown."""

_NOT_TRUSTED = "conversion not trusted; requests to this endpoint are routed by load"
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
    endpoints = ENGINES[pod.engine].conversions.keys() - pod.converts
    return sorted(endpoint for endpoint in endpoints if endpoint.api.probes)


@dataclass(frozen=True, slots=True)
class ProbeReader:
    """What the router knows of a probe's prompt: its prefix, and why a pod's tokens differ."""

    fingerprint: Fingerprint
    advice: Advice = lambda *_: ""


@dataclass(frozen=True, slots=True)
class SelfTestTiming:
    retest_s: float = 30.0
    answer_timeout_s: float = 30.0
    events_timeout_s: float = 5.0
    """How long after the answer the pod's KV events may announce the blocks of the probe."""


@dataclass(frozen=True, slots=True)
class ParityFeed:
    """Tests pods and updates their trust in the fleet. `publishes_events(pod_id)`: whether the index receives the pod's
    KV events; if so, they must announce the probe's blocks."""

    fleet: Fleet
    store: LocalStore
    post: Post
    reader: ProbeReader
    publishes_events: Callable[[PodId], bool]
    timing: SelfTestTiming

    async def run(self) -> None:
        await each_pod("parity", self.fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        failed = pictures_tested = 0
        logged = LoggedOnce()
        while True:
            status = self.fleet.status(pod_id)
            if status and status.state is PodState.READY and status.pod.trust is not PrefixTrust.TRUSTED:
                failed, logged = 0, LoggedOnce()
                self._record(status.pod, await self.test(status.pod))
                status = self.fleet.status(pod_id)
            if status and status.pod.trust is PrefixTrust.TRUSTED and _untested(status.pod):
                failed = 0 if await self._test_conversions(status.pod, logged) else failed + 1
            if status and status.pod.trust is PrefixTrust.TRUSTED and status.pod.epoch != pictures_tested:
                pictures_tested = status.pod.epoch if await self._test_pictures(status.pod) else 0
            retest_s = self.timing.retest_s
            await pause(changed, retry_pause_s(failed + 1, retest_s, retest_s * MAX_RETEST_FACTOR))

    async def _test_conversions(self, pod: Pod, logged: LoggedOnce) -> bool:
        """Test the conversions of the pod's engine, and record those that passed. Returns whether all did. A mismatch
        is logged once; that a pod has no such endpoint is not."""
        passed: set[Endpoint] = set(pod.converts)
        for endpoint in _untested(pod):
            report = await self._test_conversion(pod, conversion_probes(endpoint))
            if report is None:
                passed |= {one for one in Endpoint if endpoint in (one, one.api.proven_with)}
            elif report.trust is PrefixTrust.MISMATCH:
                event = _WARNINGS.get(endpoint, _NOT_TRUSTED)
                logged.warn(event, pod=pod.id, endpoint=endpoint.value, reason=report.reason)
        if self.fleet.same_epoch(pod):
            self.fleet.learn(pod.id, converts=frozenset(passed))
        return passed.issuperset(_untested(pod))

    async def _test_pictures(self, pod: Pod) -> bool:
        """Test whether the pod identifies and counts pictures as the router does, and record it if so. False if the
        test must be repeated."""
        report = await self._test_conversion(
            pod, picture_probes, lambda prompt: bool(prompt.pictures) and not prompt.media_tokens
        )
        if self.fleet.same_epoch(pod) is None:
            return False
        if report is None:
            self.fleet.learn(pod.id, reads_pictures=True)
        elif report.trust is PrefixTrust.MISMATCH:
            event = "pictures not trusted; prompts are matched up to their first picture"
            log.warning(event, pod=pod.id, reason=report.reason)
        return report in (None, _NONE_READ) or report.trust is PrefixTrust.MISMATCH

    async def _test_conversion(
        self, pod: Pod, make: MakeGroups, reads: Callable[[PromptPrefix], bool] = lambda _: True
    ) -> ParityReport | None:
        """The first failure of a conversion's probes; None if all passed, of each group the first that the router
        reads. `reads`: whether it has read a probe exactly."""
        read = 0
        for group in make(pod.models[0], uuid.uuid4().hex, pod.block_size_tokens):
            if (found := await self._first_readable(group)) is None or not reads(found[1]):
                continue
            report = await self._compare(pod, *found)
            if report.trust is not PrefixTrust.TRUSTED:
                return report
            read += 1
        return None if read else _NONE_READ

    def _record(self, pod: Pod, report: ParityReport) -> None:
        now = self.fleet.same_epoch(pod)
        if now is None:
            return
        self.fleet.trust(pod.id, report.trust, report.reason)
        if report.trust is PrefixTrust.TRUSTED:
            log.info("self-test passed", pod=pod.id, tokens=report.tokens, hashes=report.hashes, reason=report.reason)

    async def test(self, pod: Pod) -> ParityReport:
        """Run one self-test: one short prompt and one output token."""
        nonce, block = uuid.uuid4().hex, pod.block_size_tokens
        found = await self._first_readable(one for model in pod.models for one in probes(model, nonce, block))
        if found is None:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the router has no tokenizer for this pod's models")
        report = await self._compare(pod, *found)
        if report.tokens is Parity.UNKNOWN and self.publishes_events(pod.id):
            # A pod that generates nothing. The events also show whether its model caches prefixes at all.
            found = await self._first_readable([embeddings_probe(pod.models[0], uuid.uuid4().hex, block)])
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
            advice = self.reader.advice(probe[1]["model"], prompt.tokens, engine_tokens or ())
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

    async def _first_readable(self, group: Iterable[Probe]) -> tuple[Probe, PromptPrefix] | None:
        """The first probe that the router can tokenize."""
        for endpoint, body in group:
            if (prompt := await self.reader.fingerprint(endpoint, body)) is not None:
                return (endpoint, body), prompt
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
        fields: dict[str, Any] = {name: body[name] for name in ("messages", "tools", "prompt") if name in body}
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
