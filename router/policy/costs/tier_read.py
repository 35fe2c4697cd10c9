"""How long does the pod read the cached KV that is outside its GPU?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from router.policy.inputs import link_inputs
from router.policy.term import CostTerm, Input, Placement, Side
from router.types import Link, Tier


class TierReadTerm(CostTerm):
    """Cached KV in the pod's CPU or disk tier or in a remote store is read first, tier by tier:

        tier_read = sum over tiers: t0(tier) + kv_bytes_per_token * tokens in it / B(tier)

    Engines read what they find even if computing it again would be faster, so the term prices the read in any case. A
    tier without a configured link costs nothing. Source: reference/cost-model.md 4.2.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [0.0 if at.held_tokens[0] == at.own_tokens else _reads_ms(at) for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        for tier, link in ((Tier.CPU, at.links.cpu), (Tier.DISK, at.links.disk), (Tier.REMOTE, at.links.remote)):
            if (tokens := at.held_tokens[tier]) and link:
                yield Input("kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token)
                yield Input(f"held in {tier.name.lower()}", "tokens", tokens)
                yield from link_inputs(f"{tier.name.lower()} tier", link)


def _reads_ms(at: Placement) -> float:
    (_, cpu, disk, remote), links = at.held_tokens, at.links
    return _read_ms(at, links.cpu, cpu) + _read_ms(at, links.disk, disk) + _read_ms(at, links.remote, remote)


def _read_ms(at: Placement, link: Link | None, tokens: int) -> float:
    return link.transfer_ms(tokens * at.pod.kv_bytes_per_token) if tokens and link else 0.0
