"""How is a pod's parity tested, and when?

Whenever a pod is READY and not TRUSTED: when it joins, after a restart, and every so often for as long as the test
fails. The pod serves meanwhile; only prefix matching is off for it. `parity.py` judges; this file asks and waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
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
    expected_blocks,
    judge_hashes,
    judge_tokens,
    probes,
)
from router.feeds.supervise import each_pod, pause
from router.fleet.fleet import Fleet
from router.stores.prefix_store import PrefixStore
from router.types import Endpoint, Pod, PodId, PodState, PrefixTrust, PromptPrefix

POLL_S = 0.02

Fingerprint: TypeAlias = Callable[[Endpoint, Mapping[str, Any]], Awaitable[PromptPrefix | None]]
"""(endpoint, decoded body) to the router's own prefix; None where the router cannot read such a prompt."""

_HEADLINES = {
    PrefixTrust.TRUSTED: "prefix parity holds",
    PrefixTrust.MISMATCH: "prefix parity fails, matching is off for this pod until it holds",
    PrefixTrust.UNTESTED: "prefix parity is unproven, matching is off for this pod until it is",
}

log = structlog.get_logger()


class ParityFeed:
    """Tests pods and tells the fleet whom to trust.

    `publishes_events(pod_id)`: is somebody subscribed to this pod's KV events? If so, the probe's blocks must show up
    in `store` within `events_timeout_s` of the answer."""

    def __init__(
        self,
        fleet: Fleet,
        store: PrefixStore,
        client: httpx.AsyncClient,
        fingerprint: Fingerprint,
        publishes_events: Callable[[PodId], bool],
        *,
        retest_s: float = 30.0,
        answer_timeout_s: float = 30.0,
        events_timeout_s: float = 5.0,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._client = client
        self._fingerprint = fingerprint
        self._publishes_events = publishes_events
        self._retest_s = retest_s
        self._answer_timeout_s = answer_timeout_s
        self._events_timeout_s = events_timeout_s

    async def run(self) -> None:
        """Test until cancelled."""
        await each_pod("parity", self._fleet, self._watch)

    async def _watch(self, pod_id: PodId, news: asyncio.Event) -> None:
        while True:
            status = self._fleet.status(pod_id)
            if status and status.state is PodState.READY and status.pod.trust is not PrefixTrust.TRUSTED:
                self._settle(status.pod, await self.test(status.pod))
            await pause(news, self._retest_s)

    def _settle(self, pod: Pod, report: ParityReport) -> None:
        now = self._fleet.status(pod.id)
        if now is None or now.pod.epoch != pod.epoch:
            return  # the answer is about a life that is over
        news = (report.trust, report.reason) != (now.pod.trust, self._fleet.trust_reason(pod.id))
        self._fleet.trust(pod.id, report.trust, report.reason)
        if news:
            say = log.warning if report.trust is PrefixTrust.MISMATCH else log.info
            say(_HEADLINES[report.trust], pod=pod.id, tokens=report.tokens, hashes=report.hashes, reason=report.reason)

    async def test(self, pod: Pod) -> ParityReport:
        """One self-test. Costs the pod one short prompt and one token."""
        found = await self._readable_probe(pod)
        if found is None:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the router cannot read prompts for this model")
        probe, prompt = found
        try:
            answer = await self._send(pod, probe)
        except UpstreamError as error:
            return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, f"the probe was not served: {error}")
        engine_tokens = prompt_token_ids(answer) or await self._tokenized_by(pod, probe)
        report = judge_tokens(prompt.tokens, engine_tokens, prompt_token_count(answer))
        if report.tokens is Parity.MISMATCH:
            return report
        if not self._publishes_events(pod.id):
            return replace(report, hashes=Parity.NO_EVENTS)
        expected = expected_blocks(prompt, pod.block_size_tokens)
        known_blocks = await self._announced(pod.id, prompt, expected)
        return judge_hashes(report, known_blocks, expected, self._store.rejected_reason(pod.id))

    async def _readable_probe(self, pod: Pod) -> tuple[Probe, PromptPrefix] | None:
        """The first probe that the router can read, under any of the pod's names."""
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
        return await post(self._client, pod, endpoint.value, body, self._answer_timeout_s)

    async def _tokenized_by(self, pod: Pod, probe: Probe) -> list[int] | None:
        """The probe's tokens from the engine's /tokenize, where it has one that takes such a prompt."""
        adapter = ENGINES[pod.engine]
        endpoint, body = probe
        field = "messages" if endpoint is Endpoint.CHAT else "prompt"
        call = adapter.tokenize_request(body["model"], {field: body[field]})
        if call is None:
            return None
        try:
            return adapter.parse_tokens(await post(self._client, pod, *call, self._answer_timeout_s))
        except UpstreamError:
            return None

    async def _announced(self, pod_id: PodId, prompt: PromptPrefix, expected: int) -> int:
        """Blocks of the prompt that the pod has announced, once it is all of them or time is up."""
        try:
            async with asyncio.timeout(self._events_timeout_s):
                # The store tells nobody of blocks: it learns of thousands a second.
                while not self._store.rejected_reason(pod_id):
                    if await self._store.known_blocks(pod_id, prompt) >= expected:
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass  # what came late did not come; the judgement says so
        return await self._store.known_blocks(pod_id, prompt)
