"""How much of a prompt does so much of the traffic share that every pod should hold it?

Of each model its own, with the threshold that goes with as many pods as are ready. This file holds no block.
"""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.index.shared import HEAVY_SHARE, SharedPrefixes
from router.types import PodState, PromptPrefix


class Shares:
    """What was seen of the traffic to `fleet`, by model."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: dict[str, SharedPrefixes] = {}
        self._counted = fleet.snapshot
        self._thresholds: dict[str, float] = {}
        """By model, with the pods of `_counted`."""

    def shared_blocks(self, model: str, prompt: PromptPrefix | None, *, counted: bool = True) -> int:
        """Leading blocks of the prompt; where it is `counted`, it is part of the traffic from now on."""
        if prompt is None:
            return 0
        seen = self._seen.get(model)
        if seen is None:
            seen = self._seen[model] = SharedPrefixes()
        learn = seen.observe if counted else seen.shared
        return learn(prompt.hashes, threshold=self._threshold(model))

    def _threshold(self, model: str) -> float:
        """Reckoned once a snapshot."""
        snapshot = self._fleet.snapshot
        if snapshot is not self._counted:
            self._counted, self._thresholds = snapshot, {}
        threshold = self._thresholds.get(model)
        if threshold is None:
            ready = sum(s.state is PodState.READY and s.pod.serves(model) for s in snapshot.pods)
            threshold = self._thresholds[model] = HEAVY_SHARE / max(ready, 1)
        return threshold
