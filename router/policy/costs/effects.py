"""The terms that are not time until the first token: effects on other requests, and the pace of this one's decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from router.policy.term import (
    CostTerm,
    Input,
    Placement,
    Side,
    compute_inputs,
    decode_inputs,
    kv_inputs,
    prompt_inputs,
    work_ahead_inputs,
)
from router.types import Congestion, Role


class HotPrefixCreditTerm(CostTerm):
    """What is it worth to place a prefix that all traffic shares on one more pod?

    Credit for computing a prefix that the traffic shares anyway:

        hot_prefix_credit = -credit * (c1 (shared - p) + c2 (shared^2 - p^2))        0 if shared is at most p

    A prefix in more than one pod's fair share of the traffic must be cached on several pods. Its first computation on
    another pod is paid once and used by all later requests, so this request should not be kept away by it. Without this
    term an idle fleet sends every request with the same system prompt to one pod. Negative by design: it takes back
    part of `prefill`, never more.
    """

    side: ClassVar[Side] = Side.PREFILL
    credit: Annotated[float, Field(ge=0, le=1)] = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        shared_tokens = placements[0].request.shared_tokens
        if not shared_tokens:
            return [0.0] * len(placements)
        credit = self.credit
        return [
            -credit * at.pod.speed.compute_ms(at.cached_tokens, shared_tokens)
            if shared_tokens > at.cached_tokens
            else 0.0
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("p", "cached tokens", at.cached_tokens)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield from compute_inputs(at)


MIN_IDLE_SHARE = 0.05
"""A pod that is busy for a larger share of the time counts as idle for this share."""


class CongestionTerm(CostTerm):
    """How much does this prompt delay the prompts that come after it?

    While a pod is busy, every ms of compute delays all prompts that come until it is idle again:

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
    pod: NonNegativeFloat = 0.5
    fleet: NonNegativeFloat = 0.5

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
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


MAX_DELAY = 100.0
"""Maximum delay of other prompts that counts, in ms for each ms of compute."""


class EvictionTerm(CostTerm):
    """What is the KV worth that this request evicts from the pod?

    A full cache evicts as many tokens as a request adds, and a part of them would have been requested again:

        D = min(K * backlog, 100)        K = prompts / (1000 * max(1 - busy, 0.05))
        eviction = (reuse + learnt * R) * (1 + congestion * D) * c1 * (n - max(held here, shared))

    `reuse` is the mean number of requests that would have used an evicted token before its regular eviction. R, the
    `learnt reuse`, is that number as the router measures it, per model, from requests for blocks that have just left
    the caches. It does not depend on this request: the oldest blocks are evicted, of any class of work. Computing them
    again takes time, and delays the prompts that come after by D ms for each ms: `backlog` is the prefill that a pod
    has to compute now, the mean of the pods of this model; K is explained in `congestion`. In an idle fleet D is 0,
    near saturation 10 and more.
    Copies that a pull brings count as well: a second copy of a prefix takes the space of another prefix. The prefix
    that all traffic shares counts as held: every pod needs space for it once, whichever request brings it.
    """

    side: ClassVar[Side] = Side.PREFILL
    reuse: NonNegativeFloat = 0.25
    learnt: NonNegativeFloat = 0.0
    congestion: NonNegativeFloat = 0.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        request, costs_ms = placements[0].request, []
        n, shared_tokens = request.prompt_tokens, request.shared_tokens
        reuse = self.reuse + self.learnt * request.scene.learnt_reuse
        if self.congestion:
            reuse *= 1 + self.congestion * self._delay(request.scene.congestion)
        for at in placements:
            held_tokens = at.own_tokens
            if held_tokens < shared_tokens:
                held_tokens = shared_tokens
            costs_ms.append(reuse * at.pod.speed.c1_ms_per_token * (n - held_tokens))
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("n", "prompt tokens", at.request.prompt_tokens)
        yield Input("held here", "tokens", at.own_tokens)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
        if self.learnt:
            yield Input("learnt reuse", "requests", at.request.scene.learnt_reuse)
        if self.congestion:
            yield from congestion_inputs(at)

    def _delay(self, congestion: Congestion) -> float:
        """Delay of other prompts, in ms for each ms of compute."""
        return min(prompts_reached_per_ms(congestion) * congestion.backlog_ms, MAX_DELAY)


class DecodeTerm(CostTerm):
    """How much slower does a request decode on this pod than on another?

    Slow-down of this request's own decoding by the other requests on the pod, over its expected output:

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
    weight: NonNegativeFloat = 0.25
    pace: NonNegativeFloat = 0.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weighted_tokens = self.weight * placements[0].request.output_tokens
        costs_ms = [weighted_tokens * at.standing.slowdown_ms for at in placements]
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


class DecodeInterferenceTerm(CostTerm):
    """How much does this prompt delay the requests that already decode on the pod?

    While a prompt is computed, every request that decodes on the pod waits for the same time:

        decode_interference = weight * requests decoding * (c1 (n - p) + c2 (n^2 - p^2))

    `weight` is the milliseconds of this request's time to first token that one millisecond of another request is worth.
    The term favours prefill pods, where no request decodes. Source: docs/cost-model.md#a-step.
    """

    side: ClassVar[Side] = Side.PREFILL
    weight: NonNegativeFloat = 0.02

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weight = self.weight
        return [weight * at.standing.decoding_requests * at.compute_ms for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from prompt_inputs(at)
        yield Input("requests decoding", "requests", at.standing.decoding_requests)
        yield from compute_inputs(at)


class LentPrefillTerm(CostTerm):
    """How much does an answer on a prefill pod delay the prompts that come to it?

    A prefill pod answers alone only where all decode pods are full. While it does, each step of its prompts takes a
    decode step more:

        lent_prefill = weight * expected output * d0 / 1000 * prompts here * (d0 + d1)        0 on other pods

    `prompts here` is the rate of prompts at the pod. Source: docs/cost-model.md#full-decode-pods.
    """

    side: ClassVar[Side] = Side.DECODE
    weight: NonNegativeFloat = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._delay_ms(at) if at.pod.role is Role.PREFILL else 0.0 for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.role is Role.PREFILL:
            yield Input("expected output", "tokens", at.request.output_tokens)
            yield Input("d0", "ms", at.pod.speed.d0_ms)
            yield Input("d1", "ms/request", at.pod.speed.d1_ms_per_request)
            yield Input("prompts here", "prompts/s", at.inflight.prompts_per_s)

    def _delay_ms(self, at: Placement) -> float:
        speed = at.pod.speed
        answer_s = at.request.output_tokens * speed.d0_ms / 1000
        return self.weight * answer_s * at.inflight.prompts_per_s * (speed.d0_ms + speed.d1_ms_per_request)


class KvPressureTerm(CostTerm):
    """What is the KV memory worth that this request takes from the pod while it is served?

    KV of running requests cannot be evicted: the more of it on a pod, the less cache is left for other requests:

        kv_pressure = weight * c1 * (n + expected output) * used / (1 - used)
        used = KV in use * max(1, our requests / requests at engine) + prompts before it / KV capacity

    `KV in use` and `requests at engine` are the last scrape, up to a second old. With `weight` 0.3, a pod half full of
    running requests costs as much as computing 0.3 of this prompt again, and one that is 90 % full as much as 2.7 of
    it. Without this term requests follow their prefixes until their KV fills the pod, which evicts the prefixes of the
    next ones: predicted hits fail, and waiting makes it worse. `used` is at most 0.95. 0 if the capacity is unknown.
    """

    side: ClassVar[Side] = Side.DECODE
    weight: NonNegativeFloat = 0.3

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        request, weight = placements[0].request, self.weight
        needed_tokens = request.prompt_tokens + request.output_tokens
        return [weight * at.pod.speed.c1_ms_per_token * needed_tokens * at.standing.kv_pressure for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.capacity_tokens:
            yield Input("n", "prompt tokens", at.request.prompt_tokens)
            yield Input("expected output", "tokens", at.request.output_tokens)
            yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
            yield from kv_inputs(at)
            yield Input("our requests", "requests", at.inflight.requests)
            yield Input("requests at engine", "requests", at.load.running + at.load.waiting)


class WarmUpTerm(CostTerm):
    """How much more does a queue count on a pod that has just started or recovered?

    Work queued on a pod that has just become ready counts more at first, then less and less:

        warm_up = weight * (1 - age / slow_start_s) * queued prefill        0 from slow_start_s on

    A process that has just started compiles, captures and allocates on its first requests; one that was ejected may
    still fail. Both are idle and would get all requests at once. The first request to such a pod finds no queue and
    costs nothing more; for the next ones the queue counts 1 + `weight` times at age 0. Source: slow start as in
    Envoy's and NGINX's load balancing.
    """

    side: ClassVar[Side] = Side.PREFILL
    weight: NonNegativeFloat = 1.0
    slow_start_s: PositiveFloat = 10.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        slow_start_s, now_s = self.slow_start_s, placements[0].request.now_s
        return [
            0.0
            if (since_s := at.pod.ready_since_s) is None or now_s - since_s >= slow_start_s
            else self._slowed_ms(at, now_s - since_s)
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        since_s = at.pod.ready_since_s
        if since_s is not None and at.request.now_s - since_s < self.slow_start_s:
            yield Input("age", "s", max(at.request.now_s - since_s, 0.0))
            yield Input("queued prefill", "ms", at.inflight.queue_ms(at.request.now_s))

    def _slowed_ms(self, at: Placement, age_s: float) -> float:
        share = 1.0 - max(age_s, 0.0) / self.slow_start_s
        return self.weight * share * at.inflight.queue_ms(at.request.now_s)
