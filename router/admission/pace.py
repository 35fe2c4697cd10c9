"""When may a pod get its next prompt, so that those who decode on it get their tokens in time?

While a pod computes prompts, its other requests wait for their next token. If prompts take a share s of its time, a
decode step of d ms becomes d / (1 - s). So each pod gets prompts for a share of its time only.
"""

from __future__ import annotations

from router.types import PodId

MIN_SHARE = 0.05
"""A pod whose decode steps leave no time for prompts gets them for this share of its time."""


def prefill_share(step_ms: float, tpot_ms: float, headroom: float) -> float:
    """The share of a pod's time for prompts, if its decode steps of `step_ms` may become `tpot_ms` on average.

    `headroom`: a request may need that many times its mean, because prompts come unevenly."""
    return max(1 - headroom * step_ms / tpot_ms, MIN_SHARE)


class PrefillPace:
    """The time at which each pod has computed its prompts at its pace, as in GCRA (ITU-T I.371): a pod is open until it
    is `burst_ms` ahead of its pace."""

    def __init__(self, burst_ms: float) -> None:
        self._burst_s = burst_ms / 1000
        self._even_s: dict[PodId, float] = {}

    def wait_ms(self, pod: PodId, now_s: float) -> float:
        """The time until the pod is open; 0 if it is."""
        return max(self._even_s.get(pod, now_s) - now_s - self._burst_s, 0.0) * 1000

    def sent(self, pod: PodId, prefill_ms: float, share: float, now_s: float) -> None:
        """The pod gets a prompt, and computes prompts for `share` of its time."""
        self._even_s[pod] = max(self._even_s.get(pod, now_s), now_s) + prefill_ms / share / 1000

    def keep(self, pods: set[PodId]) -> None:
        """Drop all other pods."""
        self._even_s = {pod: at_s for pod, at_s in self._even_s.items() if pod in pods}
