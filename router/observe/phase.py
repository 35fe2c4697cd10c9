"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words are function names, histogram labels, log fields and headings.
"""

from __future__ import annotations

from itertools import compress
from operator import sub
from time import perf_counter

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The times of one request, from its arrival on, when the first phase begins."""

    __slots__ = ("_entered", "taken_s")

    def __init__(self) -> None:
        self._entered = [(PHASES[0], perf_counter())]
        self.taken_s: dict[str, float] = {}
        """Seconds by phase, after `end`; a phase that was entered twice has the sum."""

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self._entered.append((phase, perf_counter()))

    def end(self) -> None:
        """End the last phase."""
        phases, began_s = zip(*self._entered, strict=True)
        seconds = list(map(sub, (*began_s[1:], perf_counter()), began_s))
        self.taken_s.update(zip(phases, seconds, strict=True))
        if len(self.taken_s) < len(phases):  # one was entered again
            for phase in self.taken_s:
                self.taken_s[phase] = sum(compress(seconds, map(phase.__eq__, phases)))

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self._entered[0][1]
