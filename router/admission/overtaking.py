"""How much of the fleet's prefill goes to tenants within their share while others wait?

Those who wait get only the rest, so their turn comes later than what waits in front of them says.
"""

from __future__ import annotations

import math

DECAY_S = 5.0
"""What overtook counts less by 1/e after this time."""
MAX_SHARE = 0.98


class OvertakingShare:
    """The share of the fleet's time that was given to prompts of requests that overtook, 0 to `MAX_SHARE`."""

    def __init__(self) -> None:
        self._share = 0.0
        self._at_s = 0.0

    def observe(self, fleet_ms: float, now_s: float) -> None:
        """Count a prompt that overtook. `fleet_ms`: the time that it takes of all pods together."""
        self._share = self._decayed(now_s) + fleet_ms / 1000 / DECAY_S
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return min(self._decayed(now_s), MAX_SHARE)

    def _decayed(self, now_s: float) -> float:
        return self._share * math.exp((self._at_s - now_s) / DECAY_S)
