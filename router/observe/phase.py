"""How long did each of the seven phases of a request take?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The same seven words are function names, histogram labels, log fields and headings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import compress
from operator import is_not, methodcaller, sub
from time import perf_counter

from prometheus_client import CollectorRegistry

from router.observe.declared import of_requests
from router.observe.fast_metrics import Histogram, Labels, Numbers

PHASES = ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle")
COUNTED_AT_ONCE = 64
"""Requests whose times are added to the histograms together."""
_IS_PRESENT = partial(is_not, None)


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

    @property
    def current(self) -> str:
        """The phase that was entered last."""
        return self._entered[-1][0]

    def end(self) -> None:
        """End the last phase."""
        phases, began_s = zip(*self._entered, strict=True)
        seconds = list(map(sub, (*began_s[1:], perf_counter()), began_s))
        self.taken_s.update(zip(phases, seconds, strict=True))
        if len(self.taken_s) < len(phases):  # one was entered again
            for phase in self.taken_s:
                self.taken_s[phase] = sum(compress(seconds, map(phase.__eq__, phases)))

    def intervals(self, now_s: float) -> list[tuple[str, float, float]]:
        """(phase, beginning, end) in order, times of `perf_counter`; the current phase ends at `now_s`."""
        ends_s = [*(began_s for _, began_s in self._entered[1:]), now_s]
        return [(phase, began_s, end_s) for (phase, began_s), end_s in zip(self._entered, ends_s, strict=True)]

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self._entered[0][1]


class PhaseMetrics(Histogram):
    """The histograms of all phases."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, of_requests.PHASE_S)
        self._waiting: list[Mapping[str, float]] = []
        for phase in PHASES:
            self.labels(phase)

    def add(self, taken_s: Mapping[str, float]) -> None:
        """Add the seconds of one request by phase; the mapping must not change any more."""
        self._waiting.append(taken_s)
        if len(self._waiting) >= COUNTED_AT_ONCE:
            self._count()

    def series(self) -> dict[Labels, Numbers]:
        self._count()
        return super().series()

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        for phase in PHASES:
            self.labels(phase).observe_all([*filter(_IS_PRESENT, map(methodcaller("get", phase), waiting))])
