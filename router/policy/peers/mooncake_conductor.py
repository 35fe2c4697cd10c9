"""Where would Mooncake's Conductor send this, and what would it pull there?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from router.decision import Candidate, Cost, Direct, Pull
from router.policy.peers.reading import lowest_first
from router.policy.pickers import LowestCost, Ranked
from router.policy.term import Configurable
from router.types import Link, Scene


class MooncakeConductor(Configurable):
    """FAST'25, algorithm 1. With p_i cached on pod i and p* the longest match anywhere, of n prompt tokens:

        p* / p_i > balancing_threshold:  p_use = p*,  T_transfer = t0 + kv_bytes_per_token * (p* - p_i) / bandwidth
        otherwise:                       p_use = p_i, T_transfer = 0
        TTFT_i = T_transfer + T_queue(i) + T_prefill(n, p_use);  argmin

    The policy's price is TTFT_i without a pull: name `queue` and `prefill` among its costs. A pull adds two parts,
    `transfer` and `pulled`, which takes back the prefill that it saves. Note that the ratio alone decides, even where
    the transfer costs more than it saves. Without a link, or where a pod's bytes per token are unknown, this is the
    local cache-aware variant. Of several best holders one is drawn. The threshold is tuned by hand in the paper, which
    gives no number: 1 pulls whatever is longer. Source: reference/algorithms.md 1.1.
    """

    balancing_threshold: Annotated[float, Field(ge=1)] = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        best = lowest_first(scene, candidates, lambda candidate: -candidate.cached_tokens)[0]
        ranked, _ = LowestCost().rank(scene, [self._planned(scene, each, best) for each in candidates])
        pull = ranked[0].plan.pull
        return ranked, f"lowest TTFT, pulling from {pull.holder}" if pull else "lowest TTFT, nothing to pull"

    def _planned(self, scene: Scene, candidate: Candidate, best: Candidate) -> Candidate:
        """The candidate as it is, or with a pull of what `best` has and it has not."""
        link = scene.fleet.links.between(best.pod, candidate.pod)
        if link is None or scene.prompt is None or not candidate.pod.kv_bytes_per_token:
            return candidate
        if best.cached_tokens <= self.balancing_threshold * candidate.cached_tokens:
            return candidate
        return _pulling(candidate, best, link, scene.prompt.token_count)


def _pulling(candidate: Candidate, best: Candidate, link: Link, prompt_tokens: int) -> Candidate:
    pod, own_tokens, best_tokens = candidate.pod, candidate.cached_tokens, best.cached_tokens
    transfer_ms = link.transfer_ms((best_tokens - own_tokens) * pod.kv_bytes_per_token)
    pulled_ms = pod.speed.prefill_ms(prompt_tokens, best_tokens) - pod.speed.prefill_ms(prompt_tokens, own_tokens)
    pull = Pull(best.pod.id, best_tokens, best_tokens - own_tokens)
    parts = (*candidate.cost.parts, ("transfer", transfer_ms), ("pulled", pulled_ms))
    total_ms = candidate.cost.total_ms + transfer_ms + pulled_ms
    return Candidate(Direct(pod, pull), Cost.of(parts, total_ms), best_tokens)
