"""Divides each limit among the processes that enforce it together, so that none asks another during a request.

Each process has a ceiling for what it may have used in the window. The ceilings of one limit never add up to more than
the limit, so it is kept while every process uses what it has without a word to the others. In the background, a process
reports what it used of each limit and how much more it expects to need: what its requests wait for, and what it will
probably use until the next exchange; the less is left, the less each asks to keep for itself. It gets a new ceiling
from the book, a script in Redis (`stores/scripts.py`): out of what no other process may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from router.admission.meter import WINDOW_S, Dimension, HourWindow, Meter

ROW_TTL_S = 3.0
"""A process without a report for this long is gone; what it has used is free."""
SILENT_S = 1.0
"""What a process may use more than it has used is free after this long without an exchange, which may take half of
that."""


class CeilingReport(msgspec.Struct, frozen=True, array_like=True):
    """One limit as a process sees it: what it has used, and how much more it wants to be allowed."""

    meter: str
    limit: int
    used: int
    wanted: int
    kept_s: float = ROW_TTL_S
    """What a process has used counts for this long after its last report."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a report: what this process may have used at most, what the others have used, and what no process
    may use yet; this is negative where some used more than their ceiling, because requests cost more than expected."""

    ceiling: int
    others_used: int
    free: int


class Grants(msgspec.Struct, frozen=True, array_like=True):
    """The answers to reports, in their order, and the number of processes."""

    grants: list[Grant]
    members: int


def local_ceiling(limit: int, ceiling: float, free: int, members: int) -> float:
    """What a process may use in the first minute after it lost the book: what it was granted, and its part of what was
    free."""
    return min(limit, ceiling + max(0, free) // members)


TOLERANCE = 0.02
"""Part of a limit that the processes may use together beyond it, so that a process with little traffic need not ask."""
AWAY_CONCURRENT = 8
"""Without the book, a process may have as many concurrent requests if the others left room for them when it was lost:
local shares of a small limit would refuse requests while most of it is free."""
KEPT_S = 10
"""A process keeps a share for its next requests this long after the last one."""
REFRESH_S = 1
"""Meters in use are reported this often, even if nothing changes: a third of the time after which they expire."""
RETURN_S = 2.0
"""Time in which all processes come back to a book that was lost, perhaps with its content. Until then each claims
its local share."""
MAX_REPORTS = 128
"""Maximum reports in an exchange; others follow with the next one."""


class MeterSharing:
    """The meters of one process among several. At first no other process can be reached."""

    def __init__(self, processes: int = 1) -> None:
        self.changed: dict[str, Meter] = {}
        self.members = processes
        """Number of processes in the last exchange."""
        self.is_away = True
        """Whether this process uses its local shares, because the book cannot be reached or is just coming back."""
        self._return_s: float | None = None
        """Time from which the book is used again."""
        self.was_lost = False
        """Whether the book was ever not reached in time."""
        self._refresh: dict[str, tuple[int, Meter]] = {}
        """Meters in use and when to report them, earliest first."""
        self._sent: list[Meter] = []
        self._lost_second = -WINDOW_S
        self._local: set[str] = set()
        """Meters whose ceiling is the local share, computed once after the book was lost: it would grow with use."""

    def mark_used(self, meters: Sequence[Meter], second: int, amount: int) -> None:
        """Report these meters with the next exchange, as used now."""
        for meter in meters:
            self.changed[meter.key] = meter
            meter.last_amount, meter.last_second = amount, second

    def mark_changed(self, meters: Sequence[Meter]) -> None:
        """Report these meters with the next exchange."""
        for meter in meters:
            self.changed[meter.key] = meter

    def reports(self, now_s: float) -> list[CeilingReport]:
        """The next reports. Until they are answered, this process uses no more than it asked for."""
        second = int(now_s)
        self._sent = [self.changed.pop(key) for key in list(islice(self.changed, MAX_REPORTS))]
        for key, (due, meter) in list(islice(self._refresh.items(), MAX_REPORTS - len(self._sent))):
            if due <= second:
                del self._refresh[key]
                if meter not in self._sent:
                    self._sent.append(meter)
        return [self._report(meter, second) for meter in self._sent]

    def _report(self, meter: Meter, second: int) -> CeilingReport:
        used, wanted = meter.own.at(second), meter.waiting
        meter.waiting = 0
        if self.is_away and meter.key in self._local:
            return CeilingReport(meter.key, meter.limit, used, max(0, int(meter.ceiling) - used), _kept_s(meter))
        if second - meter.last_second < KEPT_S:
            soon = max(2 * meter.last_amount, used // KEPT_S)
            wanted += min(soon, meter.remaining(second) // (2 * self.members))
        meter.ceiling = min(meter.ceiling, used + wanted)
        return CeilingReport(meter.key, meter.limit, used, wanted, _kept_s(meter))

    def granted(self, answer: Grants, now_s: float) -> None:
        """Apply the answer to the last reports, once."""
        second = int(now_s)
        self.members = max(1, answer.members)
        self._end_away(now_s)
        for meter, grant in zip(self._sent, answer.grants, strict=True):
            meter.others.set_total(second, grant.others_used)
            if not self.is_away:
                meter.ceiling, meter.free = grant.ceiling, grant.free
                if grant.free >= 0 and self.members > 1:  # else the tolerance would grow with each exchange
                    meter.ceiling += TOLERANCE * meter.limit / self.members
            if grant.ceiling or meter.own.total:
                self._refresh.pop(meter.key, None)
                self._refresh[meter.key] = second + REFRESH_S, meter
        self._sent = []

    def _end_away(self, now_s: float) -> None:
        if self.is_away and self.was_lost and self._return_s is None:
            self._return_s = now_s + RETURN_S
        if self._return_s is None or now_s >= self._return_s:
            self.is_away, self._return_s = False, None

    def lost(self, now_s: float) -> None:
        """The last reports were not answered in time: use the local share until the next answer, late or not."""
        if not self.is_away:
            self.is_away, self.was_lost, self._lost_second = True, True, int(now_s)
            self._local.clear()
            self.changed.update((meter.key, meter) for _, meter in self._refresh.values())
        self._return_s = None
        self.changed.update((meter.key, meter) for meter in self._sent)

    def admits_away(self, meter: Meter, second: int, amount: int) -> bool:
        """Whether this amount fits into the local share while the book cannot be reached. A limit that this process has
        not used is never closed."""
        if not self.is_away:
            return False
        used = meter.own.at(second)
        if meter.key not in self._local:
            self._local.add(meter.key)
            meter.ceiling = local_ceiling(meter.limit, meter.ceiling, meter.free, self.members)
            if meter.dimension is Dimension.CONCURRENT:
                meter.ceiling = max(meter.ceiling, min(AWAY_CONCURRENT, meter.limit - meter.others.total))
        if second >= self._lost_second + meter.own.window_s:  # what the others had used is no longer in the window
            meter.ceiling = max(meter.ceiling, meter.limit // self.members)
        return used + amount <= (meter.ceiling if used else meter.limit)


def _kept_s(meter: Meter) -> float:
    """Money that a process has spent stays spent after its end; of the rest, a minute is soon over."""
    return HourWindow.kept_s if meter.dimension is Dimension.MONEY else ROW_TTL_S
