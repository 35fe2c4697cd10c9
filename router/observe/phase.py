"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words everywhere: function names, histogram labels, log fields, headings. This file never exports a
metric; `observe/metrics.py` reads what is measured here.
"""

from __future__ import annotations

from operator import sub
from time import perf_counter

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The phases of one request, from its arrival, with which the first begins: `enter` ends one and begins the next. A
    phase entered twice adds up."""

    __slots__ = ("_entered", "taken_s")

    def __init__(self) -> None:
        self._entered = [(PHASES[0], perf_counter())]
        self.taken_s: dict[str, float] = {}
        """Seconds by phase, once the last has ended."""

    def enter(self, phase: str) -> None:
        """End the one under way and begin `phase`."""
        self._entered.append((phase, perf_counter()))

    def end(self) -> None:
        """End the one under way, the last."""
        phases, began_s = zip(*self._entered, strict=True)
        each_s = map(sub, (*began_s[1:], perf_counter()), began_s)
        if len(set(phases)) == len(phases):
            self.taken_s.update(zip(phases, each_s, strict=True))
            return
        for phase, one_s in zip(phases, each_s, strict=True):
            self.taken_s[phase] = self.taken_s.get(phase, 0.0) + one_s

    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return perf_counter() - self._entered[0][1]
