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

    __slots__ = ("_began_s", "_current", "started_s", "taken_s")

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.taken_s: dict[str, float] = {}
        self._current = ""
        self._began_s = self.started_s

    def enter(self, phase: str) -> None:
        """Begin `phase`; "" only ends the current one."""
        now_s = time.perf_counter()
        if self._current:
            self.taken_s[self._current] = self.taken_s.get(self._current, 0.0) + now_s - self._began_s
        self._current, self._began_s = phase, now_s

    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return time.perf_counter() - self.started_s
