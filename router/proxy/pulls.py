"""Requests whose pod pulls KV from a peer instead of computing it.

One request to one pod; its body names the peer in the pod's dialect. If the pod refuses that body or fails, the next
candidate receives the client's own body.
"""

from __future__ import annotations

import secrets

from router.decision import Candidate
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Pair
from router.errors import HandoffFailed
from router.policy.retry import RETRY_STATUSES
from router.proxy.dependencies import ProxyDependencies
from router.proxy.request_context import RequestContext
from router.proxy.upstream import Reply, UpstreamSender
from router.types import Pod, PodId


class PullExecutor:
    """Carries out `Direct` plans that have a `pull`."""

    def __init__(self, needs: ProxyDependencies, sender: UpstreamSender) -> None:
        self._needs = needs
        self._sender = sender

    async def open(self, context: RequestContext, pod: Pod, holder: PodId, *, last: bool) -> Reply:
        """The pod's response. Raises `UpstreamError`."""
        body = self._body(context.request.body, pod, holder)
        if body is None:
            return await self._sender.send(context.inbound, pod, context.request.body)
        pull_body = body
        reply = await self._sender.send_once(context.inbound, pod, lambda: pull_body)
        if reply.status >= 400 and reply.status not in RETRY_STATUSES and not last:
            reply.close()
            raise HandoffFailed(f"pod {pod.id}: status {reply.status} to a pull from pod {holder}")
        return reply

    def observe(self, candidate: Candidate, elapsed_ms: float, concurrent: int) -> None:
        """Calibrate the link: pulling and computing the rest of the prompt took `elapsed_ms` on an idle pod."""
        plan, prefill_ms = candidate.plan, dict(candidate.cost.parts).get("prefill", 0.0)
        status = self._needs.fleet.status(plan.pull.holder) if plan.pull else None
        if plan.pull and status:
            tokens, transfer_ms = plan.pull.pulled_tokens, elapsed_ms - prefill_ms
            self._needs.calibrator.observe_transfer(status.pod, plan.pod, tokens, transfer_ms, concurrent)

    def _body(self, body: bytes, pod: Pod, holder: PodId) -> bytes | None:
        """The client's body with the request to pull; None if the holder is gone or its facts are unknown."""
        status = self._needs.fleet.status(holder)
        facts = self._needs.handoff_facts(status.pod, pod.pulls) if status else None
        if status is None or facts is None:
            return None
        return DIALECTS[pod.pulls].pull_body(body, Pair(status.pod, pod, secrets.randbits(63), facts))
