"""How much slower does a request decode on this pod than on another?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.costs.congestion import MIN_IDLE_SHARE
from router.policy.term import CostTerm, Input, Placement, Side, decode_inputs


class DecodeTerm(CostTerm):
    """Slow-down of this request's own decoding by the other requests on the pod, over its expected output:

        decode = weight * expected output * (d1 * requests decoding + d2 * context in flight)
               + pace * expected output * d0 / max(1 - busy when as fast, 0.05)      only if pods differ in speed

    `requests decoding` is the last scrape of the engine or our ledger, whichever is more: a scrape lags, a ledger does
    not include other routers. `context in flight` counts the tokens of our requests. `expected output` is the mean
    length of the model's latest answers, or the client's limit if it is less. `weight` is the milliseconds of time to
    first token that one millisecond of decoding is worth. Source: docs/cost-model.md#a-step.

    While a pod computes prompts, its other requests wait for their next token: a step of d0 takes d0 / (1 - busy).
    `busy when as fast` is the share of time that the pods with about the same c1 have a prompt without a
    first token, their mean over some minutes. `pace` is the milliseconds of time to first token that one of these
    milliseconds is worth. Without it fast pods get all long prompts, and the requests that decode there wait for them.
    Between pods of one speed it makes no difference and is left out; so it adds nothing in a fleet of equal pods. Pods
    count as equal if none has 1.5 times the c1 of another: one that is a little slower must not lose its sessions.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.25
    pace: NonNegativeFloat = 0.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        weighted_tokens, costs_ms = self.weight * placements[0].request.output_tokens, []
        for at in placements:
            speed = at.pod.speed
            step_ms = speed.d1_ms_per_request * at.decoding_requests
            step_ms += speed.d2_ms_per_context_token * at.inflight.context_tokens
            costs_ms.append(weighted_tokens * step_ms)
        if self.pace and placements[0].request.scene.congestion.busy_shares:
            return [cost_ms + self._pace_ms(at) for cost_ms, at in zip(costs_ms, placements, strict=True)]
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from decode_inputs(at)
        yield Input("context in flight", "tokens", at.inflight.context_tokens)
        if self.pace and at.request.scene.congestion.busy_shares:
            yield Input("d0", "ms", at.pod.speed.d0_ms)
            yield Input("busy when as fast", "share of time", _busy_share(at))

    def _pace_ms(self, at: Placement) -> float:
        step_ms = at.pod.speed.d0_ms / max(1 - _busy_share(at), MIN_IDLE_SHARE)
        return self.pace * at.request.output_tokens * step_ms


def _busy_share(at: Placement) -> float:
    """The mean busy share of the pods that are as fast; 0 for a pod that computes no prompts."""
    return at.request.scene.congestion.busy_shares.get(at.pod.id, 0.0)
