"""How is a pod told to fetch from a peer what it would have to compute?

One request to one pod, whose body names the peer in the pod's own dialect. A pod that refuses such a body, or fails
over it, is the next candidate's business: that one gets the client's own. This file never chooses a holder.
"""

from __future__ import annotations

import secrets

from router.decision import Candidate
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Pair
from router.errors import HandoffFailed
from router.fleet.fleet import Fleet
from router.observe.calibrator import Calibrator
from router.policy.retry import RETRY_STATUSES
from router.proxy.request_context import RequestContext
from router.proxy.split import Facts
from router.proxy.upstream import Reply, UpstreamSender
from router.types import Pod, PodId


class PullExecutor:
    """Carries out `Direct` plans that have a `pull`."""

    def __init__(self, fleet: Fleet, sender: UpstreamSender, facts: Facts) -> None:
        self._fleet = fleet
        self._sender = sender
        self._facts = facts

    async def open(self, context: RequestContext, pod: Pod, holder: PodId, *, last: bool) -> Reply:
        """The pod's answer. Raises `UpstreamError`."""
        body = self._body(context.request.body, pod, holder)
        if body is None:
            return await self._sender.send(context.inbound, pod, context.request.body)
        told = body
        reply = await self._sender.send_once(context.inbound, pod, lambda: told)
        if reply.status >= 400 and reply.status not in RETRY_STATUSES and not last:
            reply.close()
            raise HandoffFailed(f"pod {pod.id} answered {reply.status} to a pull from {holder}")
        return reply

    def learn(self, calibrator: Calibrator, candidate: Candidate, elapsed_ms: float, beside: int) -> None:
        """What a pull has shown of its link: it and the rest of the prompt took so long, on a pod that was idle."""
        plan, prefill_ms = candidate.plan, dict(candidate.cost.parts).get("prefill", 0.0)
        status = self._fleet.status(plan.pull.holder) if plan.pull else None
        if plan.pull and status:
            calibrator.observe_transfer(status.pod, plan.pod, plan.pull.pulled_tokens, elapsed_ms - prefill_ms, beside)

    def _body(self, body: bytes, pod: Pod, holder: PodId) -> bytes | None:
        """None where the holder has gone meanwhile, or cannot be named."""
        status = self._fleet.status(holder)
        facts = self._facts(status.pod, pod.pulls) if status else None
        if status is None or facts is None:
            return None
        return DIALECTS[pod.pulls].pull_body(body, Pair(status.pod, pod, secrets.randbits(63), facts))
