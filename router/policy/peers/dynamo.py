"""Where would NVIDIA Dynamo's KV router send this?"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import NonNegativeFloat

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, lowest_first, uncached_tokens
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class Dynamo(Configurable):
    """Dynamo's linear cost, at its default router temperature of 0:

        adj_prefill_i = max(active_prefill_blocks_i + incoming_blocks - overlap_blocks_i, 0)
        cost_i        = prefill_load_scale * adj_prefill_i + decode_blocks_i
        argmin

    Counted in tokens: one factor on everything, hence the same order. A hit never exceeds the prompt, so that nothing
    is below zero. Hits count in full in every tier (Dynamo discounts host and disk). Decode blocks are the prompts in
    flight, each in full (Dynamo counts blocks that several share once). Source: reference/algorithms.md 1.4.
    """

    prefill_load_scale: NonNegativeFloat = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        ranked = lowest_first(scene, candidates, lambda candidate: self._cost_tokens(scene, candidate))
        return ranked, f"lowest linear cost, {self._cost_tokens(scene, ranked[0]):.0f} tokens"

    def _cost_tokens(self, scene: Scene, candidate: Candidate) -> float:
        there = inflight_of(scene, candidate)
        adj_prefill_tokens = there.prefill_tokens + uncached_tokens(scene, candidate)
        return self.prefill_load_scale * adj_prefill_tokens + there.context_tokens
