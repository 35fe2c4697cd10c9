"""Which pod would the routers of other projects choose for the same request?

One picker a peer: its docstring is the formula (source: docs/simulator.md#other-routers), its fields are the peer's
settings with the peer's defaults. All of them read the same scene as our own policies:

- Some peers keep an approximate tree of the prompts that they sent. Here they read the exact index, to their advantage.
- Load is the work that this router has in flight, so the delay of a scrape affects no peer.
- A peer ranks by a score in its own unit. Each candidate keeps its price in milliseconds for comparison.
- A tie is decided by a hash of the request id, so every decision can be replayed.

Pickers are stateless. No shipped policy uses them, and `warmroute` does not know them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from router.config.load import shipped
from router.config.policy_files import PolicyLibrary, load_policies
from router.decision import Candidate, Cost, Direct, Pull
from router.policy.catalog import PICKERS
from router.policy.pickers import LowestCost, Ranked
from router.policy.ring import rendezvous, tie_key
from router.policy.spec import Policy, PolicySpec, choice_model
from router.policy.term import Configurable
from router.types import InFlight, Link, PrefixTrust, Scene

_IDLE = InFlight()


def inflight_of(scene: Scene, candidate: Candidate) -> InFlight:
    return scene.inflight.get(candidate.pod.id, _IDLE)


def match_share(scene: Scene, candidate: Candidate) -> float:
    """Share of the prompt's full blocks that the pod holds, 0..1. 0 if the pod is not trusted to hash as we do."""
    if scene.prompt is None or not scene.prompt.hashes or candidate.pod.trust is not PrefixTrust.TRUSTED:
        return 0.0
    return min(scene.match.held_blocks(candidate.pod.id) / len(scene.prompt.hashes), 1.0)


def uncached_tokens(scene: Scene, candidate: Candidate) -> int:
    """Tokens of the prompt that the pod must compute: at least the last one, and 1 for a prompt that was not read."""
    prompt_tokens = scene.prompt.token_count if scene.prompt else 0
    return max(prompt_tokens - candidate.cached_tokens, 1)


def random_index(scene: Scene, count: int) -> int:
    """A number below `count`, derived from the request id: constant for a request, uniform over many."""
    return xxhash.xxh3_64_intdigest(scene.request.id.encode()) % count


def lowest_first(scene: Scene, candidates: Sequence[Candidate], score: Callable[[Candidate], Any]) -> list[Candidate]:
    """Ascending by `score`. Among those with the lowest score, the request id chooses the first. O(n log n)."""
    ranked = sorted(candidates, key=score)
    index = random_index(scene, bisect_right(ranked, score(ranked[0]), key=score))
    ranked[0], ranked[index] = ranked[index], ranked[0]
    return ranked


class AtRandom(Configurable):
    """A random pod first, then the ones after it in order. The lower bound for every comparison."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        start = random_index(scene, len(candidates))
        return [*candidates[start:], *candidates[:start]], "random pod"


class LongestMatch(Configurable):
    """argmax of the match; load is ignored.

    The highest hit rate that a decision can reach, and the overload that comes with it: the first pod to hold a shared
    prefix receives all its requests. See docs/simulator.md#hit-rate-is-not-the-goal.
    """

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        ranked = lowest_first(scene, candidates, lambda candidate: -match_share(scene, candidate))
        return ranked, f"longest match, {match_share(scene, ranked[0]):.0%}"


class LMetric(Configurable):
    """LMetric's product, which has no settings:

        score_i = (prefill tokens waiting on i + n - p_i) * (batch size on i + 1)
        argmin

    n prompt tokens of which p_i are cached on i; the batch is the requests in flight, and the 1 is this request.
    """

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        def score(candidate: Candidate) -> int:
            load = inflight_of(scene, candidate)
            return (load.prefill_tokens + uncached_tokens(scene, candidate)) * (load.requests + 1)

        ranked = lowest_first(scene, candidates, score)
        return ranked, f"lowest product, {score(ranked[0])}"


class Dynamo(Configurable):
    """NVIDIA Dynamo's linear cost, at its default router temperature of 0:

        adj_prefill_i = max(active_prefill_blocks_i + incoming_blocks - overlap_blocks_i, 0)
        cost_i        = prefill_load_scale * adj_prefill_i + decode_blocks_i
        argmin

    Counted in tokens instead of blocks: the same factor everywhere, hence the same order. A hit never exceeds the
    prompt, so no term is negative. A hit counts in full in every tier (Dynamo discounts host and disk). Decode blocks
    are the prompts in flight, each in full (Dynamo counts a shared block once).
    """

    prefill_load_scale: NonNegativeFloat = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        ranked = lowest_first(scene, candidates, lambda candidate: self._cost_tokens(scene, candidate))
        return ranked, f"lowest linear cost, {self._cost_tokens(scene, ranked[0]):.0f} tokens"

    def _cost_tokens(self, scene: Scene, candidate: Candidate) -> float:
        load = inflight_of(scene, candidate)
        adj_prefill_tokens = load.prefill_tokens + uncached_tokens(scene, candidate)
        return self.prefill_load_scale * adj_prefill_tokens + load.context_tokens


class SglangCacheAware(Configurable):
    """SGLang router / SMG, policy `cache_aware`, over requests in flight:

        imbalanced  <=>  max - min > balance_abs_threshold  and  max > balance_rel_threshold * min
        imbalanced            -> the shortest queue
        match > cache_threshold -> the best match
        otherwise             -> the smallest tree

    The defaults are those of its code (0.5 / 32 / 1.1); its documentation says 0.3 / 64 / 1.5 and some of its
    configurations 0.8 / - / 1.5. A scene does not contain the size of a pod's tree. The number of prompt tokens in
    flight replaces it, which reacts to load where the original does not.
    """

    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    balance_abs_threshold: NonNegativeInt = 32
    balance_rel_threshold: NonNegativeFloat = 1.1

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        def requests_of(candidate: Candidate) -> int:
            return inflight_of(scene, candidate).requests

        requests = [requests_of(candidate) for candidate in candidates]
        if self._imbalanced(min(requests), max(requests)):
            return lowest_first(scene, candidates, requests_of), "imbalanced: shortest queue"
        if max(match_share(scene, candidate) for candidate in candidates) > self.cache_threshold:
            return lowest_first(scene, candidates, lambda c: -match_share(scene, c)), "balanced: best match"
        smallest = lowest_first(scene, candidates, lambda c: inflight_of(scene, c).context_tokens)
        return smallest, "balanced: smallest tree"

    def _imbalanced(self, min_requests: int, max_requests: int) -> bool:
        difference = max_requests - min_requests
        return difference > self.balance_abs_threshold and max_requests > self.balance_rel_threshold * min_requests


class LlmD(Configurable):
    """llm-d's default since August 2026, "sticky until saturated":

        warm           = pods with match >= affinity_threshold
        ttft_i         = in-flight tokens_i / R_peak,    R_peak = B / T(B) at a chunk of B tokens
        saturated    <=> min ttft over warm - min ttft over the others > max_ttft_penalty_ms
        among          = all pods if none is warm or the warm are saturated, else the warm
        argmin of token load_i = uncached tokens in flight on i + n - p_i

    R_peak comes from each pod's own coefficients instead of one calibration for all (llm-d ships 15,928 tokens/s, that
    of Qwen3-32B on two H100). In-flight tokens are the uncached ones, which are computed before a first token. No
    exploration.
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
        warm_ids = {candidate.pod.id for candidate in warm}
        others_ms = [self._ttft_ms(scene, c) for c in candidates if c.pod.id not in warm_ids]
        best_warm_ms = min(self._ttft_ms(scene, c) for c in warm)
        return bool(others_ms) and best_warm_ms - min(others_ms) > self.max_ttft_penalty_ms

    def _ttft_ms(self, scene: Scene, candidate: Candidate) -> float:
        chunk_ms = candidate.pod.speed.prefill_ms(self.calibration_chunk_tokens)
        return inflight_of(scene, candidate).prefill_tokens * chunk_ms / self.calibration_chunk_tokens


class LlmDWeighted(Configurable):
    """llm-d's weighted scorers, the blend of most of its published results:

        score_i = prefix_weight * match_i + kv_weight * (1 - KV use_i) + queue_weight * (max q - q_i) / (max q - min q)
        argmax

    Each scorer is 0..1; equal queues score 1. A queue q_i is the requests in flight without a first token; KV use is
    that of the last scrape, as in llm-d.
    """

    prefix_weight: NonNegativeFloat = 3.0
    kv_weight: NonNegativeFloat = 2.0
    queue_weight: NonNegativeFloat = 2.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        queues = [inflight_of(scene, candidate).prefill_requests for candidate in candidates]
        longest, spread = max(queues), max(queues) - min(queues)

        def score(candidate: Candidate) -> float:
            status = scene.fleet.find(candidate.pod.id)
            queue = inflight_of(scene, candidate).prefill_requests
            free = 1 - min(status.load.kv_usage, 1.0) if status else 1.0
            idle = (longest - queue) / spread if spread else 1.0
            match = match_share(scene, candidate)
            return self.prefix_weight * match + self.kv_weight * free + self.queue_weight * idle

        ranked = lowest_first(scene, candidates, lambda candidate: -score(candidate))
        return ranked, f"highest weighted score, {score(ranked[0]):.2f}"


class AibrixPrefixCache(Configurable):
    """AIBrix gateway, policy `prefix-cache`, over requests in flight:

        max - min > imbalance_requests -> only the pods with the fewest requests remain
        sort by match, descending, then by requests, ascending
        take the first with requests <= mean + standard_deviations * sigma

    Mean and sigma are those of all pods. Without any match, the pod with the fewest requests is taken, as in AIBrix.
    """

    imbalance_requests: NonNegativeInt = 8
    standard_deviations: NonNegativeFloat = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        requests = [inflight_of(scene, candidate).requests for candidate in candidates]
        imbalanced = max(requests) - min(requests) > self.imbalance_requests
        bound = min(requests) if imbalanced else self._bound(requests)

        def score(candidate: Candidate) -> tuple[bool, float, int]:
            own = inflight_of(scene, candidate).requests
            return own > bound, -match_share(scene, candidate), own

        state = "imbalanced" if imbalanced else "balanced"
        return lowest_first(scene, candidates, score), f"{state}: best match with at most {bound:.1f} requests"

    def _bound(self, requests: Sequence[int]) -> float:
        mean = sum(requests) / len(requests)
        variance = sum((count - mean) ** 2 for count in requests) / len(requests)
        return mean + self.standard_deviations * math.sqrt(variance)


class KubeaiChwbl(Configurable):
    """KubeAI, strategy `PrefixHash`: consistent hashing with bounded loads over requests in flight.

        walk the ring from the key; take the first pod with  load + 1 <= mean_load_factor * (total + 1) / n
        if no pod is within that bound, the first on the ring takes the request

    The bound is that of its code, `chwblLoadOK`: while total + 1 < n / mean_load_factor no pod is within it, so the
    ring alone decides. KubeAI's key is the first 100 characters of the first user message; ours is the affinity key,
    two blocks beyond the globally shared prefix. Its ring has 256 points a pod; ours is the rendezvous order, which is
    as stable and more even, and needs no walk over 256,000 points at 1,000 pods.
    """

    mean_load_factor: Annotated[float, Field(ge=1)] = 1.25

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        key = tie_key(scene)
        total = sum(inflight_of(scene, candidate).requests for candidate in candidates)
        bound = self.mean_load_factor * (total + 1) / len(candidates)

        def score(candidate: Candidate) -> tuple[bool, int]:
            return inflight_of(scene, candidate).requests + 1 > bound, -rendezvous(key, candidate.pod.id)

        return sorted(candidates, key=score), f"first on the ring within {bound:.2f} requests"


class DualMap(Configurable):
    """Two fixed pods for each prefix, by two hash functions:

        the one of the two with the longer match, while its predicted TTFT <= slo_ms
        else the less loaded of the two

    The predicted TTFT is the policy's price: name `queue` and `prefill` among its costs. If both match equally (mostly:
    not at all), the less loaded one is taken: less prefill in flight, then fewer requests. The prefix is the affinity
    key (DualMap also adapts its length). Its two pods are the first two of the key's rendezvous order, so every pair is
    equally likely and stays the same. A request is not migrated once it is sent. The abstract names no SLO: 5 s is our
    choice.
    """

    slo_ms: NonNegativeFloat = 5_000.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        def load(candidate: Candidate) -> tuple[float, int]:
            inflight = inflight_of(scene, candidate)
            return inflight.prefill_ms, inflight.requests

        key = tie_key(scene)
        two = nlargest(2, candidates, key=lambda candidate: rendezvous(key, candidate.pod.id))
        least_loaded = min(two, key=load)
        # `max` returns the first of equals: the less loaded pod wins if the matches are equal
        best_match = max((least_loaded, *two), key=lambda candidate: match_share(scene, candidate))
        within = best_match.cost.total_ms <= self.slo_ms
        chosen = best_match if within else least_loaded
        mapped = {candidate.pod.id for candidate in two}

        def score(candidate: Candidate) -> tuple[bool, bool, float]:
            return candidate is not chosen, candidate.pod.id not in mapped, candidate.cost.total_ms

        reason = "longer match of two, within the SLO" if within else "less loaded of two, beyond the SLO"
        return sorted(candidates, key=score), reason


class MooncakeConductor(Configurable):
    """FAST'25, algorithm 1. With p_i cached on pod i and p* the longest match anywhere, of n prompt tokens:

        p* / p_i > balancing_threshold:  p_use = p*,  T_transfer = t0 + kv_bytes_per_token * (p* - p_i) / bandwidth
        otherwise:                       p_use = p_i, T_transfer = 0
        TTFT_i = T_transfer + T_queue(i) + T_prefill(n, p_use);  argmin

    The policy's price is TTFT_i without a pull: name `queue` and `prefill` among its costs. A pull adds two parts:
    `transfer`, and `pulled`, which subtracts the prefill that it saves. The ratio alone decides, even where the
    transfer costs more than it saves. Without a link, or if a pod's bytes per token are unknown, this is the local
    cache-aware variant. Among several best holders the request id chooses. The paper tunes the threshold by hand and
    gives no number: 1 pulls every longer match.
    """

    balancing_threshold: Annotated[float, Field(ge=1)] = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        best = lowest_first(scene, candidates, lambda candidate: -candidate.cached_tokens)[0]
        ranked, _ = LowestCost().rank(scene, [self._planned(scene, each, best) for each in candidates])
        pull = ranked[0].plan.pull
        return ranked, f"lowest TTFT, pulling from {pull.holder}" if pull else "lowest TTFT, nothing to pull"

    def _planned(self, scene: Scene, candidate: Candidate, best: Candidate) -> Candidate:
        """The candidate unchanged, or with a pull of the blocks that only `best` has."""
        link = scene.fleet.links.between(best.pod, candidate.pod)
        if link is None or scene.prompt is None or not candidate.pod.kv_bytes_per_token:
            return candidate
        if best.cached_tokens <= self.balancing_threshold * candidate.cached_tokens:
            return candidate
        return _with_pull(candidate, best, link, scene.prompt.token_count)


def _with_pull(candidate: Candidate, best: Candidate, link: Link, prompt_tokens: int) -> Candidate:
    pod, own_tokens, best_tokens = candidate.pod, candidate.cached_tokens, best.cached_tokens
    transfer_ms = link.transfer_ms((best_tokens - own_tokens) * pod.kv_bytes_per_token)
    pulled_ms = pod.speed.prefill_ms(prompt_tokens, best_tokens) - pod.speed.prefill_ms(prompt_tokens, own_tokens)
    pull = Pull(best.pod.id, best_tokens, best_tokens - own_tokens)
    parts = (*candidate.cost.parts, ("transfer", transfer_ms), ("pulled", pulled_ms))
    total_ms = candidate.cost.total_ms + transfer_ms + pulled_ms
    return Candidate(Direct(pod, pull), Cost.of(parts, total_ms), best_tokens)


FOLDER = Path(__file__).parent
"""One YAML policy a peer, with the peer's default settings."""

PEER_PICKERS: dict[str, type[Configurable]] = {
    "at_random": AtRandom,
    "longest_match": LongestMatch,
    "sglang_cache_aware": SglangCacheAware,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "llm_d": LlmD,
    "llm_d_weighted": LlmDWeighted,
    "aibrix_prefix_cache": AibrixPrefixCache,
    "kubeai_chwbl": KubeaiChwbl,
    "dualmap": DualMap,
    "mooncake_conductor": MooncakeConductor,
}

PeerPickerChoice = choice_model("PeerPickerChoice", {**PICKERS, **PEER_PICKERS})


class PeerPolicySpec(PolicySpec):
    """A policy file whose picker may be a peer's. Only load tests and simulations of a checkout read such files."""

    picker: PeerPickerChoice  # type: ignore[valid-type]


def library_with_peers(folder: Path | None = None) -> PolicyLibrary:
    """The policy files of `folder`, then the peers' formulas, then the shipped policies. Raises `ConfigError`."""
    peers = PolicyLibrary(FOLDER, spec=PeerPolicySpec)
    return peers if folder is None else PolicyLibrary(folder, spec=PeerPolicySpec, fallback=peers)


def policies_with_peers() -> dict[str, Policy]:
    """The shipped policies and the peers."""
    return load_policies(shipped("policies")) | load_policies(FOLDER, PeerPolicySpec)
