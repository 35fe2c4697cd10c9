"""How long may a pod send nothing before its silence counts? A multiple of the steps that it took for such streams."""

from __future__ import annotations

from router.types import PodId

SILENT_STEPS = 20
"""A step that takes a long prompt in, too, is longer than others."""
LEAST_PIECES = 8
"""The mean of fewer says little."""
_WEIGHT, _MOST = 0.1, 4096


class StepTimes:
    """Mean times between the pieces of streams, by pod and workload class, learnt from each stream that was whole."""

    def __init__(self) -> None:
        self._step_s: dict[tuple[PodId, str], float] = {}

    def learn(self, pod: PodId, workload: str, step_s: float) -> None:
        known_s = self._step_s.pop((pod, workload), step_s)
        self._step_s[pod, workload] = known_s + _WEIGHT * (step_s - known_s)
        if len(self._step_s) > _MOST:
            del self._step_s[next(iter(self._step_s))]

    def silence_s(self, pod: PodId, workload: str) -> float:
        """0 for streams of which nothing was learnt."""
        return SILENT_STEPS * self._step_s.get((pod, workload), 0.0)
