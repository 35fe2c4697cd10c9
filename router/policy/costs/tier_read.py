"""How long does the pod read what it holds outside its GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.policy.term import CostTerm, Placement, Side
from router.types import Link


class TierReadTerm(CostTerm):
    """Cached KV that lies in the pod's CPU or disk tier or in a store must be read first, tier by tier:

        tier_read = sum over tiers: t0(tier) + kv_bytes_per_token * tokens there / B(tier)

    Engines read whatever they find, also where computing it anew would be faster: so this is what it takes, whether it
    pays or not. Source: reference/cost-model.md 4.2.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [0.0 if at.held_tokens[0] == at.own_tokens else _reads_ms(at) for at in placements]


def _reads_ms(at: Placement) -> float:
    (_, cpu, disk, remote), links = at.held_tokens, at.links
    return _read_ms(at, links.cpu, cpu) + _read_ms(at, links.disk, disk) + _read_ms(at, links.remote, remote)


def _read_ms(at: Placement, link: Link | None, tokens: int) -> float:
    return link.transfer_ms(tokens * at.pod.kv_bytes_per_token) if tokens and link else 0.0
