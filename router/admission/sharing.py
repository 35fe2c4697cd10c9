"""Reports what this process uses of each limit, and applies the ceilings that it is granted.

A process asks for what its requests wait for, and for what it will probably use until the next exchange: the less is
left of a limit, the less each process asks to keep for itself.
"""

from __future__ import annotations

from itertools import islice

from router.admission.meter import Meter
from router.admission.shares import Grants, ShareReport, away_ceiling

TOLERANCE = 0.02
"""Part of a limit that the processes may use together beyond it, so that a process with little traffic need not ask."""
KEPT_S = 10
"""A process keeps a share for its next requests this long after the last one."""
REFRESH_S = 1
"""Meters in use are reported this often, even if nothing changes: a third of the time after which they expire."""
MAX_REPORTS = 128
"""Of one exchange; others follow with the next one."""


class MeterSharing:
    """The meters of one process among several. At first no other process can be reached."""

    def __init__(self, processes: int = 1) -> None:
        self.changed: dict[str, Meter] = {}
        self.members = processes
        """Number of processes in the last exchange."""
        self.is_away = True
        """Whether the book of shares cannot be reached."""
        self._refresh: dict[str, tuple[int, Meter]] = {}
        """Meters in use and when to report them, earliest first."""
        self._sent: list[Meter] = []
        self._local: set[str] = set()
        """Meters whose ceiling is the local share, computed once after the book was lost: it would grow with use."""

    def reports(self, now_s: float) -> list[ShareReport]:
        """The next reports. Until they are answered, this process uses no more than it asked for."""
        second = int(now_s)
        self._sent = [self.changed.pop(key) for key in list(islice(self.changed, MAX_REPORTS))]
        for key, (due, meter) in list(islice(self._refresh.items(), MAX_REPORTS - len(self._sent))):
            if due <= second:
                del self._refresh[key]
                if meter not in self._sent:
                    self._sent.append(meter)
        return [self._report(meter, second) for meter in self._sent]

    def _report(self, meter: Meter, second: int) -> ShareReport:
        used, wanted = meter.own.at(second), meter.waiting
        meter.waiting = 0
        if second - meter.last_second < KEPT_S:
            soon = max(2 * meter.last_amount, used // KEPT_S)
            wanted += min(soon, meter.remaining(second) // (2 * self.members))
        meter.ceiling = min(meter.ceiling, used + wanted + self._tolerance(meter, second))
        return ShareReport(meter.key, meter.limit, used, wanted)

    def granted(self, answer: Grants, now_s: float) -> None:
        """Apply the answer to the last reports."""
        second = int(now_s)
        self.members, self.is_away = max(1, answer.members), False
        for meter, grant in zip(self._sent, answer.grants, strict=True):
            meter.others.set_total(second, grant.others_used)
            meter.ceiling = grant.ceiling + self._tolerance(meter, second)
            if grant.ceiling or meter.own.total:
                self._refresh.pop(meter.key, None)
                self._refresh[meter.key] = second + REFRESH_S, meter
        self._sent = []

    def lost(self) -> None:
        """The reports were not answered: use the local share until the next answer."""
        if not self.is_away:
            self.is_away = True
            self._local.clear()
        self.changed.update((meter.key, meter) for meter in self._sent)
        self._sent = []

    def admits_away(self, meter: Meter, second: int, amount: int) -> bool:
        """Whether this amount fits into the local share while the book cannot be reached. A limit that this process has
        not used is never closed."""
        if not self.is_away:
            return False
        used = meter.own.at(second)
        if meter.key not in self._local:
            self._local.add(meter.key)
            meter.ceiling = away_ceiling(meter.limit, used, meter.others.at(second), self.members)
        return used + amount <= (meter.ceiling if used else meter.limit)

    def _tolerance(self, meter: Meter, second: int) -> float:
        """What may be used beyond the ceiling: nothing near the limit, or it would grow with each exchange."""
        tolerated = TOLERANCE * meter.limit
        return tolerated / self.members if tolerated <= meter.remaining(second) and self.members > 1 else 0.0
