"""When may a pod get its next prompt, so that those who decode on it get their tokens in time?

While a pod computes prompts, its other requests wait for their next token. If prompts take a share s of its time, a
decode step of d ms becomes d / (1 - s). So each pod gets prompts for a share of its time only. And since an answer of
few tokens waits for a whole prompt or for none, it gets some time between two of them.
"""

from __future__ import annotations

MAX_NAMES = 10_000
"""Beyond that, those that are not ahead of their pace are dropped."""
HEADROOM = 1.2
"""Decode steps may take up to 1 / 1.2 of their limit on average."""
MIN_SHARE = 0.05
"""A pod whose decode steps leave no time for prompts gets them for this share of its time."""


def prefill_share(step_ms: float, tpot_ms: float) -> float:
    """The share of a pod's time for prompts, if its decode steps of `step_ms` may become `tpot_ms` / `HEADROOM` on
    average."""
    return max(1 - HEADROOM * step_ms / tpot_ms, MIN_SHARE)


class PrefillPace:
    """Prefill by pod: the time at which its prompts are computed at its pace, as in GCRA (ITU-T I.371). It may be
    `burst_ms` ahead of its pace."""

    def __init__(self, burst_ms: float = 0.0) -> None:
        self._burst_s = burst_ms / 1000
        self._even_s: dict[str, float] = {}

    def wait_ms(self, pod: str, now_s: float) -> float:
        """The time until the next prompt is due; 0 if it is."""
        return max(self._even_s.get(pod, now_s) - now_s - self._burst_s, 0.0) * 1000

    def sent(self, pod: str, prefill_ms: float, pace: float, now_s: float, rest_ms: float = 0.0) -> float:
        """Count a prompt that was sent. `pace`: milliseconds of prefill in a millisecond. `rest_ms`: the time without
        prompts after it, at least. Returns the milliseconds that it takes at this pace."""
        if len(self._even_s) >= MAX_NAMES:
            self._even_s = {one: at_s for one, at_s in self._even_s.items() if at_s > now_s}
        even_s, taken_ms = self._even_s.get(pod, now_s), max(prefill_ms / pace, prefill_ms + rest_ms)
        self._even_s[pod] = max(even_s, now_s) + taken_ms / 1000
        return taken_ms


MAX_DELAY_S = 0.3
"""How much later a handed-over prompt may get its first token."""


class HandoffsDue:
    """When prompts arrive at decode pods whose prefill pods compute them now, by decode pod.

    A decode pod also computes short prompts itself. Those that are handed over to it wait meanwhile, because an engine
    first completes what it has begun. So it gets no prompt that would delay them."""

    def __init__(self) -> None:
        self._due_s: dict[str, list[float]] = {}

    def sent(self, pod: str, due_s: float, now_s: float) -> None:
        """A prompt is handed over to `pod` at `due_s`."""
        if len(self._due_s) >= MAX_NAMES:
            self._due_s = {name: due for name, due in self._due_s.items() if max(due) > now_s}
        self._due_s[pod] = [*(one for one in self._due_s.get(pod, ()) if one > now_s), due_s]

    def wait_ms(self, pod: str, prefill_ms: float, now_s: float) -> float:
        """The time until the pod can compute a prompt for so long and delay none that is due by now."""
        due_s = self._due_s.get(pod)
        if not due_s:
            return 0.0
        until_s = now_s + prefill_ms / 1000 - MAX_DELAY_S
        return max((one - now_s for one in due_s if now_s < one < until_s), default=0.0) * 1000
