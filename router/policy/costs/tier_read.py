"""How long does the pod read the cached KV that is outside its GPU?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from router.policy.term import CostTerm, Input, Placement, Side, link_inputs
from router.types import Link


class TierReadTerm(CostTerm):
    """Cached KV in the pod's CPU or disk tier or in a remote store is read first, tier by tier:

        tier_read = sum over tiers: tier t0 + kv_bytes_per_token * tier tokens / tier B

    Engines read what they find even if computing it again would be faster, so the term prices the read in any case. A
    tier without a configured link costs nothing. Source: docs/cost-model.md#transfer.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [0.0 if at.held_tokens[0] == at.own_tokens else _reads_ms(at) for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        for name, link, tokens in _reads(at):
            yield Input("kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token)
            yield Input(f"{name} tokens", "tokens", tokens)
            yield from link_inputs(name, link)


def _reads_ms(at: Placement) -> float:
    ms = 0.0
    for _, link, tokens in _reads(at):
        ms += link.transfer_ms(tokens * at.pod.kv_bytes_per_token)
    return ms


def _reads(at: Placement) -> Iterator[tuple[str, Link, int]]:
    """Name, link and held tokens of every tier that is read."""
    links, (_, cpu_tokens, disk_tokens, remote_tokens) = at.request.links, at.held_tokens
    tiers = (
        ("cpu tier", links.cpu, cpu_tokens),
        ("disk tier", links.disk, disk_tokens),
        ("remote tier", links.remote, remote_tokens),
    )
    for name, link, tokens in tiers:
        if link and tokens:
            yield name, link, tokens
