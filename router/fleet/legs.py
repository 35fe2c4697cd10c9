"""When has a leg of a split failed, although its pod neither answers nor closes the connection?

A pod may accept a request and never answer it, while its health checks succeed: a stopped engine, or one that waits for
KV that does not come. A leg has a limit: several times its expected time, and the time of all prompts that the pod now
has, because a pod that gets many at once reads them before it computes the first. After it, the leg hangs once

- its pod has sent nothing to anybody for as long, or
- its pod has answered a leg that was sent clearly later.

Else the pod is only busy: it answers in order, and this leg's turn will come. How slow a pod is is learnt.
"""

from __future__ import annotations

from math import inf

from router.fleet.fleet import Fleet
from router.types import Pod, PodId, PodState

LIMIT_FACTOR = 4.0
"""A leg is asked about when it takes this multiple of its expected time and of the pod's slowest leg so far."""
MIN_EXPECTED_MS = 250.0
"""Minimum expected time in what is learnt: steps and networks vary."""
OVERTAKEN_S = 2.0
"""A leg that was sent this much later should be answered later, although pods read requests in parallel."""
MAX_SLOWNESS = 8.0
"""One request that is slow for its own reasons must not make the limits of all others too long."""
KEPT = 63 / 64
"""What each leg leaves of the pod's slowest one."""


class LegTimes:
    """How long the legs of each pod take, relative to what was expected."""

    def __init__(self, fleet: Fleet) -> None:
        self._slowness: dict[PodId, float] = {}
        self._answered: dict[PodId, tuple[float, float]] = {}
        """When the latest leg that is answered was sent, and when the last answer came."""
        fleet.listen(self._remove_gone)

    def limit_s(self, pod: PodId, expected_ms: float, queued_ms: float, least_s: float) -> float:
        """Seconds after which a leg may hang. `queued_ms`: of the prompts that the pod has now."""
        return max(self._slowness.get(pod, 1.0) * (LIMIT_FACTOR * expected_ms + queued_ms) / 1000, least_s)

    def answered(self, pod: PodId, expected_ms: float, sent_s: float, now_s: float) -> None:
        slowness = min((now_s - sent_s) * 1000 / max(expected_ms, MIN_EXPECTED_MS), MAX_SLOWNESS)
        self._slowness[pod] = max(slowness, 1.0, KEPT * self._slowness.get(pod, 1.0))
        self._answered[pod] = (max(sent_s, self._answered.get(pod, (-inf, -inf))[0]), now_s)

    def hangs(
        self, pod: PodId, sent_s: float, limit_s: float, piece_at_s: float, now_s: float, *, is_last: bool = False
    ) -> bool:
        """Whether a leg without a response hangs. `piece_at_s`: of the last piece of a stream from its pod. The last
        candidate may be overtaken: another would be no faster."""
        if now_s - sent_s < limit_s:
            return False
        latest_sent_s, answered_s = self._answered.get(pod, (-inf, -inf))
        is_overtaken = not is_last and latest_sent_s - sent_s >= OVERTAKEN_S
        return is_overtaken or now_s - max(answered_s, piece_at_s) >= limit_s

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._slowness.pop(pod.id, None)
            self._answered.pop(pod.id, None)
