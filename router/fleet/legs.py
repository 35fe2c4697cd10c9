"""When has a leg of a split failed, although its pod neither answers nor closes the connection?

A pod may accept a request and never answer it, while its health checks succeed: a stopped engine, or one that waits for
KV that does not come. A leg hangs once it takes several times as long as expected and

- its pod has sent nothing to anybody since then, or
- its pod has answered a leg that was sent later.

Else the pod is only busy: it answers in order, and this leg's turn will come. The multiple is learnt for each pod.
"""

from __future__ import annotations

from math import inf

from router.fleet.fleet import Fleet
from router.types import Pod, PodId, PodState

LIMIT_FACTOR = 4.0
"""A leg is asked about when it takes this multiple of its expected time and of the pod's slowest leg so far."""
MIN_EXPECTED_MS = 250.0
"""Minimum expected time in what is learnt: steps and networks vary."""
KEPT = 63 / 64
"""What each leg leaves of the pod's slowest one."""


class LegTimes:
    """How long the legs of each pod take, relative to what was expected."""

    def __init__(self, fleet: Fleet) -> None:
        self._slowness: dict[PodId, float] = {}
        self._answered: dict[PodId, tuple[float, float]] = {}
        """When the latest leg that is answered was sent, and when the last answer came."""
        fleet.listen(self._remove_gone)

    def limit_s(self, pod: PodId, expected_ms: float, least_s: float) -> float:
        """Seconds after which a leg may hang."""
        return max(LIMIT_FACTOR * self._slowness.get(pod, 1.0) * expected_ms / 1000, least_s)

    def answered(self, pod: PodId, expected_ms: float, sent_s: float, now_s: float) -> None:
        slowness = (now_s - sent_s) * 1000 / max(expected_ms, MIN_EXPECTED_MS)
        self._slowness[pod] = max(slowness, 1.0, KEPT * self._slowness.get(pod, 1.0))
        self._answered[pod] = (max(sent_s, self._answered.get(pod, (-inf, -inf))[0]), now_s)

    def is_silent(self, pod: PodId, sent_s: float, piece_at_s: float) -> bool:
        """Whether the pod has answered no leg since `sent_s`. `piece_at_s`: the last piece of a stream from it."""
        return max(self._answered.get(pod, (-inf, -inf))[1], piece_at_s) < sent_s

    def is_overtaken(self, pod: PodId, sent_s: float) -> bool:
        """Whether the pod has answered a leg that was sent later."""
        return self._answered.get(pod, (-inf, -inf))[0] > sent_s

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._slowness.pop(pod.id, None)
            self._answered.pop(pod.id, None)
