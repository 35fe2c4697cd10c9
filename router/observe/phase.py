"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words everywhere: function names, histogram labels, log fields, headings. This file never exports a
metric; `observe/metrics.py` reads what is measured here.
"""

from __future__ import annotations

import time

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")


class Phases:
    """The phases of one request: `enter` ends one and begins the next. A phase entered twice adds up."""

    __slots__ = ("_began_s", "_phase", "started_s", "taken_s")

    def __init__(self) -> None:
        self.started_s = self._began_s = time.perf_counter()
        self._phase = ""
        self.taken_s: dict[str, float] = {}
        """Seconds by phase, of those that have ended."""

    def enter(self, phase: str) -> None:
        """Begin `phase`; "" only ends the current one."""
        now_s, ended, taken_s = time.perf_counter(), self._phase, self.taken_s
        if ended:
            taken_s[ended] = taken_s.get(ended, 0.0) + now_s - self._began_s
        self._phase, self._began_s = phase, now_s

    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return time.perf_counter() - self.started_s
