"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words everywhere: function names, histogram labels, log fields, headings. This file never exports a
metric; `observe/metrics.py` reads what is measured here.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The phases of one request, from its arrival, with which the first begins: `enter` ends one and begins the next. A
    phase entered twice adds up."""

    __slots__ = ("_began_s", "_phase", "started_s", "taken_s")

    def __init__(self) -> None:
        self.started_s = self._began_s = perf_counter()
        self._phase = PHASES[0]
        self.taken_s: dict[str, float] = defaultdict(float)
        """Seconds by phase, of those that have ended."""

    def enter(self, phase: str) -> None:
        """End the one under way and begin `phase`."""
        now_s = perf_counter()
        self.taken_s[self._phase] += now_s - self._began_s
        self._phase = phase
        self._began_s = now_s

    def end(self) -> None:
        """End the one under way, the last."""
        self.taken_s[self._phase] += perf_counter() - self._began_s

    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return perf_counter() - self.started_s
