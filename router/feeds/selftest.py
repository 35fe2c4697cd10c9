"""Runs the parity self-test of each pod that is READY and not TRUSTED: when it joins, after a restart, and at intervals
while the test fails.

The pod serves meanwhile, without prefix matching. `parity.py` evaluates the results.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import httpx
import structlog

from router.engines.engine_catalog import ENGINES
from router.engines.openai import prompt_token_count, prompt_token_ids
from router.errors import UpstreamError
from router.feeds.http_client import post
from router.feeds.parity import (
    Parity,
    ParityReport,
    Probe,
    compare_hashes,
    compare_tokens,
    expected_blocks,
    probes,
)
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.stores.prefix_store import PrefixStore
from router.types import Endpoint, Pod, PodId, PodState, PrefixTrust, PromptPrefix

POLL_S = 0.02

Fingerprint: TypeAlias = Callable[[Endpoint, Mapping[str, Any]], Awaitable[PromptPrefix | None]]
"""(endpoint, decoded body) to the router's prefix of it; None if the router cannot tokenize such a prompt."""

_EVENTS = {
    PrefixTrust.TRUSTED: "self-test passed",
    PrefixTrust.MISMATCH: "self-test failed; prefix matching disabled for this pod",
    PrefixTrust.UNTESTED: "self-test inconclusive; prefix matching disabled for this pod",
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SelfTestTiming:
    """Times of the self-test."""

    retest_s: float = 30.0
    answer_timeout_s: float = 30.0
    events_timeout_s: float = 5.0
    """How long after the answer the pod's KV events may announce the blocks of the probe."""


class ParityFeed:
    """Tests pods and updates their trust in the fleet. `publishes_events(pod_id)`: whether the index receives the pod's
    KV events; if so, they must announce the probe's blocks."""

    def __init__(
        self,
        fleet: Fleet,
        store: PrefixStore,
        client: httpx.AsyncClient,
        fingerprint: Fingerprint,
        publishes_events: Callable[[PodId], bool],
        timing: SelfTestTiming,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._client = client
        self._fingerprint = fingerprint
        self._publishes_events = publishes_events
        self._timing = timing

    async def run(self) -> None:
        """Test until cancelled."""
        await each_pod("parity", self._fleet, self._watch)

    async def _watch(self, pod_id: PodId, changed: asyncio.Event) -> None:
        while True:
            status = self._fleet.status(pod_id)
            if status and status.state is PodState.READY and status.pod.trust is not PrefixTrust.TRUSTED:
                self._record(status.pod, await self.test(status.pod))
            await pause(changed, self._timing.retest_s)

    def _record(self, pod: Pod, report: ParityReport) -> None:
        now = self._fleet.status(pod.id)
        if now is None or now.pod.epoch != pod.epoch:
            return  # the pod has restarted since
        is_new = (report.trust, report.reason) != (now.pod.trust, self._fleet.trust_reason(pod.id))
        self._fleet.trust(pod.id, report.trust, report.reason)
        if is_new:
            log_line = log.warning if report.trust is PrefixTrust.MISMATCH else log.info
            log_line(
                _EVENTS[report.trust], pod=pod.id, tokens=report.tokens, hashes=report.hashes, reason=report.reason
            )

    async def test(self, pod: Pod) -> ParityReport:
        """Run one self-test: one short prompt and one output token."""
        found = await self._readable_probe(pod)
        if found is None:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the router has no tokenizer for this pod's models")
        probe, prompt = found
        try:
            answer = await self._send(pod, probe)
        except UpstreamError as error:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, f"the probe request failed: {error}")
        engine_tokens = prompt_token_ids(answer) or await self._tokenized_by(pod, probe)
        report = compare_tokens(prompt.tokens, engine_tokens, prompt_token_count(answer))
        if report.tokens is Parity.MISMATCH:
            return report
        if not self._publishes_events(pod.id):
            return replace(report, hashes=Parity.NO_EVENTS)
        expected = expected_blocks(prompt, pod.block_size_tokens)
        known_blocks = await self._announced(pod.id, prompt, expected)
        return compare_hashes(report, known_blocks, expected, self._store.rejected_reason(pod.id))

    async def _readable_probe(self, pod: Pod) -> tuple[Probe, PromptPrefix] | None:
        """The first probe that the router can tokenize, for any model of the pod."""
        nonce = uuid.uuid4().hex
        for model in pod.models:
            for endpoint, body in probes(model, nonce, pod.block_size_tokens):
                prompt = await self._fingerprint(endpoint, body)
                if prompt is not None:
                    return (endpoint, body), prompt
        return None

    async def _send(self, pod: Pod, probe: Probe) -> bytes:
        endpoint, body = probe
        if ENGINES[pod.engine].returns_token_ids:
            body = {**body, "return_token_ids": True}
        return await post(self._client, pod, endpoint.value, body, self._timing.answer_timeout_s)

    async def _tokenized_by(self, pod: Pod, probe: Probe) -> list[int] | None:
        """The probe's tokens from the engine's /tokenize; None if the engine has none or it fails."""
        adapter = ENGINES[pod.engine]
        endpoint, body = probe
        field = "messages" if endpoint is Endpoint.CHAT else "prompt"
        call = adapter.tokenize_request(body["model"], {field: body[field]})
        if call is None:
            return None
        try:
            return adapter.parse_tokens(await post(self._client, pod, *call, self._timing.answer_timeout_s))
        except UpstreamError:
            return None

    async def _announced(self, pod_id: PodId, prompt: PromptPrefix, expected: int) -> int:
        """How many blocks of the prompt the pod has announced, when all have arrived or after the timeout."""
        try:
            async with asyncio.timeout(self._timing.events_timeout_s):
                # Polled: the store has no callback for blocks, of which thousands arrive each second.
                while not self._store.rejected_reason(pod_id):
                    if await self._store.known_blocks(pod_id, prompt) >= expected:
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass  # the evaluation reports missing blocks
        return await self._store.known_blocks(pod_id, prompt)
