"""Where would llm-d's scheduler send this?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, lowest_first, match_share, uncached_tokens
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class LlmD(Configurable):
    """llm-d's default since August 2026, "sticky until saturated":

        warm           = pods with match >= affinity_threshold
        ttft_i         = in-flight tokens_i / R_peak,    R_peak = B / T(B) at a chunk of B tokens
        saturated    <=> min ttft over warm - min ttft over the others > max_ttft_penalty_ms
        among          = all pods if none is warm or the warm are saturated, else the warm
        argmin of token load_i = uncached tokens in flight on i + n - p_i

    R_peak comes from each pod's own coefficients instead of one calibration for all (llm-d ships 15,928 tokens/s, that
    of Qwen3-32B on two H100). In-flight tokens are the uncached ones, those that stand before a first token. No
    exploration. Source: reference/algorithms.md 1.5.
    """

    affinity_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    max_ttft_penalty_ms: NonNegativeFloat = 18_000.0
    calibration_chunk_tokens: PositiveInt = 8192

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        warm = [c for c in candidates if match_share(scene, c) >= self.affinity_threshold]
        saturated = bool(warm) and self._saturated(scene, candidates, warm)
        among = {c.pod.id for c in (candidates if saturated or not warm else warm)}

        def score(candidate: Candidate) -> tuple[bool, int]:
            load_tokens = inflight_of(scene, candidate).prefill_tokens + uncached_tokens(scene, candidate)
            return candidate.pod.id not in among, load_tokens

        state = "saturated" if saturated else "sticky" if warm else "cold"
        return lowest_first(scene, candidates, score), f"{state}: lowest token load"

    def _saturated(self, scene: Scene, candidates: Sequence[Candidate], warm: Sequence[Candidate]) -> bool:
        sticky = {candidate.pod.id for candidate in warm}
        others_ms = [self._ttft_ms(scene, c) for c in candidates if c.pod.id not in sticky]
        best_warm_ms = min(self._ttft_ms(scene, c) for c in warm)
        return bool(others_ms) and best_warm_ms - min(others_ms) > self.max_ttft_penalty_ms

    def _ttft_ms(self, scene: Scene, candidate: Candidate) -> float:
        chunk_ms = candidate.pod.speed.prefill_ms(self.calibration_chunk_tokens)
        return inflight_of(scene, candidate).prefill_tokens * chunk_ms / self.calibration_chunk_tokens
