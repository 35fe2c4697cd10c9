"""How is a pod told to fetch from a peer what it would have to compute?

One request to one pod, whose body names the peer in the pod's own dialect. A pod that refuses such a body, or fails
over it, is the next candidate's business: that one gets the client's own. This file never chooses a holder.
"""

from __future__ import annotations

import secrets

from router.decision import Candidate
from router.engines.catalog import DIALECTS
from router.engines.handoff.dialect import Pair
from router.errors import HandoffFailed
from router.fleet.fleet import Fleet
from router.observe.learning import Learning
from router.policy.retry import RETRY_STATUSES
from router.proxy.legs import Legs
from router.proxy.split import Facts
from router.proxy.story import Story
from router.proxy.upstream import Reply
from router.types import Pod, PodId


class Pulls:
    """Carries out `Direct` plans that have a `pull`."""

    def __init__(self, fleet: Fleet, legs: Legs, facts: Facts) -> None:
        self._fleet = fleet
        self._legs = legs
        self._facts = facts

    async def open(self, story: Story, pod: Pod, holder: PodId, *, last: bool) -> Reply:
        """The pod's answer. Raises `UpstreamError`."""
        body = self._body(story.request.body, pod, holder)
        if body is None:
            return await self._legs.send(story.inbound, pod, story.request.body)
        told = body
        reply = await self._legs.send_once(story.inbound, pod, lambda: told)
        if reply.status >= 400 and reply.status not in RETRY_STATUSES and not last:
            reply.close()
            raise HandoffFailed(f"pod {pod.id} answered {reply.status} to a pull from {holder}")
        return reply

    def learn(self, learning: Learning, candidate: Candidate, elapsed_ms: float, beside: int) -> None:
        """What a pull has shown of its link: it and the rest of the prompt took so long, on a pod that was idle."""
        plan, prefill_ms = candidate.plan, dict(candidate.cost.parts).get("prefill", 0.0)
        status = self._fleet.status(plan.pull.holder) if plan.pull else None
        if plan.pull and status:
            learning.moved(status.pod, plan.pod, plan.pull.pulled_tokens, elapsed_ms - prefill_ms, beside)

    def _body(self, body: bytes, pod: Pod, holder: PodId) -> bytes | None:
        """None where the holder has gone meanwhile, or cannot be named."""
        status = self._fleet.status(holder)
        facts = self._facts(status.pod, pod.pulls) if status else None
        if status is None or facts is None:
            return None
        return DIALECTS[pod.pulls].pull_body(body, Pair(status.pod, pod, secrets.randbits(63), facts))
