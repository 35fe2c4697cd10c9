"""What do the peers read off a scene, and how are their ties settled?

Small readings that several formulas share. This file never prefers a pod.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from router.decision import Candidate
from router.types import InFlight, PrefixTrust, Scene

_IDLE = InFlight()


def inflight_of(scene: Scene, candidate: Candidate) -> InFlight:
    """What we have on the candidate's pod."""
    return scene.inflight.get(candidate.pod.id, _IDLE)


def match_share(scene: Scene, candidate: Candidate) -> float:
    """How much of the prompt the pod holds, 0..1, in full blocks. 0 while its tokens and hashes are unproven."""
    if scene.prompt is None or not scene.prompt.hashes or candidate.pod.trust is not PrefixTrust.TRUSTED:
        return 0.0
    return min(scene.match.held_blocks(candidate.pod.id) / len(scene.prompt.hashes), 1.0)


def uncached_tokens(scene: Scene, candidate: Candidate) -> int:
    """What the pod must compute of this prompt: at least the last token, and one of a prompt that was not read."""
    prompt_tokens = scene.prompt.token_count if scene.prompt else 0
    return max(prompt_tokens - candidate.cached_tokens, 1)


def drawn(scene: Scene, count: int) -> int:
    """A number below `count` by lot: the same for one request always, evenly spread over many."""
    return xxhash.xxh3_64_intdigest(scene.request.id.encode()) % count


def lowest_first(scene: Scene, candidates: Sequence[Candidate], score: Callable[[Candidate], Any]) -> list[Candidate]:
    """Ascending by `score`. Of those that share the lowest, one is drawn to be the first. O(n log n)."""
    ranked = sorted(candidates, key=score)
    lot = drawn(scene, bisect_right(ranked, score(ranked[0]), key=score))
    ranked[0], ranked[lot] = ranked[lot], ranked[0]
    return ranked
