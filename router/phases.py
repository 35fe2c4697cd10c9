"""The seven phases of a request, and when each began.

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

Spans, labels of metrics, receipts and headings of the docs have the same seven names.
"""

from __future__ import annotations

from itertools import compress
from operator import sub

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The times of one request. All are seconds of the clock that its front passes in."""

    __slots__ = ("_entered", "taken_s")

    def __init__(self, now_s: float) -> None:
        self._entered = [(PHASES[0], now_s)]
        self.taken_s: dict[str, float] = {}
        """Seconds by phase, after `end`; a phase that was entered twice has the sum."""

    def restart(self, now_s: float) -> None:
        """Begin anew: what was until now does not count."""
        self._entered = [(PHASES[0], now_s)]

    def enter(self, phase: str, now_s: float) -> None:
        """End the current phase and begin `phase`."""
        self._entered.append((phase, now_s))

    @property
    def current(self) -> str:
        """The phase that was entered last."""
        return self._entered[-1][0]

    @property
    def began_s(self) -> float:
        """When the request arrived."""
        return self._entered[0][1]

    def end(self, now_s: float) -> None:
        phases, began_s = zip(*self._entered, strict=True)
        seconds = list(map(sub, (*began_s[1:], now_s), began_s))
        self.taken_s.update(zip(phases, seconds, strict=True))
        if len(self.taken_s) < len(phases):  # one was entered again
            for phase in self.taken_s:
                self.taken_s[phase] = sum(compress(seconds, map(phase.__eq__, phases)))

    def intervals(self, now_s: float) -> list[tuple[str, float, float]]:
        """(phase, beginning, end) in order; the current phase ends at `now_s`."""
        ends_s = [*(began_s for _, began_s in self._entered[1:]), now_s]
        return [(phase, began_s, end_s) for (phase, began_s), end_s in zip(self._entered, ends_s, strict=True)]
