"""How much does this prompt delay the prompts that come after it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs, prompt_inputs
from router.policy.work_ahead import work_ahead_inputs
from router.types import Congestion

MIN_IDLE_SHARE = 0.05
"""A pod that is busy for a larger share of the time counts as idle for this share."""


class CongestionTerm(CostTerm):
    """While a pod is busy, every ms of compute delays all prompts that come until it is idle again:

        K = prompts / (1000 * max(1 - busy, 0.05))
        x = c1 (n - max(p, shared)) + c2 (n^2 - max(p, shared)^2)
        W = max(0, F + W_in - time since step began) + W_behind
        congestion = K * x * (pod * (W + x / 2) + fleet * backlog)

    `prompts` is the rate of prompts per pod and second, `busy` the share of time that a pod has a prompt without a
    first token, `backlog` the prefill that a pod has to compute now: means of the pods that compute prompts for this
    model. W is the work ahead, as in `queue`. K is the number of later prompts that a ms of delay reaches,
    for each ms of work ahead: the marginal delay in an M/G/1 queue. That holds for work that stays on its pod; a router
    spreads later prompts over all pods, so a part is counted at the backlog of the fleet. 0 in an idle fleet.
    Source: Krishnan 1990; Hyytiä, Aalto and Penttinen 2012 (first step of policy iteration).
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    pod: NonNegativeFloat = 0.5
    fleet: NonNegativeFloat = 0.5

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        request = placements[0].request
        congestion = request.scene.congestion
        n, shared_tokens = request.prompt_tokens, request.shared_tokens
        reached_per_ms = prompts_reached_per_ms(congestion)
        if not reached_per_ms:
            return [0.0] * len(placements)
        pod = self.pod * reached_per_ms
        fleet_ms = self.fleet * reached_per_ms * congestion.backlog_ms
        costs_ms = []
        for at in placements:
            x_ms = at.compute_ms
            if at.cached_tokens < shared_tokens:  # it is computed once, whichever prompt brings it
                x_ms = at.pod.speed.compute_ms(shared_tokens, n)
            costs_ms.append(x_ms * (pod * (at.work_ahead_ms + x_ms / 2) + fleet_ms))
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from prompt_inputs(at)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield from compute_inputs(at)
        yield from work_ahead_inputs(at)
        yield from congestion_inputs(at)


def prompts_reached_per_ms(congestion: Congestion) -> float:
    """Later prompts that a ms of delay reaches, for each ms of work ahead: arrivals until a pod is idle again."""
    return congestion.prompts_per_s / 1000 / max(1 - congestion.busy_share, MIN_IDLE_SHARE)


def congestion_inputs(at: Placement) -> Iterator[Input]:
    """How busy the fleet is with prompts."""
    congestion = at.request.scene.congestion
    yield Input("prompts", "prompts/s and pod", congestion.prompts_per_s)
    yield Input("busy", "share of time", congestion.busy_share)
    yield Input("backlog", "ms", congestion.backlog_ms)
