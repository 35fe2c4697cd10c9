"""When do prompts arrive at decode pods whose prefill pods compute them now?

A decode pod also computes short prompts itself. Those that are handed over to it wait meanwhile, because an engine
first completes what it has begun. So it gets no prompt that would delay them.
"""

from __future__ import annotations

from router.admission.pace import MAX_NAMES

MAX_DELAY_S = 0.3
"""How much later a handed-over prompt may get its first token."""


class HandoffsDue:
    """The expected arrivals, by decode pod."""

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
