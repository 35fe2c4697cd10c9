"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words everywhere: function names, histogram labels, log fields, headings. This file never exports a
metric; `observe/metrics.py` reads what is measured here.
"""

from __future__ import annotations

import time
from itertools import pairwise

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The phases of one request: `enter` ends one and begins the next. A phase entered twice adds up."""

    __slots__ = ("_entered", "started_s")

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self._entered: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        """Begin `phase`; "" only ends the current one."""
        self._entered.append((phase, time.perf_counter()))

    @property
    def taken_s(self) -> dict[str, float]:
        """Seconds by phase, of those that have ended."""
        taken_s: dict[str, float] = {}
        for (phase, began_s), (_, ended_s) in pairwise(self._entered):
            if phase:
                taken_s[phase] = taken_s.get(phase, 0.0) + ended_s - began_s
        return taken_s

    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return time.perf_counter() - self.started_s
