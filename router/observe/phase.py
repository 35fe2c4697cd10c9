"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words are function names, histogram labels, log fields and headings.
"""

from __future__ import annotations

from time import perf_counter

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The times of one request, from its arrival on, when the first phase begins."""

    __slots__ = ("_arrived_s", "_entered_s", "_phase", "taken_s")

    def __init__(self) -> None:
        self._phase = PHASES[0]
        self._arrived_s = self._entered_s = perf_counter()
        self.taken_s: dict[str, float] = {}
        """Seconds by phase; a phase that was entered twice has the sum."""

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.end()
        self._phase = phase

    def end(self) -> None:
        """End the current phase."""
        now_s = perf_counter()
        self.taken_s[self._phase] = self.taken_s.get(self._phase, 0.0) + now_s - self._entered_s
        self._entered_s = now_s

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self._arrived_s
