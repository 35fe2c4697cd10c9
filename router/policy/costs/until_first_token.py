"""The terms that are time until the request's first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from router.policy.term import (
    CostTerm,
    Input,
    Placement,
    Side,
    Transfer,
    compute_inputs,
    decode_inputs,
    kv_inputs,
    link_inputs,
    prompt_inputs,
    read_ms,
    tier_reads,
    tokens_to_encode,
    transfer_inputs,
    work_ahead_inputs,
)
from router.types import Role


class QueueTerm(CostTerm):
    """How long until this pod starts on a new prompt?

    Work ahead of this request, in milliseconds:

        queue = max(0, F + W_in - time since step began) + W_behind
              + max(0, waiting at engine - our prompts then) * (c0 + c1 f + c2 f^2)        f = foreign_request_tokens

    Engines compute in steps. The current step takes its fixed part F and the prompts in it, W_in; prompts that arrive
    meanwhile (W_behind, and this request) are computed in the next step. Prompts count without their expected cache
    hits. The first part is 0 if no request of ours is on the pod. The last part counts requests of another origin: the
    waiting requests of the last scrape without those that were ours at that time.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    foreign_request_tokens: NonNegativeInt = 1024

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            at.work_ahead_ms + self._foreign_ms(at) if load.waiting > load.our_prompts else at.work_ahead_ms
            for at in placements
            for load in (at.standing.status.load,)
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        speed, load = at.pod.speed, at.load
        yield from work_ahead_inputs(at)
        yield Input("waiting at engine", "requests", load.waiting)
        yield Input("our prompts then", "requests", load.our_prompts)
        if load.foreign_waiting:
            yield Input("c0", "ms", speed.c0_ms)
            yield from compute_inputs(at)

    def _foreign_ms(self, at: Placement) -> float:
        return at.load.foreign_waiting * at.pod.speed.prefill_ms(self.foreign_request_tokens)


class PrefillTerm(CostTerm):
    """How long does this pod compute until the first token?

    The prefill of n prompt tokens of which p need no compute on the pod:

        prefill = F + c1 (n - p + e) + c2 (n^2 - p^2)

    e are the tokens of its pictures that the pod must encode first: those outside the p tokens that it has not seen.
    Encoding takes about as long as the prefill of as many tokens. F is the fixed part of the step that computes them:
    c0, or d0 + d1 b + d2 context if b requests decode in it. Source: docs/cost-model.md#prefill.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if placements[0].request.scene.pictures:
            return [
                at.standing.fixed_ms + at.compute_ms + at.pod.speed.c1_ms_per_token * _encoded(at) for at in placements
            ]
        return [at.standing.fixed_ms + at.compute_ms for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from prompt_inputs(at)
        yield Input("F", "ms", at.standing.fixed_ms)
        yield from compute_inputs(at)
        if at.request.scene.pictures:
            yield Input("e", "tokens to encode", _encoded(at))


def _encoded(at: Placement) -> int:
    return tokens_to_encode(at.request.scene.pictures, at.pod.id, at.cached_tokens)


class TierReadTerm(CostTerm):
    """How long does the pod read the cached KV that is outside its GPU?

    Cached KV in the pod's CPU or disk tier or in a remote store is read first, tier by tier:

        tier_read = sum over tiers: tier t0 + kv_bytes_per_token * tier tokens / tier B

    Engines read what they find even if computing it again would be faster, so the term prices the read in any case. A
    tier without a configured link costs nothing. Source: docs/cost-model.md#transfer.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            0.0
            if at.held_tokens[0] == at.own_tokens
            else read_ms(at.request.links, at.held_tokens, at.pod.kv_bytes_per_token)
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        for name, link, tokens in tier_reads(at.request.links, at.held_tokens):
            yield Input("kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token)
            yield Input(f"{name} tokens", "tokens", tokens)
            yield from link_inputs(name, link)


class TransferTerm(CostTerm):
    """How long does a pull of KV from another pod delay this request?

    KV from a peer travels while the pod computes the work ahead of this request; only the rest of the time counts:

        T_x = pull t0 + kv_bytes_per_token * pull tokens / pull B * (1 + pull concurrent)
        transfer = max(0, T_x - max(0, F + W_in - time since step began) - W_behind)

    `pull tokens` are those that the holder has beyond this pod, `pull concurrent` the other transfers of the holder.
    The work ahead is that of `queue`, without requests of another origin. A policy without this term plans no pulls.
    Source: docs/cost-model.md#transfer.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [max(at.pull.transfer_ms - at.work_ahead_ms, 0.0) if at.pull else 0.0 for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pull:
            yield from transfer_inputs("pull", at.pull, at)
            yield from work_ahead_inputs(at)


class HandoffTerm(CostTerm):
    """How long after the prefill does the decode pod have the KV?

    The part of a handoff that the client waits for:

        T_x = handoff t0 + kv_bytes_per_token * handoff tokens / handoff B * (1 + handoff concurrent)
        handoff = T_x - min(T_x - handoff t0, T_prefill) * (layers - 1) / layers

    `handoff tokens` are those that the decode pod does not hold itself (what it finds in a store is transferred, too),
    `handoff concurrent` the other transfers of the prefill pod, `T_prefill` its prefill. With `layers` above 1 the KV
    of a layer is sent while the next layers are computed, which hides all but one layer's share. A policy without this
    term plans no splits. Source: docs/cost-model.md#layer-by-layer.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    layers: PositiveInt = 1

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._visible_ms(at.handoff) if at.handoff else 0.0 for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.handoff:
            yield from transfer_inputs("handoff", at.handoff, at)
            yield Input("T_prefill", "ms", at.handoff.prefill_ms)

    def _visible_ms(self, handoff: Transfer) -> float:
        moving_ms = handoff.transfer_ms - handoff.link.t0_ms
        hidden_ms = min(moving_ms, handoff.prefill_ms) * (self.layers - 1) / self.layers
        return handoff.transfer_ms - hidden_ms


class KvWaitTerm(CostTerm):
    """How long until the pod has space for this prompt's KV?

    An engine admits a prompt when running requests have freed enough KV for it:

        used = KV in use * KV capacity
        short = used + context waiting + prompts before it + n + expected output - KV capacity        0 if all fits
        kv_wait = weight * short / used * expected output * (d0 + d1 * max(requests decoding, 1) + d2 * used)

    Running requests end one by one over the time that one of them takes, and free their KV as they end: a share of it
    is free after that share of the time. `KV in use` is the last scrape, as a share of the capacity; `prompts before
    it` are those without a first token. On a decode pod at which requests wait, `context waiting` is what our requests
    need beyond the KV in use. 0 if the capacity is unknown. Source: docs/cost-model.md#kv-space.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    weight: NonNegativeFloat = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            self._waiting_ms(at, capacity_tokens) if (capacity_tokens := at.pod.capacity_tokens) else 0.0
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.capacity_tokens:
            yield Input("n", "prompt tokens", at.request.prompt_tokens)
            yield from kv_inputs(at)
            yield from decode_inputs(at)
            yield Input("d0", "ms", at.pod.speed.d0_ms)
            if waiting_tokens := _context_waiting(at):
                yield Input("context waiting", "tokens", waiting_tokens)

    def _waiting_ms(self, at: Placement, capacity_tokens: int) -> float:
        request, used_tokens = at.request, at.load.kv_usage * capacity_tokens
        short_tokens = used_tokens + at.inflight.prefill_tokens + request.prompt_tokens + request.output_tokens
        short_tokens += _context_waiting(at) - capacity_tokens
        if short_tokens <= 0:
            return 0.0
        step_ms = at.pod.speed.step_ms(max(at.standing.decoding_requests, 1), used_tokens)
        return self.weight * short_tokens / max(used_tokens, 1.0) * request.output_tokens * step_ms


class HeldKvTerm(CostTerm):
    """How long until a prefill pod has space, if it holds KV that no decode pod has read?

    It holds the KV of each handoff until a decode pod has read it, or until a lease ends. Where that KV fills the pod,
    a new prompt waits, although the pod computes nothing:

        held = KV in use * KV capacity
        short = held + n - KV capacity                      0 if all fits
        held_kv = weight * short / held * 1000 * lease_s    0 on pods that decode: `kv_wait`

    Leases end one by one: a share of the KV is free after that share of the lease. 0 if the capacity is unknown.
    Source: docs/cost-model.md#kv-that-waits-for-decode-pods.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    weight: NonNegativeFloat = 1.0
    lease_s: NonNegativeFloat = 30.0
    """How long the engine holds KV that nobody reads: 30 for Nixl and p2p, 60 for TensorRT-LLM, 480 for Mooncake."""

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._waiting_ms(at, at.pod.capacity_tokens or 0) for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.role is Role.PREFILL and at.pod.capacity_tokens:
            yield Input("n", "prompt tokens", at.request.prompt_tokens)
            yield Input("KV capacity", "tokens", at.pod.capacity_tokens)
            yield Input("held", "tokens", at.load.kv_usage * at.pod.capacity_tokens)

    def _waiting_ms(self, at: Placement, capacity_tokens: int) -> float:
        held_tokens = at.load.kv_usage * capacity_tokens
        short_tokens = held_tokens + at.request.prompt_tokens - capacity_tokens
        if at.pod.role is not Role.PREFILL or short_tokens <= 0 or not held_tokens:
            return 0.0
        return self.weight * short_tokens / held_tokens * 1000 * self.lease_s


def _context_waiting(at: Placement) -> float:
    """What our requests at a decode pod need beyond its KV in use. Prefixes that they share count once for each: so
    only while the engine says that requests wait."""
    if at.pod.role is not Role.DECODE or not at.load.waiting:
        return 0.0
    needed_tokens = at.inflight.decode_tokens + at.load.waiting * at.request.output_tokens
    return max(needed_tokens - at.load.kv_usage * (at.pod.capacity_tokens or 0), 0.0)
